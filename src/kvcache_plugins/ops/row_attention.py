"""Attention over a cache whose tokens are rows of bytes and, some of them, exact.

Legend: B batch, H key/value heads, T tokens, R bytes of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugins.codecs.codec import Codec, Positions

from .masking import slice_mask
from .parts import DensePart
from .tiles import attend_tiles


if TYPE_CHECKING:
    from kvcache_plugins.kernels.layer import PreparedCall

# Dense float32 values of one tile stay within the processor's caches
TILE_TOKENS = 1024


@dataclass(frozen=True, eq=False)
class CodedPart:
    """
    Tokens that are rows.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): rows; there may be room for more.
        codec (`Codec`): what they mean.
        positions (`Positions`): of the tokens.
        length (`int`): tokens in use, T.
        mask (`torch.Tensor`, *optional*): as in `CompressedPart`.
        num_tokens (`torch.Tensor`, *optional*), kept (`dict[str, Any]`): the same.
    """

    keys: torch.Tensor
    values: torch.Tensor
    codec: Codec
    positions: Positions
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def tiles(self) -> Iterator[DensePart]:
        """The same tile by tile, dense in float32."""
        for first in range(0, self.length, TILE_TOKENS):
            last = min(first + TILE_TOKENS, self.length)
            keys = self.codec.decode_keys(self.keys[:, :, first:last], self.positions.after(first))
            values = self.codec.decode_values(self.values[:, :, first:last])
            yield DensePart(keys, values, last - first, slice_mask(self.mask, first, last))


def attend(
    query: torch.Tensor,
    parts: Iterable[DensePart | CodedPart],
    num_key_value_heads: int,
    scale: float | None,
    kernel: str,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of queries over all parts; the arguments are those of `ops.attention.attend`.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if kernel == "compiled":
        # Imported late, as it needs a package that may not be there
        from kvcache_plugins.kernels.rows import attend_rows, can_attend

        parts = list(parts)
        if can_attend(parts):
            return attend_rows(query, parts, num_key_value_heads, scale)
    if kernel == "triton":
        parts = list(parts)
        # Without rows PyTorch's own steps are the fast ones
        if any(isinstance(part, CodedPart) for part in parts):
            from kvcache_plugins.kernels.triton_rows import attend as attend_with_triton

            return attend_with_triton(query, parts, num_key_value_heads, scale)
    tiles = (tile for part in parts for tile in (part.tiles() if isinstance(part, CodedPart) else (part,)))
    return attend_tiles(query, tiles, num_key_value_heads, scale, softcap, sinks)


def prepare_tokens(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_key_value_heads: int, scale: float | None
) -> "PreparedCall | None":
    """Compiled attention of tokens to come; see `ops.attention.prepare_tokens`."""
    from kvcache_plugins.kernels.rows import can_attend, prepare_rows

    if not can_attend(parts):
        return None
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return prepare_rows(query, parts, num_key_value_heads, factor).prepare()
