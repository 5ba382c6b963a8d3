"""Asymmetric uniform quantization of keys and values in groups: see `formats.groups`.

Tensors come as chunks, `[batch_size, num_heads, num_chunks, chunk_length, head_dim]` (legend: B H M L D). Codes are
chosen against the *stored* float16 scale and zero, so that rounding those adds no second error.
"""

import torch

from kvcache_plugins.formats.groups import STORAGE_DTYPE, Grouping


# Widths of GEAR; others can be packed too
SUPPORTED_NBITS = (2, 3, 4, 8)
# Least share of a mean error in the mean square of errors at which tokens share it, and least number of tokens
_SHARED, _LEAST_SPREAD = 0.25, 16
# Steps of thresholds from token to token, and from channel to channel: the golden ratio spreads them evenly
_TOKEN_TURN, _CHANNEL_TURN = 0.6180339887498949, 0.7548776662466927


def _by_group(states: torch.Tensor, grouping: Grouping) -> tuple[torch.Tensor, tuple[int, ...]]:
    """View states with the values of a group along dimensions of their own, and return these dimensions."""
    if grouping.axis == "channel":
        return states.unflatten(3, (-1, grouping.group_size or states.shape[3])), (4,)
    if grouping.group_size is None:
        return states, (1, 4)
    return states.unflatten(4, (-1, grouping.group_size)), (5,)


def quantize(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    nbits: int,
    grouping: Grouping,
    *,
    spread_errors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Quantize chunks of keys or values.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`, float32): states to quantize.
        keep (`torch.Tensor` of shape broadcastable to `states`, bool, *optional*): values that may widen the range of
            their group. The others (padding, outliers) are clamped into it.
        nbits (`int`): bits a code, one of 2, 3, 4, 8.
        grouping (`Grouping`): the values that share a scale.
        spread_errors (`bool`, *optional*, defaults to `False`): True if tokens of a head that would all be rounded to
            the same side are rounded to both, so that their average is right.

    Returns:
        Codes (`uint8`, the shape of `states`), scale and zero (float16, `[B, H, M, groups, D]` or
        `[B, H or 1, M, L, groups]`), which are not finite where a group holds NaN or its range exceeds float16: see
        `are_in_range`.
    """
    grouped, dims = _by_group(states, grouping)
    if keep is None:
        low, high = grouped.amin(dim=dims, keepdim=True), grouped.amax(dim=dims, keepdim=True)
    else:
        kept = _by_group(keep.expand_as(states), grouping)[0]
        low = torch.where(kept, grouped, torch.inf).amin(dim=dims, keepdim=True)
        high = torch.where(kept, grouped, -torch.inf).amax(dim=dims, keepdim=True)
        # A group without a kept value
        low, high = torch.where(low == torch.inf, 0, low), torch.where(high == -torch.inf, 0, high)
    levels = 2**nbits - 1
    zero = low.to(STORAGE_DTYPE)
    scale = ((high - zero.float()).clamp(min=0) / levels).to(STORAGE_DTYPE)
    # A constant group has scale 0 and code 0 throughout
    step = scale.float()
    numbers = (grouped - zero.float()).mul_(torch.where(step > 0, 1 / step, 0)).reshape(states.shape)
    codes = numbers.round()
    if spread_errors:
        codes = _spread(codes, numbers, keep)
    if len(dims) == 1:
        scale, zero = scale.squeeze(dims[0]), zero.squeeze(dims[0])
    return codes.clamp_(0, levels).to(torch.uint8), scale, zero


def _spread(codes: torch.Tensor, numbers: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """
    Round values up or down in heads where all tokens would be rounded to the same side, such as in a text that repeats
    a token.

    Attention averages over tokens, and so over their errors, unless tokens share them. If tokens share a large part of
    a head's errors, its values are rounded by thresholds of each token and channel, which are spread evenly.
    Thresholds are counted from the end of a chunk, as sequences of a batch end together.
    """
    length = codes.shape[3]
    if length < _LEAST_SPREAD:
        return codes
    errors = codes - numbers
    if keep is None:
        shared, each = errors.mean(dim=3), errors.square().mean(dim=3)
    else:
        errors.mul_(keep)
        count = keep.expand(*errors.shape[:4], -1).sum(dim=3).clamp(min=1)
        shared, each = errors.sum(dim=3) / count, errors.square().sum(dim=3) / count
    is_shared = shared.square().mean(dim=3) > _SHARED * each.mean(dim=3)
    if numbers.device.type == "cpu" and not bool(is_shared.any()):
        return codes
    tokens = torch.arange(length - 1, -1, -1, dtype=torch.float32, device=numbers.device)[:, None]
    channels = torch.arange(codes.shape[4], dtype=torch.float32, device=numbers.device)
    thresholds = (tokens * _TOKEN_TURN + channels * _CHANNEL_TURN).frac()
    return torch.where(is_shared[:, :, :, None, None], (numbers + thresholds).floor(), codes)


def are_in_range(*stored: torch.Tensor) -> torch.Tensor:
    """Return true if all numbers are finite, `[]`, bool, on the device, for `check_range`."""
    return torch.stack([tensor.isfinite().all() for tensor in stored]).all()


def check_range(*in_range: torch.Tensor) -> None:
    """Raise a `ValueError` if a result of `are_in_range` is `False`. The host waits for the device."""
    if not bool(torch.stack(in_range).all()):
        raise ValueError(
            "the states exceed the range of float16 (65504), in which scales, zeros and corrections are stored"
        )
