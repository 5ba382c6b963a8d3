"""GEAR: states as quantized backbone + low rank + sparse outliers.

Implements [GEAR](https://huggingface.co/papers/2403.05527), with the counts of outliers taken from the axis that is
filtered (the released code takes both from the channels) and every head and batch item on its own. Outliers are left
out of the range of their group and clamped into it; after the low rank is known, what is missing there is stored, so
that outliers are exact to float16 in the sum of all three parts.
"""

import torch

from kvcache_plugins.ops.compressed_states import CompressedStates
from kvcache_plugins.ops.low_rank import power_iteration
from kvcache_plugins.ops.outliers import OutlierPlaces, select_key_outliers, select_value_outliers, sort_into_tiles
from kvcache_plugins.ops.quantization import Grouping, dequantize, pack, quantize

from .config import SideConfig


_STORAGE_DTYPE = torch.float16


def decompose(
    states: torch.Tensor,
    valid: torch.Tensor | None,
    config: SideConfig,
    grouping: Grouping,
    rank: int,
    num_iterations: int,
    recent_ratio: float = 1.0,
) -> CompressedStates:
    """
    Compresses chunks of keys or values.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`, any floating dtype):
            What to compress, `M` chunks of `L` tokens.
        valid (`torch.Tensor` of shape `[B, M, L]`, bool, *optional*):
            Tokens that are real. The others enter no range, no outlier count and no factor, and what is stored of them
            means nothing.
        config (`SideConfig`):
            Options of this side.
        grouping (`Grouping`):
            Which values share a scale.
        rank (`int`):
            Rank of the correction, 0 for none.
        num_iterations (`int`):
            Power iterations.
        recent_ratio (`float`, *optional*, defaults to 1.0):
            Share of the tokens, the most recent ones, that the low-rank correction covers.

    Raises:
        ValueError: if something does not fit float16, in which everything but the codes is stored.
    """
    per_channel = config.side == "key"
    real = None if valid is None else valid[:, None, :, :, None]
    exact = states.float()
    if real is not None:
        exact = torch.where(real, exact, 0)
    indices, in_use, is_outlier = _select_outliers(exact, valid, config.sparsity, per_channel)
    keep = real
    if is_outlier is not None:
        keep = ~is_outlier if real is None else real & ~is_outlier
    codes, scale, zero = quantize(exact, keep, config.nbits, grouping)

    a = b = values = offsets = None
    if rank or indices is not None:
        missing = exact - dequantize(codes, scale, zero, grouping)
        if rank:
            a, b, correction = _low_rank(missing, keep, valid, rank, num_iterations, recent_ratio)
            missing[:, :, :, -a.shape[3] :] -= correction
        if indices is not None:
            places = _outlier_places(exact.shape, indices, in_use, real)
            batch_size, num_heads, num_chunks, length, head_dim = exact.shape
            flat = (places.heads * length + places.tokens) * head_dim + places.channels
            values = missing.transpose(1, 2).flatten(2).gather(2, flat).to(_STORAGE_DTYPE)
            indices, values, offsets = sort_into_tiles(places, values, num_heads, length, head_dim)
    for tensor in (a, b, values):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise ValueError("the states exceed the range of float16 (65504), in which corrections are stored")
    compressed = CompressedStates(
        codes=pack(codes, config.nbits),
        scale=scale,
        zero=zero,
        low_rank_a=a,
        low_rank_b=b,
        outlier_indices=indices,
        outlier_values=values,
        outlier_offsets=offsets,
        nbits=config.nbits,
        grouping=grouping,
        head_dim=states.shape[4],
    )
    # Kernels read them in this order
    return compressed.map(torch.Tensor.contiguous)


def _select_outliers(
    exact: torch.Tensor, valid: torch.Tensor | None, sparsity: float, per_channel: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """
    Indices (tokens `[B, H, M, K, D]` of keys, channels of all heads `[B, M, L, K]` of values), for keys which of them
    are in use, and a mask over the states.
    """
    if per_channel:
        selected = select_key_outliers(exact, valid, sparsity)
        if selected is None:
            return None, None, None
        indices, in_use = selected
        # An index that is not in use may stand at the place of one that is: it must not erase it, hence the sum
        marks = torch.zeros_like(exact).scatter_add_(3, indices, in_use.to(exact.dtype).expand(indices.shape))
        return indices, in_use, marks > 0
    token_indices = select_value_outliers(exact, sparsity)
    if token_indices is None:
        return None, None, None
    batch_size, num_heads, num_chunks, length, head_dim = exact.shape
    marks = exact.new_zeros(batch_size, num_chunks, length, num_heads * head_dim, dtype=torch.bool)
    marks.scatter_(3, token_indices, True)
    mask = marks.unflatten(3, (num_heads, head_dim)).permute(0, 3, 1, 2, 4)
    return token_indices, None, mask


def _low_rank(
    missing: torch.Tensor,
    keep: torch.Tensor | None,
    valid: torch.Tensor | None,
    rank: int,
    num_iterations: int,
    recent_ratio: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors as they are stored, over the most recent tokens, and their product."""
    residual = missing if keep is None else torch.where(keep, missing, 0)
    length = missing.shape[3]
    if recent_ratio < 1:
        counts = torch.tensor([[length]], device=missing.device) if valid is None else valid.sum(dim=2)
        recent = (counts.double() * recent_ratio).round().long().clamp(min=1)
        is_recent = torch.arange(length, device=missing.device) >= (length - recent)[:, :, None]
        residual = torch.where(is_recent[:, None, :, :, None], residual, 0)
        residual = residual[:, :, :, -int(recent.max()) :]
    a, b = power_iteration(residual, rank, num_iterations)
    a, b = a.to(_STORAGE_DTYPE), b.to(_STORAGE_DTYPE)
    return a, b, a.float() @ b.float().transpose(-1, -2)


def _outlier_places(
    shape: torch.Size, indices: torch.Tensor, in_use: torch.Tensor | None, real: torch.Tensor | None
) -> OutlierPlaces:
    """
    The places of selected outliers.

    Args:
        shape (`torch.Size`): of the states.
        indices (`torch.Tensor`): tokens `[B, H, M, K, D]` (keys) or channels of all heads `[B, M, L, K]` (values).
        in_use (`torch.Tensor`, *optional*): for keys, which indices count, broadcastable to them.
        real (`torch.Tensor` of shape `[B, 1, M, L, 1]`, *optional*): for values, tokens that are not padding.
    """
    _, num_heads, _, length, head_dim = shape
    device = indices.device
    if in_use is not None:
        heads = torch.arange(num_heads, device=device)[:, None, None, None]
        channels = torch.arange(head_dim, device=device)
        parts = (heads, indices, channels, in_use)
        shape = indices.shape
        return OutlierPlaces(*(part.expand(shape).transpose(1, 2).flatten(2) for part in parts))
    tokens = torch.arange(length, device=device)[:, None].expand(indices.shape).flatten(2)
    used = None if real is None else real[:, 0].expand(indices.shape).flatten(2)
    flat = indices.flatten(2)
    return OutlierPlaces(flat // head_dim, tokens, flat % head_dim, used)
