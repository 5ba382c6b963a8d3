"""`RowFormat`: the meaning of a token's row of bytes.

    token -> before its rotary embedding (keys) -> less a mean -> rotated, or in the basis of its head
          -> channels in the order of the format, over a standard deviation
          -> over the token's own scale: 8 bits, log2 in steps of 1/16
          -> codes, of as many bits as the block of eight channels has: `[scale | block | block | ...]`

Everything but the scale is the head's, in a `RowFormat`: of a prompt, or of a calibration, which has bases.
`kernels.ops` encodes and decodes.

Legend: B batch, H heads, D channels, K numbers that are coded, N blocks of eight numbers, R bytes of a row.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .hadamard import multiply
from .quantizer import MAX_WIDTH
from .rotary import RotaryLayout


# The byte that is a token's scale: steps an octave, the byte of a scale of one, and the last byte, which marks tokens
# that may exceed it
SCALE_STEPS = 16.0
SCALE_OFFSET = 128
LAST_SCALE = 255
# Below that share of its value without error, `z.q` says nothing about a scale
LEAST_GAIN = 0.3

# Rows of keys and of values
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Basis:
    """
    A basis for every head, in which tokens are coded; K components have bits.

    Attributes:
        factors (`torch.Tensor` of shape `[H, D]`, float32): factors of the channels.
        vectors (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, those of most energy
            first.
        steps (`torch.Tensor` of shape `[H, D]`, float32): units of the basis' rows.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8): columns of the inverse, in units such that products with
            rows of the basis are 1.
    """

    factors: torch.Tensor
    vectors: torch.Tensor
    steps: torch.Tensor
    inverse: torch.Tensor

    @property
    def num_components(self) -> int:
        """Components that are coded, K."""
        return self.inverse.shape[1]

    def tensors(self) -> Iterator[torch.Tensor]:
        """List everything stored."""
        yield from vars(self).values()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Basis":
        """Return the basis with `function` applied to every tensor."""
        return Basis(*map(function, self.tensors()))

    def components(self, states: torch.Tensor) -> torch.Tensor:
        """Return components `[B, H, T, K]` of states `[B, H, T, D]`, float32, whose mean has been subtracted."""
        basis, inverse = self._matrices()
        scaled = states * self.factors[:, None]
        components = multiply(scaled, inverse)
        return components + multiply(scaled - multiply(components, basis), inverse)

    def states(self, components: torch.Tensor) -> torch.Tensor:
        """Return states `[B, H, T, D]`, less their mean, of components `[B, H, T, K]`."""
        return multiply(components, self._matrices()[0]) / self.factors[:, None]

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return matrices from components to scaled channels `[H, K, D]`, and back `[H, D, K]`, float32."""
        basis, inverse = self.vectors[:, : self.num_components].float(), self.inverse.float()
        steps = self.steps[:, : self.num_components, None]
        own = (basis * inverse).sum(dim=-1, keepdim=True)
        return basis * steps, (inverse / (own * steps)).mT


# Equal if the same object: kernels keep what they have prepared for one in dictionaries
@dataclass(frozen=True, eq=False)
class RowFormat:
    """
    The format of one side's rows. B is 1 where all sequences share it, as they do a basis.

    Attributes:
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*): the channels by falling energy, as
            rows have them.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): the mean that is subtracted first.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16, *optional*): divisors of the channels.
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8): bits of the blocks of eight numbers, in that order.
        row_size (`int`): bytes of a row, one more than the sum of a head's widths.
        head_dim (`int`): D.
        is_weighted (`bool`): True if the scale is the one of least weighted error, as of keys; otherwise it shrinks
            nothing.
        basis (`Basis`, *optional*): the basis that tokens are coded in.
        num_refits (`int`): times that codes are found anew for the scale that was found, at most. Tokens with one
            channel far larger than the others need it most: their codes would end before it, and they are the ones
            that many others attend to.
        rope (`RotaryLayout`, *optional*): the rotary embedding that is undone first.
        is_rotated (`bool`, *optional*, defaults to `False`): True if a Hadamard matrix rotates tokens, see
            `formats.hadamard`.
        by_energy (`bool`): True if channels count by their energy in a scale that shrinks nothing, too.
    """

    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor | None
    widths: torch.Tensor
    row_size: int
    head_dim: int
    is_weighted: bool
    basis: Basis | None = None
    num_refits: int = 0
    rope: RotaryLayout | None = None
    is_rotated: bool = False
    by_energy: bool = False

    @property
    def num_coefficients(self) -> int:
        """Numbers of a token that are coded, K."""
        return self.head_dim if self.basis is None else self.basis.num_components

    def with_more_bits(self, nbits: int) -> "RowFormat":
        """Return the format of rows with `nbits` more bits a number, up to `MAX_WIDTH`."""
        widths = (self.widths + nbits).clamp(max=MAX_WIDTH)
        # Known without asking a device: rows of heads that have the most bits already end with zeros
        return dataclasses.replace(self, widths=widths, row_size=self.row_size + nbits * widths.shape[2])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """List everything stored but the basis."""
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def tensors(self) -> Iterator[torch.Tensor]:
        """List everything stored."""
        yield from (tensor for _, tensor in self.named_tensors())
        if self.basis is not None:
            yield from self.basis.tensors()

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowFormat":
        """Return the format with `function` applied to every tensor."""
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self.named_tensors()}
        if self.basis is not None:
            changes["basis"] = self.basis.map(function)
        return dataclasses.replace(self, **changes)

    def with_sequence(self, number: int, other: "RowFormat") -> "RowFormat":
        """Return the format with that of one sequence, by `number`, replaced by `other`, which is of one sequence."""
        own = dict(other.named_tensors())
        changed = self.map(torch.clone)
        if self.mean is None and other.mean is not None:
            shape = len(self.widths), *other.mean.shape[1:]
            changed = dataclasses.replace(changed, mean=other.mean.new_zeros(shape))
        for name, tensor in changed.named_tensors():
            tensor[number] = own[name][0] if name in own else 0
        return changed


# Formats of keys and of values
RowFormats = tuple[RowFormat, RowFormat]


class KeptRows(NamedTuple):
    """Rows that stay, from the `first` of `[B, H, any, R]` on, and the `capacity` that others behind them need."""

    rows: Rows
    first: int
    length: int
    capacity: int


def scale_of(stored: torch.Tensor) -> torch.Tensor:
    """Return the scales that bytes encode."""
    return torch.exp2((stored.float() - SCALE_OFFSET) / SCALE_STEPS)
