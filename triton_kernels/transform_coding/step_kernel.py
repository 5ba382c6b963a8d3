"""The kernel of `step.py`: attention of a decode step to older rows, recent rows and exact tokens, in one launch.

A program takes one split of a head: of older rows, then the exact tokens, then of recent rows. It stores partial
results and counts itself; the last one of a head merges them all. A program that finds no tokens does nothing.

Legend as in `attend_kernel.py`.
"""

import triton
import triton.language as tl

from ..arithmetic import LOG2_E
from ..attention.dense_part import attend_part
from ..attention.partials import merge_places
from .attend_kernel import attend_split


# Changes from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_rows",
    *(
        f"{segment}_{name}"
        for segment in ("older", "recent")
        for name in (
            *("position", "length", "tokens_per_split", "num_splits", "mask_num_queries"),
            *(f"mask_stride_{dimension}" for dimension in "bhq"),
            *(f"{side}_rows_stride_{dimension}" for side in ("key", "value") for dimension in "bh"),
        )
    ),
    *(f"num_tokens_{index}" for index in range(2)),
    *(f"mask_{index}_{name}" for index in range(2) for name in ("stride_b", "stride_h", "stride_q", "num_queries")),
]
_NOT_ALIGNED = [f"{segment}_{name}_ptr" for segment in ("older", "recent") for name in ("mask", "length")]
_NOT_ALIGNED += [f"{name}_{index}_ptr" for name in ("mask", "num_tokens") for index in range(2)]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=_NOT_ALIGNED)
def step_kernel(
    query_ptr, query_stride_b, query_stride_h, query_stride_r, result_ptr, arrival_ptr, output_ptr, maximum_ptr,
    total_ptr, key_coefficient_ptr, key_order_ptr, key_mean_ptr, key_deviation_ptr, value_coefficient_ptr,
    value_deviation_ptr, partner_ptr, near_ptr, far_ptr, older_key_rows_ptr, older_key_rows_stride_b,
    older_key_rows_stride_h, older_key_width_ptr, older_value_rows_ptr, older_value_rows_stride_b,
    older_value_rows_stride_h, older_value_width_ptr, older_mask_ptr, older_mask_stride_b, older_mask_stride_h,
    older_mask_stride_q, older_mask_stride_t, older_mask_num_queries, older_padding_ptr, older_position, older_length,
    older_length_ptr, older_tokens_per_split, older_num_splits, recent_key_rows_ptr, recent_key_rows_stride_b,
    recent_key_rows_stride_h, recent_key_width_ptr, recent_value_rows_ptr, recent_value_rows_stride_b,
    recent_value_rows_stride_h, recent_value_width_ptr, recent_mask_ptr, recent_mask_stride_b, recent_mask_stride_h,
    recent_mask_stride_q, recent_mask_stride_t, recent_mask_num_queries, recent_padding_ptr, recent_position,
    recent_length, recent_length_ptr, recent_tokens_per_split, recent_num_splits, keys_0_ptr, keys_0_stride_b,
    keys_0_stride_h, keys_0_stride_t, values_0_ptr, values_0_stride_b, values_0_stride_h, values_0_stride_t,
    mask_0_ptr, mask_0_stride_b, mask_0_stride_h, mask_0_stride_q, mask_0_stride_t, mask_0_num_queries, num_tokens_0,
    num_tokens_0_ptr, keys_1_ptr, keys_1_stride_b, keys_1_stride_h, keys_1_stride_t, values_1_ptr, values_1_stride_b,
    values_1_stride_h, values_1_stride_t, mask_1_ptr, mask_1_stride_b, mask_1_stride_h, mask_1_stride_q,
    mask_1_stride_t, mask_1_num_queries, num_tokens_1, num_tokens_1_ptr, num_heads, num_rows, scale,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, OLDER_KEY_ROW_SIZE: tl.constexpr,
    OLDER_VALUE_ROW_SIZE: tl.constexpr, OLDER_TWO_BITS: tl.constexpr, OLDER_MASK: tl.constexpr,
    RECENT_KEY_ROW_SIZE: tl.constexpr, RECENT_VALUE_ROW_SIZE: tl.constexpr, RECENT_TWO_BITS: tl.constexpr,
    RECENT_MASK: tl.constexpr, MASK_0: tl.constexpr, MASK_1: tl.constexpr, HAS_RECENT: tl.constexpr,
    HAS_EXACT: tl.constexpr, NUM_NEAR: tl.constexpr, ROTARY: tl.constexpr, LEAST_DEVIATION: tl.constexpr,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, VALUE_ROTATION: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Attend with up to `BLOCK_Q` rows of a head to one split; the last program of a head stores the result."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    query_rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    # As in `attend_kernel`
    rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_R) // (BLOCK_R // BLOCK_Q)
    row_in_use = (rows < num_rows) & (tl.arange(0, BLOCK_R) % (BLOCK_R // BLOCK_Q) == 0)
    if older_length_ptr is not None:
        older_length = tl.load(older_length_ptr).to(tl.int32)
    num_older = tl.cdiv(older_length, older_tokens_per_split)
    num_exact, num_recent = 0, 0
    if HAS_EXACT:
        num_exact = 1
    if HAS_RECENT:
        if recent_length_ptr is not None:
            recent_length = tl.load(recent_length_ptr).to(tl.int32)
        num_recent = tl.cdiv(recent_length, recent_tokens_per_split)
    place = tl.program_id(1)
    # Places of exact tokens and of recent rows follow those of all the older rows that there is room for
    number = place - older_num_splits
    is_used = tl.where(number < 0, place < num_older, number < num_exact + num_recent)
    if is_used:
        # fmt: off
        if number < 0:
            attend_split(
                place, matrix, batch, head, query_rows, rows, row_in_use, query_ptr, query_stride_b, query_stride_h,
                query_stride_r, older_mask_ptr, older_mask_stride_b, older_mask_stride_h, older_mask_stride_q,
                older_mask_stride_t, output_ptr, maximum_ptr, total_ptr, older_key_rows_ptr, older_key_rows_stride_b,
                older_key_rows_stride_h, older_key_width_ptr, key_coefficient_ptr, key_order_ptr, key_mean_ptr,
                key_deviation_ptr, None, None, None, older_value_rows_ptr, older_value_rows_stride_b,
                older_value_rows_stride_h, older_value_width_ptr, value_coefficient_ptr, value_deviation_ptr,
                partner_ptr, near_ptr, far_ptr, older_padding_ptr, num_rows, older_mask_num_queries, older_position,
                older_length, older_tokens_per_split, scale, KEY_DIM, KEY_DIM, VALUE_DIM, OLDER_KEY_ROW_SIZE,
                OLDER_VALUE_ROW_SIZE, NUM_NEAR, False, ROTARY, OLDER_TWO_BITS, older_padding_ptr is not None,
                OLDER_MASK, False, LEAST_DEVIATION, DTYPE, PAIRS, BLOCK_R, BLOCK_T, BLOCK_K, BLOCK_K, BLOCK_V,
                VALUE_ROTATION)
        elif number < num_exact:
            if HAS_EXACT:
                # Products have more rows than there are queries; tiles have as many tokens
                exact_rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_E)
                channels = tl.arange(0, BLOCK_K)
                row_ptrs = query_ptr + batch * query_stride_b + head * query_stride_h + exact_rows * query_stride_r
                query = tl.load(
                    row_ptrs[:, None] + channels[None, :],
                    mask=(exact_rows < num_rows)[:, None] & (channels < KEY_DIM)[None, :], other=0.0).to(tl.float32)
                output = tl.zeros([BLOCK_E, BLOCK_V], tl.float32)
                maximum = tl.full([BLOCK_E], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_E], tl.float32)
                scale_base_2 = scale * LOG2_E
                output, maximum, total = attend_part(
                    output, maximum, total, query, exact_rows, 0, num_rows, keys_0_ptr, keys_0_stride_b,
                    keys_0_stride_h, keys_0_stride_t, values_0_ptr, values_0_stride_b, values_0_stride_h,
                    values_0_stride_t, mask_0_ptr, mask_0_stride_b, mask_0_stride_h, mask_0_stride_q, mask_0_stride_t,
                    mask_0_num_queries, num_tokens_0, num_tokens_0_ptr, batch, head, scale_base_2, MASK_0, KEY_DIM,
                    VALUE_DIM, PRECISION, BLOCK_E, BLOCK_K, BLOCK_V)
                output, maximum, total = attend_part(
                    output, maximum, total, query, exact_rows, 0, num_rows, keys_1_ptr, keys_1_stride_b,
                    keys_1_stride_h, keys_1_stride_t, values_1_ptr, values_1_stride_b, values_1_stride_h,
                    values_1_stride_t, mask_1_ptr, mask_1_stride_b, mask_1_stride_h, mask_1_stride_q, mask_1_stride_t,
                    mask_1_num_queries, num_tokens_1, num_tokens_1_ptr, batch, head, scale_base_2, MASK_1, KEY_DIM,
                    VALUE_DIM, PRECISION, BLOCK_E, BLOCK_K, BLOCK_V)
                exact_in_use = (exact_rows < num_rows) & (tl.arange(0, BLOCK_E) < BLOCK_Q)
                places = (matrix * tl.num_programs(1) + place) * num_rows + exact_rows
                tl.store(maximum_ptr + places, maximum, mask=exact_in_use)
                tl.store(total_ptr + places, total, mask=exact_in_use)
                value_channels = tl.arange(0, BLOCK_V)
                tl.store(
                    output_ptr + places[:, None] * VALUE_DIM + value_channels[None, :], output,
                    mask=exact_in_use[:, None] & (value_channels < VALUE_DIM)[None, :])
        else:
            if HAS_RECENT:
                attend_split(
                    number - num_exact, matrix, batch, head, query_rows, rows, row_in_use, query_ptr, query_stride_b,
                    query_stride_h, query_stride_r, recent_mask_ptr, recent_mask_stride_b, recent_mask_stride_h,
                    recent_mask_stride_q, recent_mask_stride_t, output_ptr, maximum_ptr, total_ptr,
                    recent_key_rows_ptr, recent_key_rows_stride_b, recent_key_rows_stride_h, recent_key_width_ptr,
                    key_coefficient_ptr, key_order_ptr, key_mean_ptr, key_deviation_ptr, None, None, None,
                    recent_value_rows_ptr, recent_value_rows_stride_b, recent_value_rows_stride_h,
                    recent_value_width_ptr, value_coefficient_ptr, value_deviation_ptr, partner_ptr, near_ptr, far_ptr,
                    recent_padding_ptr, num_rows, recent_mask_num_queries, recent_position, recent_length,
                    recent_tokens_per_split, scale, KEY_DIM, KEY_DIM, VALUE_DIM, RECENT_KEY_ROW_SIZE,
                    RECENT_VALUE_ROW_SIZE, NUM_NEAR, False, ROTARY, RECENT_TWO_BITS, recent_padding_ptr is not None,
                    RECENT_MASK, False, LEAST_DEVIATION, DTYPE, PAIRS, BLOCK_R, BLOCK_T, BLOCK_K, BLOCK_K, BLOCK_V,
                    VALUE_ROTATION)
        # fmt: on
        num_used = num_older + num_exact + num_recent
        if _arrives_last(arrival_ptr + matrix * tl.num_programs(2) + tl.program_id(2), num_used):
            merged_rows = tl.program_id(2) * BLOCK_Q + tl.arange(0, BLOCK_Q)
            # fmt: off
            output = merge_places(
                output_ptr, maximum_ptr, total_ptr, matrix * tl.num_programs(1), num_used, num_older,
                older_num_splits - num_older, merged_rows, num_rows, VALUE_DIM, BLOCK_V, BLOCK_S)
            # fmt: on
            channels = tl.arange(0, BLOCK_V)
            tl.store(
                result_ptr + (matrix * num_rows + merged_rows)[:, None] * VALUE_DIM + channels[None, :],
                output.to(result_ptr.dtype.element_ty),
                mask=(merged_rows < num_rows)[:, None] & (channels < VALUE_DIM)[None, :],
            )


@triton.jit
def _arrives_last(arrival_ptr, num_programs):
    """Count this program among so many; true in the last one, which may then read what all of them stored."""
    # All threads have stored: the atomic operation releases that, and acquires what other programs have released
    tl.debug_barrier()
    is_last = tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        # The next launch, or a graph's replay, begins again
        tl.store(arrival_ptr, 0)
    return is_last
