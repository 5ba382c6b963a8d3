"""The kernel of `attend.py`: partial attention of one key/value head over one stretch of its rows.

Everything is kept with tokens or channels first and queries last: tokens and channels fill the rows of tensor cores,
of which a few queries would leave most empty. Tables of a prompt are those of a sequence and head, a calibration's
(`BASIS`) those of a head.

Legend as in `attend.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_D` channels of keys, `BLOCK_K` and
`BLOCK_V` coded numbers of keys and values in the order of `levels.row_slots`, an eighth as many blocks of them.
"""

import triton
import triton.language as tl

from ..attention.masks import mask_row_offsets
from .levels import TOKENS_BEHIND, load_codebook, load_four_levels, row_slots
from .rotated_queries import load_rotated_queries
from .tiles import (
    WEIGHT_FACTOR,
    attend_tile,
    load_bases,
    load_pairs,
    store_nothing,
    store_outputs,
    store_rotated,
    store_sums,
)


# Changes from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
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
def attend_kernel(
    query_ptr, query_stride_b, query_stride_h, query_stride_r, mask_ptr, mask_stride_b, mask_stride_h, mask_stride_q,
    mask_stride_t, output_ptr, maximum_ptr, total_ptr, key_rows_ptr, key_rows_stride_b, key_rows_stride_h,
    key_width_ptr, key_coefficient_ptr, key_order_ptr, key_mean_ptr, key_deviation_ptr, basis_ptr, step_ptr,
    factor_ptr, value_rows_ptr, value_rows_stride_b, value_rows_stride_h, value_width_ptr, value_coefficient_ptr,
    value_deviation_ptr, partner_ptr, near_ptr, far_ptr, padding_ptr, num_heads, num_rows, num_queries, position,
    length, length_ptr, tokens_per_split, scale, KEY_DIM: tl.constexpr, KEY_CODED: tl.constexpr,
    VALUE_CODED: tl.constexpr, KEY_ROW_SIZE: tl.constexpr, VALUE_ROW_SIZE: tl.constexpr, NUM_NEAR: tl.constexpr,
    BASIS: tl.constexpr, ROTARY: tl.constexpr, TWO_BITS: tl.constexpr, PADDED: tl.constexpr,
    MASK: tl.constexpr, SCORES: tl.constexpr, LEAST_DEVIATION: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, VALUE_ROTATION: tl.constexpr,
):  # fmt: skip
    """Attend with up to `BLOCK_R` rows to one key/value head over one split, or store their `SCORES`."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    query_rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    # Scores of few rows are there twice: they are stored from one of the places
    rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_R) // (BLOCK_R // BLOCK_Q)
    row_in_use = (rows < num_rows) & (tl.arange(0, BLOCK_R) % (BLOCK_R // BLOCK_Q) == 0)
    if length_ptr is not None:
        length = tl.load(length_ptr).to(tl.int32)
        if tl.program_id(1) * tokens_per_split >= length:
            # fmt: off
            store_nothing(
                output_ptr, maximum_ptr, total_ptr, matrix, rows, num_rows, row_slots(BLOCK_V), row_in_use,
                VALUE_CODED)
            # fmt: on
            return
    # fmt: off
    attend_split(
        tl.program_id(1), matrix, batch, head, query_rows, rows, row_in_use, query_ptr, query_stride_b, query_stride_h,
        query_stride_r, mask_ptr, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_t, output_ptr, maximum_ptr,
        total_ptr, key_rows_ptr, key_rows_stride_b, key_rows_stride_h, key_width_ptr, key_coefficient_ptr,
        key_order_ptr, key_mean_ptr, key_deviation_ptr, basis_ptr, step_ptr, factor_ptr, value_rows_ptr,
        value_rows_stride_b, value_rows_stride_h, value_width_ptr, value_coefficient_ptr, value_deviation_ptr,
        partner_ptr, near_ptr, far_ptr, padding_ptr, num_rows, num_queries, position, length, tokens_per_split, scale,
        KEY_DIM, KEY_CODED, VALUE_CODED, KEY_ROW_SIZE, VALUE_ROW_SIZE, NUM_NEAR, BASIS, ROTARY, TWO_BITS, PADDED,
        MASK, SCORES, LEAST_DEVIATION, DTYPE, PAIRS, BLOCK_R, BLOCK_T, BLOCK_D, BLOCK_K, BLOCK_V, VALUE_ROTATION)
    # fmt: on


@triton.jit
def attend_split(
    split, matrix, batch, head, query_rows, rows, row_in_use, query_ptr, query_stride_b, query_stride_h,
    query_stride_r, mask_ptr, mask_stride_b, mask_stride_h, mask_stride_q, mask_stride_t, output_ptr, maximum_ptr,
    total_ptr, key_rows_ptr, key_rows_stride_b, key_rows_stride_h, key_width_ptr, key_coefficient_ptr, key_order_ptr,
    key_mean_ptr, key_deviation_ptr, basis_ptr, step_ptr, factor_ptr, value_rows_ptr, value_rows_stride_b,
    value_rows_stride_h, value_width_ptr, value_coefficient_ptr, value_deviation_ptr, partner_ptr, near_ptr, far_ptr,
    padding_ptr, num_rows, num_queries, position, length, tokens_per_split, scale, KEY_DIM: tl.constexpr,
    KEY_CODED: tl.constexpr, VALUE_CODED: tl.constexpr, KEY_ROW_SIZE: tl.constexpr, VALUE_ROW_SIZE: tl.constexpr,
    NUM_NEAR: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr, TWO_BITS: tl.constexpr, PADDED: tl.constexpr,
    MASK: tl.constexpr, SCORES: tl.constexpr, LEAST_DEVIATION: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    VALUE_ROTATION: tl.constexpr,
):  # fmt: skip
    """Attend to a split that has tokens, number `split` of its rows, and store partial results, or `SCORES`."""
    NUM_ANGLES: tl.constexpr = (KEY_DIM + 1) // 2 if BASIS else KEY_DIM
    # Keys are multiples of `sizes`, so that they are halves
    if BASIS:
        table = head
        angle_columns = tl.arange(0, BLOCK_D)
        channels, channel_in_use, partners, partner_in_use = load_pairs(partner_ptr, angle_columns, KEY_DIM)
        if BLOCK_D > NUM_ANGLES:
            # Of pairs that are none anything will do that is there
            angle_columns = tl.where(channel_in_use, angle_columns, 0)
        # fmt: off
        basis, means, sizes = load_bases(
            basis_ptr, step_ptr, factor_ptr, key_mean_ptr, head, channels, channel_in_use, partners, partner_in_use,
            KEY_DIM, KEY_CODED, BLOCK_K, DTYPE)
        # fmt: on
    else:
        table = matrix
        slots = row_slots(BLOCK_K)
        channel_in_use = slots < KEY_DIM
        channels = tl.load(key_order_ptr + matrix * KEY_DIM + slots, mask=channel_in_use, other=0).to(tl.int32)
        partners, partner_in_use, angle_columns = channels, channel_in_use, channels
        if ROTARY:
            partners = tl.load(partner_ptr + channels)
        in_table = matrix * KEY_DIM + channels
        mean = tl.load(key_mean_ptr + in_table, mask=channel_in_use, other=0.0).to(tl.float32)
        deviation = tl.load(key_deviation_ptr + in_table, mask=channel_in_use, other=0.0).to(tl.float32)
        # A channel that hardly varies still has to be a multiple of something, and that within half precision
        sizes = tl.maximum(deviation, tl.maximum(tl.abs(mean) * LEAST_DEVIATION, 1e-9))
        means = tl.reshape((mean / sizes).to(DTYPE), [BLOCK_K // 8, 8])
        basis = means
    query_ptr += batch * query_stride_b + head * query_stride_h
    first_token = split * tokens_per_split
    last_token = tl.minimum(first_token + tokens_per_split, length)
    # fmt: off
    own, partners, size, angles = load_rotated_queries(
        query_ptr, query_rows, query_stride_r, query_rows < num_rows, channels, channel_in_use, partners,
        partner_in_use, angle_columns, sizes, scale, near_ptr, far_ptr, padding_ptr, batch, position + first_token,
        NUM_ANGLES, NUM_NEAR, BLOCK_T, ROTARY, PADDED, DTYPE)
    # fmt: on

    key_rows_ptr += batch * key_rows_stride_b + head * key_rows_stride_h
    value_rows_ptr += batch * value_rows_stride_b + head * value_rows_stride_h
    # fmt: off
    key_codebook = load_codebook(
        key_width_ptr + table * ((KEY_CODED + 7) // 8), key_coefficient_ptr, (KEY_CODED + 7) // 8, BLOCK_K // 8, DTYPE)
    if TWO_BITS:
        value_codebook = load_four_levels(value_coefficient_ptr)
    else:
        value_codebook = load_codebook(
            value_width_ptr + table * ((VALUE_CODED + 7) // 8), value_coefficient_ptr, (VALUE_CODED + 7) // 8,
            BLOCK_V // 8, DTYPE)
    mask_rows = mask_row_offsets(
        rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
    score_ptrs = output_ptr + (matrix * num_rows + rows) * length
    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    # Summed over tokens in the end
    totals = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_V, BLOCK_R], tl.float32)
    # Tiles that lie among rows in use with all that is loaded, and at most one that may not
    behind_whole = tl.minimum(last_token, length - TOKENS_BEHIND - BLOCK_T + 1)
    num_whole = tl.cdiv(tl.maximum(behind_whole - first_token, 0), BLOCK_T)
    key_rows = (key_rows_ptr, key_codebook)
    value_rows = (value_rows_ptr, value_codebook)
    for tile in range(0, num_whole):
        own, partners, maximum, totals, output = attend_tile(
            first_token + tile * BLOCK_T, length, key_rows, basis, means, value_rows, own, partners, size, angles,
            mask_ptr, mask_rows, mask_stride_t, row_in_use, score_ptrs, maximum, totals, output, KEY_ROW_SIZE,
            VALUE_ROW_SIZE, BASIS, ROTARY, TWO_BITS, MASK, SCORES, DTYPE, PAIRS, BLOCK_R, BLOCK_T, BLOCK_K,
            BLOCK_V, True)
    for start in range(first_token + num_whole * BLOCK_T, last_token, BLOCK_T):
        own, partners, maximum, totals, output = attend_tile(
            start, length, key_rows, basis, means, value_rows, own, partners, size, angles, mask_ptr, mask_rows,
            mask_stride_t, row_in_use, score_ptrs, maximum, totals, output, KEY_ROW_SIZE, VALUE_ROW_SIZE, BASIS,
            ROTARY, TWO_BITS, MASK, SCORES, DTYPE, PAIRS, BLOCK_R, BLOCK_T, BLOCK_K, BLOCK_V, False)
    # fmt: on
    if not SCORES:
        places = (matrix * tl.num_programs(1) + tl.program_id(1)) * num_rows + rows
        store_sums(maximum_ptr, total_ptr, places, row_in_use, maximum, totals)
        if BASIS:
            store_outputs(output_ptr, places, row_slots(BLOCK_V), row_in_use, output / WEIGHT_FACTOR, VALUE_CODED)
        else:
            output *= tl.load(value_deviation_ptr + matrix).to(tl.float32) / WEIGHT_FACTOR
            store_rotated(output_ptr, places, row_slots(BLOCK_V), row_in_use, output, VALUE_CODED, VALUE_ROTATION)
