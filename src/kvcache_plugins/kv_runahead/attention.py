"""Causal attention of new tokens behind a prefix, without a mask of queries x keys.

`is_causal` aligns its mask to the upper left, but here it would have to be aligned to the lower right, and an explicit
mask costs memory for every pair. GPUs have `causal_lower_right`. On CPUs attention to the prefix and attention among
the new tokens are computed apart, and joined by the logarithms of their sums of weights. Padding is cut off, sequence
by sequence; sliding windows are computed block by block.

Legend: B batch, H heads of keys and values, G query heads for each, N new tokens, L all tokens, D and E head
dimensions of keys and values.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right


# Least number of queries that share one block of a sliding window's keys
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
    Attend with the newest tokens to themselves and the tokens before them.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, N, D]`): queries of the newest tokens.
        keys (`torch.Tensor` of shape `[B, H, L, D]`), values (`torch.Tensor` of shape `[B, H, L, E]`): states of all
            tokens; only their last dimension has to be contiguous.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`): factor of the scores.
        padding (`list[int]`, *optional*): number of tokens at the start of each sequence that are padding.
        window (`int`, *optional*): number of tokens that a query sees; all by default.

    Returns:
        `torch.Tensor` of shape `[B, H * G, N, E]`: the output, zero for padding.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    if padding is None or not any(padding):
        return _attend(query, keys, values, scale, window)
    num_new, length = query.shape[2], keys.shape[2]
    output = query.new_zeros(*query.shape[:3], values.shape[3])
    for sequence, count in enumerate(padding):
        # Number of new tokens that are padding themselves
        skipped = max(count - (length - num_new), 0)
        if skipped < num_new:
            own = slice(sequence, sequence + 1), slice(None), slice(skipped, None)
            seen = slice(sequence, sequence + 1), slice(None), slice(count, None)
            output[own] = _attend(query[own], keys[seen], values[seen], scale, window)
    return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    num_new, length = query.shape[2], keys.shape[2]
    if window is not None and window < length:
        return _attend_in_window(query, keys, values, scale, window)
    if num_new in (1, length):
        return _sdpa(query, keys, values, scale, is_causal=num_new > 1)
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3]:
        return _attend_in_parts(query, keys, values, scale)
    return _sdpa(query, keys, values, scale, mask=causal_lower_right(num_new, length))


def _repeat(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat heads of keys or values for their query heads."""
    return states if states.shape[1] == num_heads else states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    mask: torch.Tensor | CausalBias | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=is_causal, scale=scale)


def _attend_in_parts(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend to the prefix without a mask, and to new tokens by a causal kernel, so that no masked key is computed."""
    # The kernel of `scaled_dot_product_attention` on CPUs; called directly it returns logarithms of sums, float32
    flash = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, dropout_p=0.0, scale=scale)
    batch_size, num_heads, num_new, head_dim = query.shape
    start = keys.shape[2] - num_new
    # Without a mask the query heads of a group can be further queries, so that keys are not repeated
    rows = query.reshape(batch_size, keys.shape[1], -1, head_dim)
    before, before_sum = flash(rows, keys[:, :, :start], values[:, :, :start])
    before, before_sum = before.view_as(query), before_sum.reshape(query.shape[:3])
    own_keys, own_values = (_repeat(states[:, :, start:], num_heads) for states in (keys, values))
    among, among_sum = flash(query, own_keys, own_values, is_causal=True)
    # Share of the prefix in the sum of all weights
    share = torch.sigmoid(before_sum - among_sum)[..., None]
    return torch.lerp(among.float(), before.float(), share).to(query.dtype)


def _attend_in_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    num_new, before = query.shape[2], keys.shape[2] - query.shape[2]
    size = max(window, _MIN_BLOCK)
    outputs = []
    for first in range(0, num_new, size):
        stop = min(first + size, num_new)
        # Positions of the keys that some query of the block sees
        seen = slice(max(before + first - window + 1, 0), before + stop)
        positions = torch.arange(before + stop, dtype=torch.int64, device=query.device)
        distance = positions[before + first :, None] - positions[None, seen]
        mask = (distance >= 0) & (distance < window)
        outputs.append(_sdpa(query[:, :, first:stop], keys[:, :, seen], values[:, :, seen], scale, mask=mask))
    return torch.cat(outputs, dim=2)
