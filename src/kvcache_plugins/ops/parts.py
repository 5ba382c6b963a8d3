"""The parts of a cache that attention goes over.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a part, D head dim.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcache_plugins.codecs.groups import CompressedStates, tile_slices

from .masking import slice_mask


@dataclass(frozen=True, eq=False, slots=True)
class DensePart:
    """
    Exact states.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, at least T, D]`): the states; there may be room for more.
        length (`int`): tokens in use, T.
        mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*): boolean (`True` attends) or
            added to the scores.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, at most `length`: for Triton's kernels alone.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None

    def in_use(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the tokens in use."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


@dataclass(frozen=True, eq=False, slots=True)
class CompressedPart:
    """
    Compressed states.

    Attributes:
        keys, values (`CompressedStates`): the states.
        length (`int`): tokens in use, T; the chunks may have room for more.
        mask (`torch.Tensor`, *optional*): as in `DensePart`. It may have fewer columns, but several: what they do not
            cover is attended to.
        num_tokens (`torch.Tensor` of shape `[1]`, integer, *optional*): tokens in use where the host does not know
            them, at most `length`: for Triton's kernels alone.
        kept (`dict[str, Any]`): what a kernel keeps of a step over this very part for the next one.
    """

    keys: CompressedStates
    values: CompressedStates
    length: int
    mask: torch.Tensor | None
    num_tokens: torch.Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    def tiles(self) -> Iterator[DensePart]:
        """Yields the same tile by tile, dequantized to float32."""
        for chunks, tokens, start, stop in tile_slices(self.keys, self.length):
            keys, values = (
                side.dequantize_tile(chunks, tokens)[:, :, : stop - start] for side in (self.keys, self.values)
            )
            yield DensePart(keys, values, stop - start, slice_mask(self.mask, start, stop))
