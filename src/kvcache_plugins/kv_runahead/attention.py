"""Causal attention of new tokens behind a prefix, without a mask of queries x keys.

The queries are those of the newest tokens, so the mask would be causal and aligned to the lower right. PyTorch's
`is_causal` is aligned to the upper left, and an explicit mask costs memory for every pair and keeps GPUs from their
flash kernels. On GPUs `causal_lower_right` says it without a mask. On CPUs attention to the prefix, which needs no
mask at all, and causal attention among the new tokens are computed apart, and joined by the logarithms of their sums.

Padding is cut off, item by item, instead of masked. Sliding windows go block by block, so that no more than two
windows of keys are looked at for any query.

Legend: B batch, H heads of keys and values, G query heads for each, N new tokens, L all tokens, D and E head
dimensions of keys and values.
"""

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
    Attention of the newest tokens to themselves and all before them.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, N, D]`):
            Queries of the newest N tokens.
        keys, values (`torch.Tensor` of shape `[B, H, L, D]`, `[B, H, L, E]`):
            States of all tokens, the newest ones included; only the last dimension has to be contiguous.
        scale (`float`, *optional*, defaults to `D ** -0.5`):
            Factor of the scores.
        padding (`list[int]`, *optional*):
            For every item, how many of the L tokens are padding at its start. Outputs of padding are zero.
        window (`int`, *optional*):
            A token sees itself and the `window - 1` tokens before it; all by default.

    Returns:
        `torch.Tensor` of shape `[B, H * G, N, E]`.
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
            one = slice(item, item + 1)
            output[one, :, skipped:] = _attend(
                query[one, :, skipped:], keys[one, :, count:], values[one, :, count:], scale, window
            )
    return output


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    num_new, length = query.shape[2], keys.shape[2]
    if window is not None and window < length:
        return _attend_in_window(query, keys, values, scale, window)
    if num_new == 1:
        return _repeat_and_attend(query, keys, values, scale, is_causal=False)
    if num_new == length:
        return _repeat_and_attend(query, keys, values, scale, is_causal=True)
    if query.device.type == "cpu" and keys.shape[3] == values.shape[3]:
        return _attend_in_parts(query, keys, values, scale)
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=causal_lower_right(num_new, length), scale=scale
    )


def _repeat(states: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Heads of keys or values repeated for their query heads."""
    return states if states.shape[1] == num_heads else states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _repeat_and_attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> torch.Tensor:
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    return F.scaled_dot_product_attention(query, keys, values, is_causal=is_causal, scale=scale)


def _attend_in_parts(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """The prefix without a mask, the new tokens with PyTorch's own causal one: no kernel looks at what is masked."""
    batch_size, num_heads, num_new, head_dim = query.shape
    start = keys.shape[2] - num_new
    # Without a mask the query heads of a group are as good as further queries: keys are not repeated
    rows = query.reshape(batch_size, keys.shape[1], -1, head_dim)
    before, before_sum = _flash_on_cpu(rows, keys[:, :, :start], values[:, :, :start], scale, is_causal=False)
    before, before_sum = before.view_as(query), before_sum.reshape(query.shape[:3])
    own_keys, own_values = (_repeat(states[:, :, start:], num_heads) for states in (keys, values))
    among, among_sum = _flash_on_cpu(query, own_keys, own_values, scale, is_causal=True)
    # Weights of the two parts: what each one's sum of exponentials has of both
    share = torch.sigmoid(before_sum - among_sum)[..., None]
    return torch.lerp(among.float(), before.float(), share).to(query.dtype)


def _flash_on_cpu(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and for every query the logarithm of its sum of exponentials, `[B, heads, N]`, float32."""
    # What `scaled_dot_product_attention` itself calls on CPUs; only it returns the sums
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, is_causal, scale=scale
    )
    return output, log_sum


def _attend_in_window(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    num_new, length = query.shape[2], keys.shape[2]
    keys, values = (_repeat(states, query.shape[1]) for states in (keys, values))
    outputs = []
    for first in range(0, num_new, max(window, _MIN_BLOCK)):
        stop = min(first + max(window, _MIN_BLOCK), num_new)
        # Positions in keys of the block's queries, and of the first key that one of them sees
        positions = torch.arange(length - num_new + first, length - num_new + stop, device=query.device)
        start = max(length - num_new + first - window + 1, 0)
        columns = torch.arange(start, length - num_new + stop, device=query.device)
        distance = positions[:, None] - columns[None]
        outputs.append(
            F.scaled_dot_product_attention(
                query[:, :, first:stop],
                keys[:, :, start : length - num_new + stop],
                values[:, :, start : length - num_new + stop],
                attn_mask=(distance >= 0) & (distance < window),
                scale=scale,
            )
        )
    return torch.cat(outputs, dim=2)
