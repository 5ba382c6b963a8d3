"""Attention whose weights are seen, a tile of queries at a time: they tell heavy hitters from other tokens.

Fused attention never shows its weights, and the matrix of all of them would be as large as the prompt squared. So
scores are computed for as many queries as fit a tile, over all tokens at once, in float32.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, in no order, each with a token
or free, L positions of the sequence, D head dim.
"""

from collections.abc import Iterator

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask


# Scores of a tile, over the whole batch and all heads, by device: what stays in the caches of a CPU (with tiles eight
# times as large or small a prompt's weights take half as long again), and on others enough to pay for a launch.
# Tensors without data (`meta`), on which caches are sized, fill no cache
_TILE_NUMBERS = {"cpu": 1 << 21, "meta": 1 << 50}
_MANY_NUMBERS = 1 << 25


def weigh(
    call: AttentionCall, keys: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Computes softmax weights of a call, whose mask is over `length` positions, to keys `[B, H, S, D]` in slots of
    `positions` `[B, H, S]` (negative for a free one; without them in order): yields a tile's queries and weights `[B,
    H, G, queries, S]` in float32, all zero where a query may attend to nothing. Slots that none of them may attend to
    can be missing at the end.
    """
    (batch_size, num_heads, num_queries, head_dim), num_key_value_heads = call.query.shape, keys.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    keys, mask = keys.float().transpose(2, 3), slice_mask(None if call.is_causal else call.mask, 0, length)
    tile_numbers = _TILE_NUMBERS.get(call.query.device.type, _MANY_NUMBERS)
    tile_length = max(1, tile_numbers // (batch_size * num_heads * keys.shape[3]))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().expand(batch_size, num_heads, num_queries, 1).unflatten(1, (num_key_value_heads, -1))
    for start in range(0, num_queries, tile_length):
        rows = slice(start, min(start + tile_length, num_queries))
        tile = (call.query[:, :, rows].float() * scale).reshape(batch_size, num_key_value_heads, -1, head_dim)
        scores = tile @ (keys[..., : rows.stop] if call.is_causal and positions is None else keys)
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch_size, num_key_value_heads, -1, rows.stop - start, scores.shape[3])
        if call.is_causal:
            queries = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
            if positions is None:
                # What stands before the tile's first query is seen by all of them
                newest = scores[..., rows.start :]
                columns = torch.arange(rows.start, rows.start + newest.shape[4], device=scores.device)
                newest.masked_fill_(columns > queries, -torch.inf)
            else:
                scores.masked_fill_(positions[:, :, None, None] > queries, -torch.inf)
        if positions is not None:
            scores.masked_fill_((positions < 0)[:, :, None, None], -torch.inf)
        if mask is not None:
            own = _read_mask(mask, rows, num_key_value_heads, positions)
            scores = scores.masked_fill_(~own, -torch.inf) if own.dtype == torch.bool else scores.add_(own)
        if sinks is not None:
            yield rows, torch.cat([scores, sinks[:, :, :, rows]], dim=-1).softmax(dim=-1)[..., :-1]
        elif mask is None and positions is None:
            yield rows, scores.softmax(dim=-1)
        else:
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
            yield rows, scores.softmax(dim=-1).masked_fill_(nothing, 0)


def _read_mask(
    mask: torch.Tensor, rows: slice, num_key_value_heads: int, positions: torch.Tensor | None
) -> torch.Tensor:
    """Reads the mask `[B or 1, heads or 1, Q or 1, L]` of some queries, broadcastable to `[B, H, G, queries, S]`."""
    mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
    mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else (num_key_value_heads, -1))
    if positions is None:
        return mask
    index = positions.clamp(min=0).long()[:, :, None, None]
    shape = (*positions.shape[:2], *mask.shape[2:4])
    return mask.expand(*shape, -1).gather(4, index.expand(*shape, -1))


def sum_weights(
    call: AttentionCall, keys: torch.Tensor, length: int, real_queries: torch.Tensor | None
) -> torch.Tensor:
    """Sums the weights `[B, H, L]` that a prompt's tokens get from all heads and all `real_queries` `[B, Q]`."""
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for rows, weights in weigh(call, keys, length):
        if real_queries is not None:
            weights = weights * real_queries[:, None, None, rows, None]
        total[:, :, : weights.shape[4]] += weights.sum(dim=(2, 3))
    return total


def attend_and_weigh(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, length: int, positions: torch.Tensor | None = None
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """
    Attends, a tile of queries after another: yields them, their output `[B, H * G, queries, value head dim]` and the
    weights `[B, H, queries, S]`, summed over the heads of a group. See `weigh`.
    """
    values = values.float()
    for rows, weights in weigh(call, keys, length, positions):
        output = weights.flatten(2, 3) @ values[:, :, : weights.shape[4]]
        output = output.view(*call.query.shape[:2], rows.stop - rows.start, values.shape[3])
        yield rows, output.to(call.query.dtype), weights.sum(dim=2)
