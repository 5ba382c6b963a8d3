"""The kernel of `basis_attend.py`: partial attention of one key/value head over one stretch of its rows.

Legend as in `basis_attend.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_D` channels of keys, `BLOCK_K`
and `BLOCK_V` components of keys and values in the order of `points.row_slots`.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.attention.masks import mask_row_offsets

from .basis_tiles import attend_basis_tile, load_basis
from .points import TOKENS_BEHIND, aligned_rows, load_codebook, row_slots
from .tiles import WEIGHT_FACTOR, store_nothing, store_outputs, store_sums
from .turned_queries import load_turned_queries


# What differs from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "position",
    "length",
    "tokens_per_split",
    "num_rows",
    "num_queries",
    *(f"mask_stride_{dimension}" for dimension in "bhq"),
    *(f"{side}_rows_stride_{dimension}" for side in ("key", "value") for dimension in "bh"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["mask_ptr", "length_ptr"])
def attend_basis_kernel(
    query_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_r,
    mask_ptr,
    mask_stride_b,
    mask_stride_h,
    mask_stride_q,
    mask_stride_t,
    output_ptr,
    maximum_ptr,
    total_ptr,
    key_rows_ptr,
    key_rows_stride_b,
    key_rows_stride_h,
    key_width_ptr,
    key_coefficient_ptr,
    basis_ptr,
    step_ptr,
    factor_ptr,
    mean_ptr,
    value_rows_ptr,
    value_rows_stride_b,
    value_rows_stride_h,
    value_width_ptr,
    value_coefficient_ptr,
    partner_ptr,
    near_ptr,
    far_ptr,
    padding_ptr,
    num_heads,
    num_rows,
    num_queries,
    position,
    length,
    length_ptr,
    tokens_per_split,
    scale,
    KEY_DIM: tl.constexpr,
    KEY_COMPONENTS: tl.constexpr,
    VALUE_COMPONENTS: tl.constexpr,
    KEY_ROW_SIZE: tl.constexpr,
    VALUE_ROW_SIZE: tl.constexpr,
    NUM_NEAR: tl.constexpr,
    ROTARY: tl.constexpr,
    TRELLIS: tl.constexpr,
    PADDED: tl.constexpr,
    MASK: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Partial attention of up to `BLOCK_R` rows of one key/value head over one split."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_in_use = rows < num_rows
    if length_ptr is not None:
        length = tl.load(length_ptr).to(tl.int32)
        if tl.program_id(1) * tokens_per_split >= length:
            store_nothing(
                output_ptr,
                maximum_ptr,
                total_ptr,
                matrix,
                rows,
                num_rows,
                row_slots(BLOCK_V),
                row_in_use,
                VALUE_COMPONENTS,
            )
            return
    channels = tl.arange(0, BLOCK_D)
    channel_in_use = channels < KEY_DIM
    # Of a channel that is none anything will do that is there
    channels = tl.where(channel_in_use, channels, 0)
    in_table = head * KEY_DIM + channels
    basis, unit = load_basis(
        basis_ptr, step_ptr, head, channels, channel_in_use, KEY_DIM, KEY_COMPONENTS, BLOCK_K, DTYPE
    )
    factors = tl.load(factor_ptr + in_table, mask=channel_in_use, other=1.0)
    means = tl.load(mean_ptr + in_table, mask=channel_in_use, other=0.0).to(tl.float32) * factors / unit
    # What keys over `unit` times factors are to be multiplied by
    sizes = unit / factors
    query_ptr += batch * query_stride_b + head * query_stride_h
    first_token = tl.program_id(1) * tokens_per_split
    last_token = tl.minimum(first_token + tokens_per_split, length)
    # fmt: off
    own, partners, size, cosines, sines, offset_cosines, offset_sines = load_turned_queries(
        query_ptr, rows, query_stride_r, row_in_use, channels, channel_in_use, sizes, scale, partner_ptr, near_ptr,
        far_ptr, padding_ptr, batch, position + first_token, KEY_DIM, NUM_NEAR, BLOCK_T, ROTARY, PADDED, DTYPE)
    # fmt: on

    key_rows_ptr += batch * key_rows_stride_b + head * key_rows_stride_h
    value_rows_ptr += batch * value_rows_stride_b + head * value_rows_stride_h
    key_words_ptr, key_remainder = aligned_rows(key_rows_ptr)
    value_words_ptr, value_remainder = aligned_rows(value_rows_ptr)
    # fmt: off
    key_codebook = load_codebook(
        key_width_ptr + head * ((KEY_COMPONENTS + 7) // 8), key_coefficient_ptr, (KEY_COMPONENTS + 7) // 8,
        BLOCK_K // 8, DTYPE)
    value_codebook = load_codebook(
        value_width_ptr + head * ((VALUE_COMPONENTS + 7) // 8), value_coefficient_ptr, (VALUE_COMPONENTS + 7) // 8,
        BLOCK_V // 8, DTYPE)
    mask_rows = mask_row_offsets(
        rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    # Summed over tokens in the end
    totals = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    # Tiles that lie among rows in use with all that is loaded, and at most one that may not
    behind_whole = tl.minimum(last_token, length - TOKENS_BEHIND - BLOCK_T + 1)
    num_whole = tl.cdiv(tl.maximum(behind_whole - first_token, 0), BLOCK_T)
    for tile in range(0, num_whole):
        own, partners, maximum, totals, output = attend_basis_tile(
            first_token + tile * BLOCK_T, length, key_rows_ptr, key_words_ptr, key_remainder, key_codebook, basis,
            means, value_rows_ptr, value_words_ptr, value_remainder, value_codebook, own, partners, size, cosines,
            sines, offset_cosines, offset_sines, mask_ptr, mask_rows, mask_stride_t, row_in_use, maximum, totals,
            output, KEY_ROW_SIZE, VALUE_ROW_SIZE, ROTARY, TRELLIS, MASK, DTYPE, PAIRS, BLOCK_T, BLOCK_K, BLOCK_V,
            True)
    for start in range(first_token + num_whole * BLOCK_T, last_token, BLOCK_T):
        own, partners, maximum, totals, output = attend_basis_tile(
            start, length, key_rows_ptr, key_words_ptr, key_remainder, key_codebook, basis,
            means, value_rows_ptr, value_words_ptr, value_remainder, value_codebook, own, partners, size, cosines,
            sines, offset_cosines, offset_sines, mask_ptr, mask_rows, mask_stride_t, row_in_use, maximum, totals,
            output, KEY_ROW_SIZE, VALUE_ROW_SIZE, ROTARY, TRELLIS, MASK, DTYPE, PAIRS, BLOCK_T, BLOCK_K, BLOCK_V,
            False)
    # fmt: on

    split = matrix * tl.num_programs(1) + tl.program_id(1)
    places = split * num_rows + rows
    store_sums(maximum_ptr, total_ptr, places, row_in_use, maximum, totals)
    store_outputs(output_ptr, places, row_slots(BLOCK_V), row_in_use, output / WEIGHT_FACTOR, VALUE_COMPONENTS)
