"""Causal attention of new tokens behind a prefix, without a mask of queries x keys.

The mask would be aligned to the lower right, while `is_causal` is to the upper left, and an explicit one costs memory
for every pair. GPUs know `causal_lower_right`; on CPUs attention to the prefix and among the new tokens are computed
apart, and joined by the logarithms of their sums. Padding is cut off, item by item; sliding windows go block by block.

Legend: B batch, H heads of keys and values, G query heads for each, N new tokens, L all tokens, D and E head
dimensions of keys and values.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


# Queries that share one block of a sliding window's keys, where windows are smaller
_MIN_BLOCK = 256


def attend_behind_prefix(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    padding: list[int] | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """
    Attends with the queries `[B, H * G, N, D]` of the newest tokens to keys `[B, H, L, D]` and values `[B, H, L, E]`
    of themselves and all before them, or of the last `window`; returns `[B, H * G, N, E]`, zeros for the `padding` at
    the start of every item. Only the last dimension of states has to be contiguous.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if padding is None or not any(padding):
        return _attend(query, keys, values, scale, window)
    num_new, length = query.shape[2], keys.shape[2]
    output = query.new_zeros(*query.shape[:3], values.shape[3])
    for item, count in enumerate(padding):
        # Of the new tokens, those that are padding themselves
        skipped = max(count - (length - num_new), 0)
        if skipped < num_new:
            own = slice(item, item + 1), slice(None), slice(skipped, None)
            seen = slice(item, item + 1), slice(None), slice(count, None)
            output[own] = _attend(query[own], keys[seen], values[seen], scale, window)
    return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    num_new, length = query.shape[2], keys.shape[2]
    if window is not None and window < length:
        return _attend_in_window(query, keys, values, scale, window)
    if num_new in (1, length):
        return _sdpa(query, keys, values, scale=scale, is_causal=num_new > 1)
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3]:
        return _attend_in_parts(query, keys, values, scale)
    return _sdpa(query, keys, values, scale=scale, attn_mask=causal_lower_right(num_new, length))


def _repeat(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeats heads of keys or values for their query heads."""
    return states if states.shape[1] == num_heads else states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any) -> torch.Tensor:
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, **options)


def _attend_in_parts(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attends to the prefix without a mask, to the new tokens with PyTorch's own: no kernel looks at masked keys."""
    # What `scaled_dot_product_attention` itself calls on CPUs; only it returns logarithms of sums, float32
    flash = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, dropout_p=0.0, scale=scale)
    batch_size, num_heads, num_new, head_dim = query.shape
    start = keys.shape[2] - num_new
    # Without a mask the query heads of a group are as good as further queries: keys are not repeated
    rows = query.reshape(batch_size, keys.shape[1], -1, head_dim)
    before, before_sum = flash(rows, keys[:, :, :start], values[:, :, :start])
    before, before_sum = before.view_as(query), before_sum.reshape(query.shape[:3])
    own_keys, own_values = (_repeat(states[:, :, start:], num_heads) for states in (keys, values))
    among, among_sum = flash(query, own_keys, own_values, is_causal=True)
    # Weights of the two parts: what each one's sum of exponentials has of both
    share = torch.sigmoid(before_sum - among_sum)[..., None]
    return torch.lerp(among.float(), before.float(), share).to(query.dtype)


def _attend_in_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    num_new, before = query.shape[2], keys.shape[2] - query.shape[2]
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    outputs = []
    for first in range(0, num_new, max(window, _MIN_BLOCK)):
        stop = min(first + max(window, _MIN_BLOCK), num_new)
        # Positions of the block's queries, and of the keys that one of them sees
        seen = slice(max(before + first - window + 1, 0), before + stop)
        positions = torch.arange(before + stop, dtype=torch.int64, device=query.device)
        distance = positions[before + first :, None] - positions[None, seen]
        mask = (distance >= 0) & (distance < window)
        own = query[:, :, first:stop]
        outputs.append(_sdpa(own, keys[:, :, seen], values[:, :, seen], scale=scale, attn_mask=mask))
    return torch.cat(outputs, dim=2)
