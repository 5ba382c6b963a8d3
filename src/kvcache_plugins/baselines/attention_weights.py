"""Attention whose weights are seen, a tile of queries at a time: they tell heavy hitters from other tokens.

Fused attention never shows its weights, and the matrix of all of them would be as large as the prompt squared. So
scores are computed for as many queries as fit a tile of fixed size, over all tokens at once: a row of the softmax is
whole within its tile, and what is left of a tile is its output and its sums. Arithmetic is in float32.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, each with a token or free, D
head dim.
"""

from collections.abc import Iterator

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall

from .slot_mask import SlotMask


# Scores of a tile, over the whole batch and all heads, by device: what stays in the caches of a CPU (with tiles eight
# times as large or small a prompt's weights take half as long again), and on others enough to pay for a launch.
# Tensors without data (`meta`), on which caches are sized, fill no cache
_TILE_NUMBERS = {"cpu": 1 << 21, "meta": 1 << 50}
_MANY_NUMBERS = 1 << 25


def weigh(call: AttentionCall, keys: torch.Tensor, mask: SlotMask) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Softmax weights, a tile of queries after another.

    Args:
        call (`AttentionCall`):
            What is attended with, `[B, H * G, Q, D]`; its mask is not looked at.
        keys (`torch.Tensor` of shape `[B, H, S, D]`):
            Keys.
        mask (`SlotMask`):
            What each query may attend to.

    Yields:
        The tile's queries, and their weights `[B, H, G, queries, S]` in float32, all zero where a query may attend to
        nothing. Slots that none of them may attend to can be missing at the end.
    """
    query = call.query
    (batch_size, num_heads, num_queries, head_dim), num_key_value_heads = query.shape, keys.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    keys = keys.float().transpose(2, 3)
    tile_numbers = _TILE_NUMBERS.get(query.device.type, _MANY_NUMBERS)
    tile_length = max(1, tile_numbers // (batch_size * num_heads * keys.shape[3]))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().expand(batch_size, num_heads, num_queries, 1).unflatten(1, (num_key_value_heads, -1))
    for start in range(0, num_queries, tile_length):
        rows = slice(start, min(start + tile_length, num_queries))
        tile = (query[:, :, rows].float() * scale).reshape(batch_size, num_key_value_heads, -1, head_dim)
        scores = tile @ keys[..., : mask.num_slots(rows.stop)]
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch_size, num_key_value_heads, -1, rows.stop - start, scores.shape[3])
        yield rows, mask.softmax(scores, rows, None if sinks is None else sinks[:, :, :, rows])


def sum_weights(
    call: AttentionCall, keys: torch.Tensor, mask: SlotMask, real_queries: torch.Tensor | None
) -> torch.Tensor:
    """
    Weights that tokens get from all queries together.

    Args:
        call, keys, mask: as in `weigh`.
        real_queries (`torch.Tensor` of shape `[B, Q]`, *optional*):
            Which queries are not padding. What padding attends to says nothing.

    Returns:
        `torch.Tensor` of shape `[B, H, S]`, summed over the queries and over the heads of a group.
    """
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for rows, weights in weigh(call, keys, mask):
        if real_queries is not None:
            weights = weights * real_queries[:, None, None, rows, None]
        total[:, :, : weights.shape[4]] += weights.sum(dim=(2, 3))
    return total


def attend_and_weigh(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, mask: SlotMask
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """
    Attention, a tile of queries after another.

    Args:
        call, keys, mask: as in `weigh`.
        values (`torch.Tensor` of shape `[B, H, S, value head dim]`):
            Values.

    Yields:
        The tile's queries, their output `[B, H * G, queries, value head dim]` in the queries' dtype, and the weights
        that it was made with, `[B, H, queries, S]`, summed over the heads of a group.
    """
    batch_size, num_heads = call.query.shape[:2]
    values = values.float()
    for rows, weights in weigh(call, keys, mask):
        output = weights.flatten(2, 3) @ values[:, :, : weights.shape[4]]
        output = output.view(batch_size, num_heads, rows.stop - rows.start, values.shape[3])
        yield rows, output.to(call.query.dtype), weights.sum(dim=2)
