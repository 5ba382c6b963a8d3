"""GEAR: states as quantized backbone + low rank + sparse outliers.

Implements [GEAR](https://huggingface.co/papers/2403.05527), with the counts of outliers taken from the axis that is
filtered (the released code takes both from the channels) and every head and batch item on its own. Outliers are left
out of the range of their group and clamped into it; after the low rank is known, what is missing there is stored, so
that outliers are exact to float16 in the sum of all three parts.
"""

import torch

from kvcache_plugins.ops.compressed_states import CompressedStates
from kvcache_plugins.ops.compression_choice import choose_steps
from kvcache_plugins.ops.compression_steps import CompressionSteps
from kvcache_plugins.ops.quantization import Grouping

from .config import SideConfig


def decompose(
    states: torch.Tensor,
    valid: torch.Tensor | None,
    config: SideConfig,
    grouping: Grouping,
    rank: int,
    num_iterations: int,
    recent_ratio: float = 1.0,
    steps: CompressionSteps | None = None,
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
        steps (`CompressionSteps`, *optional*):
            What computes. The caller then has to call its `check_range` before the result is of use, once for
            everything that it compresses. By default they are chosen and checked here.

    Raises:
        ValueError: if something does not fit float16, in which everything but the codes is stored.
    """
    if steps is None:
        steps = choose_steps(states)
        compressed = decompose(states, valid, config, grouping, rank, num_iterations, recent_ratio, steps)
        steps.check_range()
        return compressed
    low_rank = stored = None
    # Kernels are launched on the current device, which need not be that of the states
    with torch.cuda.device_of(states):
        states = steps.prepare(states, valid)
        outliers = steps.select_outliers(states, valid, config.sparsity, by_channel=config.side == "key")
        keep = None if valid is None else valid[:, None, :, :, None]
        if outliers is not None:
            keep = outliers.keep
        wants_missing = rank > 0 or outliers is not None
        codes, scale, zero, missing = steps.quantize(states, keep, config.nbits, grouping, wants_missing=wants_missing)
        if missing is not None and rank:
            low_rank = steps.approximate(missing, keep, valid, rank, num_iterations, recent_ratio)
        if missing is not None and outliers is not None:
            stored = steps.store_outliers(missing, low_rank, outliers)
    a, b = low_rank or (None, None)
    indices, values, offsets = stored or (None, None, None)
    compressed = CompressedStates(
        codes=codes,
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
