"""Attention over a cache whose tokens are rows of bytes and, some of them, exact."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.tiles import attend_tiles

from .parts import CodedPart


if TYPE_CHECKING:
    from kvcache_plugins.kernels.layer import PreparedCall


def attend(
    query: torch.Tensor,
    parts: Iterable[DensePart | CodedPart],
    num_key_value_heads: int,
    scale: float | None,
    kernel: str,
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
            from .triton_attention import attend as attend_with_triton

            return attend_with_triton(query, parts, num_key_value_heads, scale)
    tiles = (tile for part in parts for tile in (part.tiles() if isinstance(part, CodedPart) else (part,)))
    return attend_tiles(query, tiles, num_key_value_heads, scale)


def prepare_tokens(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_key_value_heads: int, scale: float | None
) -> "PreparedCall | None":
    """Compiled attention of tokens to come; see `ops.attention.prepare_tokens`."""
    from kvcache_plugins.kernels.rows import can_attend, prepare_rows

    if not can_attend(parts):
        return None
    factor = query.shape[3] ** -0.5 if scale is None else scale
    return prepare_rows(query, parts, num_key_value_heads, factor).prepare()
