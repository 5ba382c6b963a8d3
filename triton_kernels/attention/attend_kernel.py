"""The kernel of `attend.py`: partial attention of one key/value head over one stretch of the sequence.

Legend as in `attend.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_K` and `BLOCK_V` channels of keys and
values, `BLOCK_KEY_RANK` and `BLOCK_VALUE_RANK` ranks, `BLOCK_E` outlier entries.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .low_rank import add_from_basis, to_basis
from .masks import mask_row_offsets, mask_scores
from .partials import store_partials
from .softmax import update_softmax
from .tiles import score_tile, weigh_tile


# What differs from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "length",
    "chunk_length",
    "num_tiles",
    "tiles_per_chunk",
    "tiles_per_split",
    "key_low_rank_start",
    "value_low_rank_start",
    "key_tokens_per_group",
    "value_tokens_per_group",
    "num_rows",
    "num_queries",
    *(f"mask_stride_{dimension}" for dimension in "bhq"),
    *(
        f"{side}_{part}_stride_{dimension}"
        for side in ("key", "value")
        for part in ("entry", "offset")
        for dimension in "bm"
    ),
    *(f"{side}_a_stride_{dimension}" for side in ("key", "value") for dimension in "bhm"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def attend_kernel(
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
    key_codes_ptr,
    key_codes_stride_b,
    key_codes_stride_h,
    key_codes_stride_m,
    key_scale_ptr,
    key_zero_ptr,
    key_scale_stride_b,
    key_scale_stride_h,
    key_scale_stride_m,
    key_a_ptr,
    key_a_stride_b,
    key_a_stride_h,
    key_a_stride_m,
    key_b_ptr,
    key_b_stride_b,
    key_b_stride_h,
    key_b_stride_m,
    key_entry_index_ptr,
    key_entry_value_ptr,
    key_entry_stride_b,
    key_entry_stride_m,
    key_offset_ptr,
    key_offset_stride_b,
    key_offset_stride_m,
    value_codes_ptr,
    value_codes_stride_b,
    value_codes_stride_h,
    value_codes_stride_m,
    value_scale_ptr,
    value_zero_ptr,
    value_scale_stride_b,
    value_scale_stride_h,
    value_scale_stride_m,
    value_a_ptr,
    value_a_stride_b,
    value_a_stride_h,
    value_a_stride_m,
    value_b_ptr,
    value_b_stride_b,
    value_b_stride_h,
    value_b_stride_m,
    value_entry_index_ptr,
    value_entry_value_ptr,
    value_entry_stride_b,
    value_entry_stride_m,
    value_offset_ptr,
    value_offset_stride_b,
    value_offset_stride_m,
    num_heads,
    num_rows,
    num_queries,
    length,
    chunk_length,
    num_tiles,
    tiles_per_chunk,
    tiles_per_split,
    key_low_rank_start,
    value_low_rank_start,
    key_tokens_per_group,
    value_tokens_per_group,
    scale,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_CODES_STRIDE_T: tl.constexpr,
    KEY_SCALE_STRIDE_S: tl.constexpr,
    KEY_A_STRIDE_T: tl.constexpr,
    KEY_B_STRIDE_D: tl.constexpr,
    KEY_NBITS: tl.constexpr,
    VALUE_CODES_STRIDE_T: tl.constexpr,
    VALUE_SCALE_STRIDE_S: tl.constexpr,
    VALUE_A_STRIDE_T: tl.constexpr,
    VALUE_B_STRIDE_D: tl.constexpr,
    VALUE_NBITS: tl.constexpr,
    KEY_FOLD: tl.constexpr,
    VALUE_FOLD: tl.constexpr,
    KEY_CHANNELS_PER_GROUP: tl.constexpr,
    VALUE_CHANNELS_PER_GROUP: tl.constexpr,
    KEY_RANK: tl.constexpr,
    VALUE_RANK: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr,
    VALUE_OUTLIERS: tl.constexpr,
    KEY_CHANNEL_BITS: tl.constexpr,
    VALUE_CHANNEL_BITS: tl.constexpr,
    MASK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_KEY_RANK: tl.constexpr,
    BLOCK_VALUE_RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Partial attention of one key/value head over one split."""
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    rows = tl.arange(0, BLOCK_R)
    row_in_use = rows < num_rows
    key_channels = tl.arange(0, BLOCK_K)
    value_channels = tl.arange(0, BLOCK_V)
    key_channel_in_use = key_channels < KEY_DIM
    value_channel_in_use = value_channels < VALUE_DIM

    query_rows_ptr = query_ptr + batch * query_stride_b + head * query_stride_h + rows * query_stride_r
    in_query = row_in_use[:, None] & key_channel_in_use[None, :]
    query = tl.load(query_rows_ptr[:, None] + key_channels[None, :], mask=in_query, other=0.0).to(tl.float32)
    query_sum = tl.sum(query, axis=1)
    scale_base_2 = scale * 1.4426950408889634
    # fmt: off
    mask_rows = mask_row_offsets(
        rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
    # fmt: on
    key_codes_ptr += batch * key_codes_stride_b + head * key_codes_stride_h
    value_codes_ptr += batch * value_codes_stride_b + head * value_codes_stride_h
    key_group = batch * key_scale_stride_b + head * key_scale_stride_h
    value_group = batch * value_scale_stride_b + head * value_scale_stride_h

    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    first_tile = tl.program_id(1) * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    for chunk in range(first_tile // tiles_per_chunk, tl.cdiv(last_tile, tiles_per_chunk)):
        chunk_64 = tl.cast(chunk, tl.int64)
        first_tile_of_chunk = chunk * tiles_per_chunk
        # fmt: off
        query_in_basis = to_basis(
            query, key_b_ptr, batch * key_b_stride_b + head * key_b_stride_h + chunk_64 * key_b_stride_m,
            KEY_B_STRIDE_D, key_channels, key_channel_in_use, KEY_RANK, PARTS, BLOCK_R, BLOCK_KEY_RANK)
        output_in_basis = tl.zeros([BLOCK_R, BLOCK_VALUE_RANK], tl.float32)
        for tile in range(tl.maximum(first_tile - first_tile_of_chunk, 0),
                          tl.minimum(last_tile - first_tile_of_chunk, tiles_per_chunk)):
            first_token = tile * BLOCK_T
            tokens = first_token + tl.arange(0, BLOCK_T)
            first_token_64 = tl.cast(first_token, tl.int64)
            positions = chunk * chunk_length + tokens
            token_in_use = (tokens < chunk_length) & (positions < length)
            outlier_tile = first_token // 64 * num_heads + head
            scores = score_tile(
                query, query_sum, query_in_basis, query_rows_ptr, row_in_use,
                key_codes_ptr + chunk_64 * key_codes_stride_m + first_token_64 * KEY_CODES_STRIDE_T,
                key_scale_ptr + key_group + chunk_64 * key_scale_stride_m,
                key_zero_ptr + key_group + chunk_64 * key_scale_stride_m,
                key_a_ptr, batch * key_a_stride_b + head * key_a_stride_h + chunk_64 * key_a_stride_m,
                key_entry_index_ptr, key_entry_value_ptr, batch * key_entry_stride_b + chunk_64 * key_entry_stride_m,
                key_offset_ptr, batch * key_offset_stride_b + chunk_64 * key_offset_stride_m + outlier_tile,
                first_token, token_in_use, key_channels, key_channel_in_use, key_tokens_per_group, key_low_rank_start,
                KEY_DIM, KEY_CODES_STRIDE_T, KEY_SCALE_STRIDE_S, KEY_A_STRIDE_T, KEY_NBITS, KEY_FOLD,
                KEY_CHANNELS_PER_GROUP, KEY_RANK, KEY_OUTLIERS, KEY_CHANNEL_BITS,
                PARTS, BLOCK_R, BLOCK_T, BLOCK_KEY_RANK, BLOCK_E)
            in_use = row_in_use[:, None] & token_in_use[None, :]
            positions = tl.cast(positions, tl.int64)
            scores = mask_scores(scores * scale_base_2, mask_ptr, mask_rows, positions, mask_stride_t, in_use, MASK)
            probabilities, decay, maximum, total = update_softmax(scores, maximum, total)
            output, output_in_basis = weigh_tile(
                output, output_in_basis, probabilities, decay,
                value_codes_ptr + chunk_64 * value_codes_stride_m + first_token_64 * VALUE_CODES_STRIDE_T,
                value_scale_ptr + value_group + chunk_64 * value_scale_stride_m,
                value_zero_ptr + value_group + chunk_64 * value_scale_stride_m,
                value_a_ptr, batch * value_a_stride_b + head * value_a_stride_h + chunk_64 * value_a_stride_m,
                value_entry_index_ptr, value_entry_value_ptr,
                batch * value_entry_stride_b + chunk_64 * value_entry_stride_m,
                value_offset_ptr, batch * value_offset_stride_b + chunk_64 * value_offset_stride_m + outlier_tile,
                first_token, token_in_use, value_channels, value_channel_in_use, value_tokens_per_group,
                value_low_rank_start, VALUE_DIM, VALUE_CODES_STRIDE_T, VALUE_SCALE_STRIDE_S, VALUE_A_STRIDE_T,
                VALUE_NBITS, VALUE_FOLD, VALUE_CHANNELS_PER_GROUP, VALUE_RANK, VALUE_OUTLIERS, VALUE_CHANNEL_BITS,
                PARTS, BLOCK_R, BLOCK_T, BLOCK_V, BLOCK_VALUE_RANK, BLOCK_E)
        output = add_from_basis(
            output, output_in_basis, value_b_ptr,
            batch * value_b_stride_b + head * value_b_stride_h + chunk_64 * value_b_stride_m, VALUE_B_STRIDE_D,
            value_channels, value_channel_in_use, VALUE_RANK, PARTS, BLOCK_VALUE_RANK)
        # fmt: on
    store_partials(output_ptr, maximum_ptr, total_ptr, output, maximum, total, rows, num_rows, VALUE_DIM, BLOCK_V)
