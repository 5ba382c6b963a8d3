"""The part of a cache that is rows of bytes, and attention over it in plain PyTorch, a tile at a time.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcache_plugins.codecs.rotation import rotate
from kvcache_plugins.ops.masking import slice_mask
from kvcache_plugins.ops.parts import DensePart

from .basis_coder import BasisCoder
from .rotary import RotaryLayout
from .rows import RowTable, is_coded_by_triton, is_coded_in_c
from .turning import turn


# Dense float32 values of one tile stay within the processor's caches
TILE_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class RowCoder:
    """
    How a layer's keys and values become rows, and come back.

    Attributes:
        keys, values (`RowTable`): the tables of both sides.
        layout (`RotaryLayout`): of the keys' rotary embedding.
        value_mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): taken off values before they are coded,
            0 but in steady heads, see `statistics.steady_mean`.
    """

    keys: RowTable
    values: RowTable
    layout: RotaryLayout
    value_mean: torch.Tensor | None = None

    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, padding: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Rows `[B, H, T, R]` of keys and of values `[B, H, T, D]` from index `start` on, given the tokens `[B]` at the
        start of every item that have no position.
        """
        return self._encode_keys(keys, start, padding), self._encode_values(values)

    def _encode_keys(self, keys: torch.Tensor, start: int, padding: torch.Tensor | None) -> torch.Tensor:
        if is_coded_by_triton(keys, self.keys.quantizer):
            # Imported late, as it needs a package that may not be there
            from .triton_coding import encode_keys

            return encode_keys(keys, self.keys, self.layout, start, padding)
        if is_coded_in_c(keys, self.keys.head_dim):
            from kvcache_plugins.kernels.coding import Turn, encode_rows

            return encode_rows(keys, self.keys, Turn(self.layout, start, padding))
        return self.keys.encode(turn(keys, self.layout, start, padding, is_back=True))

    def _encode_values(self, values: torch.Tensor) -> torch.Tensor:
        if self.value_mean is not None:
            values = values.float() - self.value_mean.float()[:, :, None]
        if is_coded_by_triton(values, self.values.quantizer):
            from .triton_coding import encode_values

            return encode_values(values, self.values)
        if is_coded_in_c(values, self.values.head_dim):
            from kvcache_plugins.kernels.coding import encode_rows

            return encode_rows(values, self.values, is_rotated=True)
        return self.values.encode(rotate(values))

    def decode_keys(self, rows: torch.Tensor, start: int, padding: torch.Tensor | None) -> torch.Tensor:
        """Keys `[B, H, T, D]`, float32, of rows from index `start` on."""
        if is_coded_in_c(rows, self.keys.head_dim):
            from kvcache_plugins.kernels.coding import Turn, decode_rows

            return decode_rows(rows, self.keys, Turn(self.layout, start, padding))
        return turn(self.keys.decode(rows), self.layout, start, padding, is_back=False)

    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Values `[B, H, T, D]`, float32, of rows."""
        values = self.values.decode_rotated(rows)
        return values if self.value_mean is None else values + self.value_mean.float()[:, :, None]

    @property
    def row_sizes(self) -> tuple[int, int]:
        """Bytes of a key and of a value."""
        return self.keys.row_size, self.values.row_size

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything stored."""
        for table in (self.keys, self.values):
            yield from (tensor for _, tensor in table.named_tensors())
        if self.value_mean is not None:
            yield self.value_mean

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RowCoder":
        """The same with `function` applied to every tensor."""
        mean = None if self.value_mean is None else function(self.value_mean)
        return RowCoder(self.keys.map(function), self.values.map(function), self.layout, mean)


@dataclass(frozen=True, eq=False)
class CodedPart:
    """
    Tokens that are rows.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): rows; there may be room for more.
        coder (`RowCoder` or `BasisCoder`): what they mean.
        start (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
        length (`int`): tokens in use, T.
        mask (`torch.Tensor`, *optional*): as in `CompressedPart`.
        num_tokens (`torch.Tensor`, *optional*), kept (`dict[str, Any]`): the same.
    """

    keys: torch.Tensor
    values: torch.Tensor
    coder: RowCoder | BasisCoder
    start: int
    padding: torch.Tensor | None
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def tiles(self) -> Iterator[DensePart]:
        """The same tile by tile, dense in float32."""
        for first in range(0, self.length, TILE_TOKENS):
            last = min(first + TILE_TOKENS, self.length)
            keys = self.coder.decode_keys(self.keys[:, :, first:last], self.start + first, self.padding)
            values = self.coder.decode_values(self.values[:, :, first:last])
            yield DensePart(keys, values, last - first, slice_mask(self.mask, first, last))
