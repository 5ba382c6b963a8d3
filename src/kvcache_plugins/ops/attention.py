"""Attention over a cache that is partly dense and partly compressed, by whatever kernel was chosen.

In plain PyTorch compressed parts are taken tile by tile: a layer's dense keys and values are never whole in memory,
nor is the matrix of scores.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .operators import decode_attention, flatten_parts, run_kernel
from .parts import CompressedPart, DensePart
from .tiles import attend_tiles


if TYPE_CHECKING:
    from kvcache_plugins.kernels.layer import PreparedCall


def attend(
    query: torch.Tensor,
    parts: Iterable[DensePart | CompressedPart],
    num_key_value_heads: int,
    scale: float | None = None,
    kernel: str = "torch",
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of a few queries over all parts of a cache.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`):
            Queries.
        parts (`Iterable[DensePart | CompressedPart]`):
            What is attended to, each token in one part.
        num_key_value_heads (`int`):
            H.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`):
            Factor of the scores.
        kernel (`str`, *optional*, defaults to `"torch"`):
            What computes: what `engine.choose_kernel` returned.
        softcap, sinks (*optional*):
            As in `AttentionCall`, which only PyTorch's kernel knows.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    # Of PyTorch's kernel one after another: a part may come from elsewhere, and not all may fit into memory at once
    given = [] if kernel == "torch" else list(parts)
    if kernel == "compiled":
        # Imported late, as it needs a library that may not be there
        from kvcache_plugins.kernels.groups import can_attend

        kernel = "compiled" if can_attend(given[0]) else "torch"
    if kernel != "torch":
        compressed = [part for part in given if isinstance(part, CompressedPart)]
        # The compiled kernel does exact tokens too; for few of them PyTorch's own steps cost more than they compute
        if kernel == "compiled" or compressed:
            if torch.compiler.is_compiling():
                return decode_attention(query, *flatten_parts(given), scale, kernel)
            dense = [part for part in given if isinstance(part, DensePart)]
            return run_kernel(query, dense, compressed, scale, kernel)
    tiles = (
        tile for part in given or parts for tile in (part.tiles() if isinstance(part, CompressedPart) else (part,))
    )
    return attend_tiles(query, tiles, num_key_value_heads, scale, softcap, sinks)


def prepare_tokens(
    query: torch.Tensor, parts: Sequence[DensePart | CompressedPart], scale: float | None
) -> "PreparedCall | None":
    """
    Compiled attention of tokens to come, whose queries are like `query`, over parts of which the last is exact and
    grows, and all others stay; `None` if what is stored cannot be read where it is. The arguments are as in `attend`.
    """
    from kvcache_plugins.kernels.groups import call_of, can_attend

    if not can_attend(parts[0]):
        return None
    dense = [part for part in parts if isinstance(part, DensePart)]
    compressed = [part for part in parts if isinstance(part, CompressedPart)]
    return call_of(query, dense, compressed, query.shape[3] ** -0.5 if scale is None else scale).prepare()
