"""`Codec`, the interface of all codecs that encode each token of a head as a row of bytes: a layer keeps rows, and a
codec reads them. No codec knows a cache, and no cache knows a format.

A cache makes a codec for each layer out of the layer's head dims. The layer calls, in this order:

    fit(sample)                          with the first tokens to be encoded: returns the codec to use; again with
                                         all tokens once there are many more: rows of before keep their codec
    encode(keys, values, positions)      rows, for every run of tokens; `overflow(...)` checks them
    with_bias_correction(rows, sample)   once, after the first `encode` of a fit: returns the codec to read with
    part(rows, ...)                      the rows in the form that attention takes
    decode_keys(rows, positions), decode_values(rows)

Kernels compute attention over rows if `has_kernels`, PyTorch otherwise.

Legend: B batch, H key/value heads, G query heads a key/value head, T tokens, Q queries, D head dim, R bytes of a row,
C layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import torch

from kvcache_plugins.files.schema import Stored
from kvcache_plugins.formats.hadamard import multiply
from kvcache_plugins.formats.parts import OpaqueRowPart, RowPart
from kvcache_plugins.formats.positions import START, Positions
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import RowFormats, Rows


if TYPE_CHECKING:
    from typing_extensions import Self

# Sizes of a layer's state
_HEADS = "batch_size", "num_heads", "key_head_dim"


@dataclass(frozen=True, eq=False)
class QueryMoments:
    """
    Sums over queries, by key/value head.

    Attributes:
        squares (`torch.Tensor` of shape `[B, H, D]`): sums of squared channels.
        products (`torch.Tensor` of shape `[B, H, C, D]`): sums of channels times their partners in every layout.
    """

    squares: Annotated[torch.Tensor, Stored(_HEADS, torch.float32, least=0)]
    products: Annotated[torch.Tensor, Stored((*_HEADS[:2], None, _HEADS[2]), torch.float32)]

    @classmethod
    def of(
        cls, query: torch.Tensor, num_heads: int, layouts: Sequence[RotaryLayout], valid: torch.Tensor | None
    ) -> QueryMoments:
        """Sums over queries `[B, H * G, Q, D]`, after the rotary embedding: all, or those `valid` `[B, Q]`."""
        query = query.float()
        if valid is not None:
            query = query * valid[:, None, :, None]
        query = query.unflatten(1, (num_heads, -1)).flatten(2, 3)
        gram = multiply(query.mT, query)
        partners = [channels_of(layout, query.device)[0] for layout in layouts]
        at = torch.arange(gram.shape[2], dtype=torch.int64, device=query.device)
        return cls(gram[:, :, at, at], torch.stack([gram[:, :, at, other] for other in partners], dim=2))

    def plus(self, other: QueryMoments) -> QueryMoments:
        """Add the sums over other queries."""
        return QueryMoments(self.squares + other.squares, self.products + other.products)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> QueryMoments:
        """Apply a function to both tensors."""
        return QueryMoments(function(self.squares), function(self.products))


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class CodecState:
    """
    State of a codec that was fitted to a layer's tokens, beside the options.

    Attributes:
        rotary (`str`), first_rotated (`int`): name and first channel of the keys' rotary embedding.
        frequencies (`torch.Tensor` of shape `[pairs]`, float32): its radians a token.
        keys, values (`dict[str, torch.Tensor]`): the tensors of both sides by name.
        fitted_length (`int`, *optional*): see `PackingCodec`; files of earlier versions do not name it.
    """

    rotary: str
    first_rotated: int
    frequencies: Annotated[torch.Tensor, Stored((None,), torch.float32)]
    keys: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    fitted_length: int | None = None


class Sample(NamedTuple):
    """
    Consecutive tokens that a codec is fitted to.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, T, D]`): states of any floating dtype.
        valid (`torch.Tensor` of shape `[B, T]`, bool, *optional*): tokens that count; all by default.
        moments (`QueryMoments`, *optional*): moments of queries; without them all channels count the same.
        positions (`Positions`): positions of the tokens.
    """

    keys: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor | None
    moments: QueryMoments | None = None
    positions: Positions = START


class PackingCodec:
    """
    Base of codecs of rows and of groups.

    Attributes:
        has_kernels (`bool`): True if kernels compute attention over packed tokens, beside plain PyTorch.
        layouts (`Sequence[RotaryLayout]`): layouts of the `QueryMoments` that `fit` needs. Empty if it needs none, and
            the codec is the same whatever the tokens are.
        fitted_length (`int`): tokens of the longest sequence, without padding, when the codec was fitted; 0 if it is
            not, or not known.
    """

    has_kernels = False
    layouts: Sequence[RotaryLayout] = ()
    fitted_length: int = 0

    @property
    def shared_formats(self) -> RowFormats | None:
        """Formats of rows that all caches of a model share, if the codec has such."""
        return None

    def fit(self, sample: Sample) -> Self:
        """Return the codec for a sample, whose `valid` is given, and for the tokens that will follow it."""
        return self

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise a `ValueError` if states `[B, H, T, D]` are of another model than the codec."""
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """List the tensors that a cache holds for the codec, and counts as its memory."""
        return iter(())

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        """List the tensors that all caches of a model share, on every device."""
        return iter(())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """Return the codec with `function` applied to every tensor that has a row for each sequence of the batch."""
        return self


class Codec(PackingCodec, ABC):
    """Encodes every token of a head on its own, as a row of a fixed number of bytes."""

    @property
    @abstractmethod
    def row_sizes(self) -> tuple[int, int]:
        """Bytes of a key and of a value, known before the codec is fitted."""

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor, positions: Positions) -> Rows:
        """
        Encode keys and values `[B, H, T, D]` of any floating dtype as rows `[B, H, T, R]`, uint8. Raise a
        `ValueError` if the encoding finds states too large for the format.
        """

    @abstractmethod
    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Decode rows to keys `[B, H, T, D]`, float32."""

    @abstractmethod
    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Decode rows to values `[B, H, T, D]`, float32."""

    def part(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: Positions,
        length: int,
        mask: torch.Tensor | None,
    ) -> RowPart | OpaqueRowPart:
        """Make the part that attention takes of `length` rows of consecutive tokens, see `OpaqueRowPart`."""
        return OpaqueRowPart(keys, values, self.decode_keys, self.decode_values, positions, length, mask)

    @property
    def rotary_name(self) -> str | None:
        """Name of the rotary embedding that is undone in keys, once the codec is fitted; `None` if none ever is."""
        return None

    def refit(self, number: int, sample: Sample) -> Self:
        """Return the codec with one sequence fitted anew, to a sample of all its tokens, with `moments` of all."""
        return self

    def with_bias_correction(self, rows: Rows, sample: Sample) -> Self:
        """Return the codec to read with, given rows of the sample that the codec was fitted to."""
        return self

    def with_more_bits(self, nbits: int) -> Codec | None:
        """Return the codec with `nbits` more bits a number; `None` if rows have one size only."""
        return None

    def requantize(self, rows: Rows, nbits: int) -> Rows:
        """Return rows of the codec with `nbits` more bits as rows of this one."""
        raise NotImplementedError

    def formats(self, device: torch.device | None = None) -> RowFormats | None:
        """Return the formats of key and value rows, on a device if they are a model's; `None` without kernels."""
        return None

    def overflow(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Mark tokens `[B, T]` that rows `[B, H, T, R]` cannot hold; `None` if rows hold all tokens."""
        return None

    def state(self) -> CodecState | None:
        """Return the fitted state, without a copy; `None` if nothing was fitted."""
        return None

    def restore(self, state: CodecState, heads: tuple[int, int], path: str) -> Codec:
        """
        Return the codec with the state of another one, fitted to B and H `heads`. Raise a `ValueError` that names
        `path` if no codec of a layer under these options can have that state.
        """
        raise ValueError(f"`{path}`: rows are coded by tables that no cache has of its own")

    @property
    def kernel_kind(self) -> Hashable:
        """Key that is equal for codecs that run the same kernels over states of the same sizes."""
        return type(self)


class SideCoder(Protocol):
    """Coder of keys, or of values, that depends on nothing but the token."""

    @property
    def row_size(self) -> int:
        """Bytes of a row, R."""

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Encode states `[..., D]`, float32, as rows `[..., R]`; a `ValueError` if they are too large."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Decode rows `[..., R]` to states `[..., D]`, float32."""


@dataclass(frozen=True, slots=True)
class TokenCodec(Codec):
    """Codec of keys and values that each have a `SideCoder`."""

    keys: SideCoder
    values: SideCoder

    @property
    def row_sizes(self) -> tuple[int, int]:
        return self.keys.row_size, self.values.row_size

    def encode(self, keys: torch.Tensor, values: torch.Tensor, positions: Positions) -> Rows:
        return self.keys.encode(keys.float()), self.values.encode(values.float())

    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        return self.keys.decode(rows)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        return self.values.decode(rows)
