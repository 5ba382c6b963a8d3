"""Attention over tiles that become dense one after another; by whatever is fastest for them."""

from collections.abc import Iterable

import torch

from kvcache_plugins.kernels.engine import choose_flash

from .flash_attention import FlashAttention
from .online_softmax import OnlineAttention
from .parts import DensePart


def attend_tiles(
    query: torch.Tensor,
    tiles: Iterable[DensePart],
    num_key_value_heads: int,
    scale: float | None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Attention of queries over tiles, each of which need not outlive its turn.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        tiles (`Iterable[DensePart]`): what is attended to, each token in one tile.
        num_key_value_heads (`int`): H.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`): factor of the scores.
        softcap, sinks: as in `AttentionCall`.

    Returns:
        `torch.Tensor` of shape `[B, H * G, Q, value head dim]` in the queries' dtype.
    """
    attention: FlashAttention | OnlineAttention | None = None
    for tile in tiles:
        keys, values = tile.in_use()
        if attention is None:
            if softcap is None and sinks is None and choose_flash(query, values.shape[3]):
                attention = FlashAttention(query, num_key_value_heads, scale)
            else:
                attention = OnlineAttention(query, num_key_value_heads, scale, softcap, sinks)
        attention.add_tile(keys, values, tile.mask)
    assert attention is not None, "there is nothing to attend to"
    return attention.result()
