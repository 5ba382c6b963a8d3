"""Tokens of keys or values coded one by one, and decoded: the reference in plain PyTorch.

    token -> its channels in the order of the table, less a mean, over a standard deviation
          -> over the token's own scale: 8 bits, log2 in steps of 1/16
          -> codes, of as many bits as the block of eight channels has: `[scale | block | block | ...]`

Everything but the scale is the head's, in a `RowTable`. The scale that is stored is found after the codes: for keys
the one of least error where every channel counts by its energy, which goes with `4^width`; for values `z.z / z.q`,
which leaves them as large as they were: what attention sums up must not shrink with every token.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.rotation import rotate
from kvcache_plugins.ops.dispatch import choose_coding_kernel

from .allocation import BLOCK
from .quantizers import QUANTIZERS, Quantizer, unshrunk


_SCALE_STEPS = 16.0
_SCALE_OFFSET = 128
# As far as scales go: tokens may be larger still
LAST_SCALE = 255
# Numbers that are coded or decoded at a time
_NUMBERS_AT_A_TIME = 2**18
# Below that share of what it would be without error, `z.q` says nothing
_LEAST_GAIN = 0.3
# Of kernels: more channels would not fit into registers
_MAX_KERNEL_DIM = 256
# `kernels.layer.MOST_CHANNELS`
_MOST_C_DIM = 640
_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TENSOR_NAMES = ("order", "mean", "deviation", "widths")


@dataclass(frozen=True, eq=False)
class RowTable:
    """
    How the tokens of one side are coded.

    Attributes:
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*): the channels by falling energy.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): of every channel.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16): what channels are divided by.
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8): bits of the blocks of eight channels, in that order.
        row_size (`int`): R, one byte more than the sum of a head's widths.
        head_dim (`int`): D.
        is_weighted (`bool`): whether the scale is the one of least weighted error, or shrinks nothing.
        by_energy (`bool`): whether channels count by their energy in a scale that shrinks nothing, too.
        num_refits (`int`): times that codes are found anew for the scale that was found. Few tokens need it: those of
            which one channel is far larger than the others. Their codes would end before it, and they are the ones
            that many others attend to.
        quantizer (`str`, *optional*, defaults to `"lloyd-max"`): one of `QUANTIZERS`.
    """

    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor
    widths: torch.Tensor
    row_size: int
    head_dim: int
    is_weighted: bool
    by_energy: bool = False
    num_refits: int = 0
    quantizer: str = "lloyd-max"

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of everything stored."""
        for name in TENSOR_NAMES:
            tensor: torch.Tensor | None = getattr(self, name)
            if tensor is not None:
                yield name, tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowTable":
        """The same table with `function` applied to every tensor."""
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self.named_tensors()}
        return dataclasses.replace(self, **changes)

    def set_item(self, item: int, table: "RowTable") -> None:
        """Puts the table of one item in the place of another's."""
        own = dict(table.named_tensors())
        for name, tensor in self.named_tensors():
            tensor[item] = own[name][0]

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, T, R]`, uint8, of states `[B, H, T, D]` in any floating dtype."""
        if states.is_meta:
            return states.new_empty(*states.shape[:3], self.row_size, dtype=torch.uint8)
        if is_coded_in_c(states, self.head_dim):
            # Imported late, as it imports this module
            from kvcache_plugins.kernels.coding import encode_rows

            return encode_rows(states, self)
        return torch.cat([self._encode(part) for part in self._split(states)], dim=2)

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """States `[B, H, T, D]`, float32, of rows `[B, H, T, R]`."""
        if is_coded_in_c(rows, self.head_dim):
            from kvcache_plugins.kernels.coding import decode_rows

            return decode_rows(rows, self, is_rotated=False)
        return torch.cat([self._decode(part) for part in self._split(rows)], dim=2)

    def decode_rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """The same where states were rotated before they were coded, see `codecs.rotation`: these as they were."""
        if is_coded_in_c(rows, self.head_dim):
            from kvcache_plugins.kernels.coding import decode_rows

            return decode_rows(rows, self, is_rotated=True)
        return rotate(self.decode(rows))

    def _split(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch_size, num_heads = tokens.shape[:2]
        return tokens.split(max(_NUMBERS_AT_A_TIME // (batch_size * num_heads * self.head_dim), 1), dim=2)

    def _encode(self, states: torch.Tensor) -> torch.Tensor:
        normal = self._normalize(states.float())
        has_bits = (self.widths > 0).float()[:, :, None, :, None]
        count = (has_bits.sum(dim=(-1, -2), keepdim=True) * BLOCK).clamp(min=1)
        found, _ = _stored_scale(((normal * normal * has_bits).sum(dim=(-1, -2), keepdim=True) / count).sqrt())
        for number in range(1 + self.num_refits):
            scale = found
            codes = self._quantizer.quantize(normal / scale, self.widths, self.is_weighted or self.by_energy)
            found, stored = _stored_scale(self._fitting_scale(normal, has_bits, self._points(codes), scale))
            # Asked for only where it saves something: the host would wait for a GPU
            if number < self.num_refits and bool((found == scale).all()):
                break
        return self._quantizer.pack(codes, stored.flatten(3), self.widths, self.row_size)

    def _fitting_scale(
        self, normal: torch.Tensor, has_bits: torch.Tensor, points: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        """The scale `[B, H, T, 1, 1]` for points that were found with `scale`."""
        # What reverse waterfilling has given bits to has energies in inverse proportion to its distortions
        weights = has_bits * 4.0 ** self.widths.float()[:, :, None, :, None]
        if self.is_weighted:
            over, under = weights * normal * points, weights * points * points
            return over.sum(dim=(-1, -2), keepdim=True) / under.sum(dim=(-1, -2), keepdim=True).clamp(min=1e-9)
        counted = weights * normal if self.by_energy else normal
        energy = (counted * normal).sum(dim=(-1, -2), keepdim=True)
        product = (counted * points).sum(dim=(-1, -2), keepdim=True)
        return torch.where(product > _LEAST_GAIN * energy / scale, energy / product, scale)

    def _decode(self, rows: torch.Tensor) -> torch.Tensor:
        points = self._points(self._quantizer.unpack(rows, self.widths)).flatten(3)[..., : self.head_dim]
        if self.order is not None:
            order = self.order.long()[:, :, None].expand_as(points)
            points = torch.empty_like(points).scatter_(3, order, points)
        states = points * scale_of(rows[..., :1]) * self.deviation.float()[:, :, None]
        return states if self.mean is None else states + self.mean.float()[:, :, None]

    def _normalize(self, states: torch.Tensor) -> torch.Tensor:
        """Channels in the order of the table, without mean and deviation, `[B, H, T, N, 8]`."""
        if self.mean is not None:
            states = states - self.mean.float()[:, :, None]
        deviation = self.deviation.float()
        # A channel that does not vary is its mean
        normal = states * torch.where(deviation > 0, 1 / deviation, 0)[:, :, None]
        if self.order is not None:
            normal = normal.gather(3, self.order.long()[:, :, None].expand_as(normal))
        return F.pad(normal, (0, -self.head_dim % BLOCK)).unflatten(3, (-1, BLOCK))

    @property
    def _quantizer(self) -> Quantizer:
        return QUANTIZERS[self.quantizer]

    def _points(self, codes: torch.Tensor) -> torch.Tensor:
        """The points of codes `[B, H, T, N, 8]`, of values as large as what they stand for."""
        points = self._quantizer.points(codes, self.widths)
        if self.is_weighted:
            return points
        return points * unshrunk(self.quantizer).to(points.device)[self.widths.long()][:, :, None, :, None]


def is_coded_by_triton(states: torch.Tensor, quantizer: str) -> bool:
    """Whether Triton's kernels code states `[B, H, T, D]`: see `triton_coding` for what they do not cover."""
    if states.is_meta or states.shape[3] > _MAX_KERNEL_DIM or states.dtype not in _KERNEL_DTYPES:
        return False
    return quantizer == "lloyd-max" and choose_coding_kernel(states) == "triton"


def is_coded_in_c(tokens: torch.Tensor, head_dim: int) -> bool:
    """Says if C kernels code or decode tokens of so many channels, given states or rows of them."""
    return head_dim <= _MOST_C_DIM and choose_coding_kernel(tokens) == "compiled"


def order_dtype(head_dim: int) -> torch.dtype:
    """What channels of a head are numbered in."""
    return torch.uint8 if head_dim <= 256 else torch.int16


def _stored_scale(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A scale `[B, H, T, 1, 1]` as it comes back, and the byte that it is stored as."""
    steps = (scale.clamp(min=1e-6).log2() * _SCALE_STEPS).round() + _SCALE_OFFSET
    stored = steps.nan_to_num(0).clamp(0, LAST_SCALE).to(torch.uint8)
    return scale_of(stored), stored


def scale_of(stored: torch.Tensor) -> torch.Tensor:
    """The scales that bytes stand for."""
    return torch.exp2((stored.float() - _SCALE_OFFSET) / _SCALE_STEPS)
