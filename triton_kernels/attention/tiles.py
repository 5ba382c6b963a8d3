"""What `attend_kernel` does with a tile: scores from keys, output from values, each the sum of all parts stored.

Legend as in `attend.py`; a tile is `[BLOCK_T tokens, BLOCK_D channels]` of one chunk and head. Codes, scales and zeros
are given by pointers of that chunk and head. What a preset may lack is given by the tensor's pointer, `None` then, and
where the chunk and head begin in it.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_exact

from .codes import load_codes, load_groups, score_codes, weigh_codes
from .low_rank import load_coefficients
from .outliers import score_outliers, weigh_outliers


@triton.jit
def score_tile(
    query,
    query_sum,
    query_in_basis,
    query_rows_ptr,
    row_in_use,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    a_ptr,
    a_start,
    entry_index_ptr,
    entry_value_ptr,
    entry_start,
    offset_ptr,
    offset_start,
    first_token,
    token_in_use,
    channels,
    channel_in_use,
    tokens_per_group,
    low_rank_start,
    DIM: tl.constexpr,
    CODES_STRIDE_T: tl.constexpr,
    SCALE_STRIDE_S: tl.constexpr,
    A_STRIDE_T: tl.constexpr,
    NBITS: tl.constexpr,
    FOLD: tl.constexpr,
    CHANNELS_PER_GROUP: tl.constexpr,
    RANK: tl.constexpr,
    OUTLIERS: tl.constexpr,
    CHANNEL_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """`query keys^T` `[rows, tokens]`."""
    in_use = token_in_use[:, None] & channel_in_use[None, :]
    # fmt: off
    codes = load_codes(codes_ptr, CODES_STRIDE_T, channels, in_use, DIM, NBITS, BLOCK_T)
    group_scale, group_zero = load_groups(
        scale_ptr, zero_ptr, SCALE_STRIDE_S, first_token, token_in_use, channels, channel_in_use, tokens_per_group,
        CHANNELS_PER_GROUP, FOLD, BLOCK_T)
    scores = score_codes(query, query_sum, codes, group_scale, group_zero, FOLD, PARTS)
    if RANK > 0:
        coefficients = load_coefficients(
            a_ptr + a_start, A_STRIDE_T, first_token - low_rank_start, token_in_use, RANK, BLOCK_T, BLOCK_RANK)
        scores += dot_exact(query_in_basis, tl.trans(coefficients), PARTS)
    if OUTLIERS:
        offset_ptr += offset_start
        scores += score_outliers(
            query_rows_ptr, row_in_use, entry_index_ptr + entry_start, entry_value_ptr + entry_start,
            tl.load(offset_ptr), tl.load(offset_ptr + 1), first_token, CHANNEL_BITS, BLOCK_R, BLOCK_T, BLOCK_E, PARTS)
    # fmt: on
    return scores


@triton.jit
def weigh_tile(
    output,
    output_in_basis,
    probabilities,
    decay,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    a_ptr,
    a_start,
    entry_index_ptr,
    entry_value_ptr,
    entry_start,
    offset_ptr,
    offset_start,
    first_token,
    token_in_use,
    channels,
    channel_in_use,
    tokens_per_group,
    low_rank_start,
    DIM: tl.constexpr,
    CODES_STRIDE_T: tl.constexpr,
    SCALE_STRIDE_S: tl.constexpr,
    A_STRIDE_T: tl.constexpr,
    NBITS: tl.constexpr,
    FOLD: tl.constexpr,
    CHANNELS_PER_GROUP: tl.constexpr,
    RANK: tl.constexpr,
    OUTLIERS: tl.constexpr,
    CHANNEL_BITS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Output `[rows, channels]` and its share in the basis `[rows, ranks]`, decayed, plus `probabilities values`."""
    output *= decay[:, None]
    in_use = token_in_use[:, None] & channel_in_use[None, :]
    # fmt: off
    codes = load_codes(codes_ptr, CODES_STRIDE_T, channels, in_use, DIM, NBITS, BLOCK_T)
    group_scale, group_zero = load_groups(
        scale_ptr, zero_ptr, SCALE_STRIDE_S, first_token, token_in_use, channels, channel_in_use, tokens_per_group,
        CHANNELS_PER_GROUP, FOLD, BLOCK_T)
    output += weigh_codes(probabilities, codes, group_scale, group_zero, FOLD, PARTS)
    if RANK > 0:
        coefficients = load_coefficients(
            a_ptr + a_start, A_STRIDE_T, first_token - low_rank_start, token_in_use, RANK, BLOCK_T, BLOCK_RANK)
        output_in_basis *= decay[:, None]
        output_in_basis += dot_exact(probabilities, coefficients, PARTS)
    if OUTLIERS:
        offset_ptr += offset_start
        output = weigh_outliers(
            output, probabilities, entry_index_ptr + entry_start, entry_value_ptr + entry_start,
            tl.load(offset_ptr), tl.load(offset_ptr + 1), first_token,
            CHANNEL_BITS, BLOCK_R, BLOCK_T, BLOCK_D, BLOCK_E, PARTS)
    # fmt: on
    return output, output_in_basis
