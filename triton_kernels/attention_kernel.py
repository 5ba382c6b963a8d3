"""The kernel of `attention.py`: partial attention of one key/value head over one stretch of the sequence.

Legend as in `attention.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_K` and `BLOCK_V` channels of keys
and values, `BLOCK_E` outlier entries.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.attention_tiles import (
    dot_exact,
    load_basis,
    load_codes,
    load_coefficients,
    load_groups,
    mask_scores,
    score_codes,
    score_outliers,
    update_softmax,
    weigh_codes,
    weigh_outliers,
)


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
    """Partial attention of one key/value head over one split: see the module's docstring."""
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    split = tl.program_id(1)

    rows = tl.arange(0, BLOCK_R)
    row_in_use = rows < num_rows
    key_channels = tl.arange(0, BLOCK_K)
    value_channels = tl.arange(0, BLOCK_V)
    key_channel_in_use = key_channels < KEY_DIM
    value_channel_in_use = value_channels < VALUE_DIM

    query_rows_ptr = query_ptr + batch * query_stride_b + head * query_stride_h + rows * query_stride_r
    query = tl.load(
        query_rows_ptr[:, None] + key_channels[None, :],
        mask=row_in_use[:, None] & key_channel_in_use[None, :],
        other=0.0,
    ).to(tl.float32)
    query_sum = tl.sum(query, axis=1)
    scale_base_2 = scale * 1.4426950408889634
    if MASK:
        groups = num_rows // num_queries
        query_head = head * groups + rows // num_queries
        mask_rows_ptr = (
            mask_ptr + batch * mask_stride_b + query_head * mask_stride_h + rows % num_queries * mask_stride_q
        )

    key_codes_ptr += batch * key_codes_stride_b + head * key_codes_stride_h
    value_codes_ptr += batch * value_codes_stride_b + head * value_codes_stride_h
    key_group = batch * key_scale_stride_b + head * key_scale_stride_h
    value_group = batch * value_scale_stride_b + head * value_scale_stride_h

    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)

    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    for chunk in range(first_tile // tiles_per_chunk, tl.cdiv(last_tile, tiles_per_chunk)):
        chunk_64 = tl.cast(chunk, tl.int64)
        first_tile_of_chunk = chunk * tiles_per_chunk
        if KEY_RANK > 0:
            basis_ptr = key_b_ptr + batch * key_b_stride_b + head * key_b_stride_h + chunk_64 * key_b_stride_m
            basis = load_basis(basis_ptr, KEY_B_STRIDE_D, key_channels, key_channel_in_use, KEY_RANK, BLOCK_KEY_RANK)
            query_in_basis = dot_exact(query, basis, PARTS)
        if VALUE_RANK > 0:
            output_in_basis = tl.zeros([BLOCK_R, BLOCK_VALUE_RANK], tl.float32)

        for tile in range(
            tl.maximum(first_tile - first_tile_of_chunk, 0),
            tl.minimum(last_tile - first_tile_of_chunk, tiles_per_chunk),
        ):
            first_token = tile * BLOCK_T
            tokens = first_token + tl.arange(0, BLOCK_T)
            first_token_64 = tl.cast(first_token, tl.int64)
            positions = chunk * chunk_length + tokens
            token_in_use = (tokens < chunk_length) & (positions < length)

            codes = load_codes(
                key_codes_ptr + chunk_64 * key_codes_stride_m + first_token_64 * KEY_CODES_STRIDE_T,
                KEY_CODES_STRIDE_T,
                key_channels,
                token_in_use[:, None] & key_channel_in_use[None, :],
                KEY_DIM,
                KEY_NBITS,
                BLOCK_T,
            )
            group_scale, group_zero = load_groups(
                key_scale_ptr + key_group + chunk_64 * key_scale_stride_m,
                key_zero_ptr + key_group + chunk_64 * key_scale_stride_m,
                KEY_SCALE_STRIDE_S,
                first_token,
                token_in_use,
                key_channels,
                key_channel_in_use,
                key_tokens_per_group,
                KEY_CHANNELS_PER_GROUP,
                KEY_FOLD,
                BLOCK_T,
            )
            scores = score_codes(query, query_sum, codes, group_scale, group_zero, KEY_FOLD, PARTS)
            if KEY_RANK > 0:
                coefficients = load_coefficients(
                    key_a_ptr + batch * key_a_stride_b + head * key_a_stride_h + chunk_64 * key_a_stride_m,
                    KEY_A_STRIDE_T,
                    first_token - key_low_rank_start,
                    token_in_use,
                    KEY_RANK,
                    BLOCK_T,
                    BLOCK_KEY_RANK,
                )
                scores += dot_exact(query_in_basis, tl.trans(coefficients), PARTS)
            outlier_tile = first_token // 64 * num_heads + head
            if KEY_OUTLIERS:
                offset_ptr = key_offset_ptr + batch * key_offset_stride_b + chunk_64 * key_offset_stride_m
                entry_base = batch * key_entry_stride_b + chunk_64 * key_entry_stride_m
                scores += score_outliers(
                    query_rows_ptr,
                    row_in_use,
                    key_entry_index_ptr + entry_base,
                    key_entry_value_ptr + entry_base,
                    tl.load(offset_ptr + outlier_tile),
                    tl.load(offset_ptr + outlier_tile + 1),
                    first_token,
                    BLOCK_R,
                    BLOCK_T,
                    BLOCK_K,
                    BLOCK_E,
                    PARTS,
                )

            tile_mask_ptr = mask_ptr
            if MASK:
                tile_mask_ptr = mask_rows_ptr[:, None] + tl.cast(positions, tl.int64)[None, :] * mask_stride_t
            in_use = row_in_use[:, None] & token_in_use[None, :]
            scores = mask_scores(scores * scale_base_2, tile_mask_ptr, in_use, MASK)
            probabilities, decay, maximum, total = update_softmax(scores, maximum, total)
            output *= decay[:, None]

            codes = load_codes(
                value_codes_ptr + chunk_64 * value_codes_stride_m + first_token_64 * VALUE_CODES_STRIDE_T,
                VALUE_CODES_STRIDE_T,
                value_channels,
                token_in_use[:, None] & value_channel_in_use[None, :],
                VALUE_DIM,
                VALUE_NBITS,
                BLOCK_T,
            )
            group_scale, group_zero = load_groups(
                value_scale_ptr + value_group + chunk_64 * value_scale_stride_m,
                value_zero_ptr + value_group + chunk_64 * value_scale_stride_m,
                VALUE_SCALE_STRIDE_S,
                first_token,
                token_in_use,
                value_channels,
                value_channel_in_use,
                value_tokens_per_group,
                VALUE_CHANNELS_PER_GROUP,
                VALUE_FOLD,
                BLOCK_T,
            )
            output += weigh_codes(probabilities, codes, group_scale, group_zero, VALUE_FOLD, PARTS)
            if VALUE_RANK > 0:
                coefficients = load_coefficients(
                    value_a_ptr + batch * value_a_stride_b + head * value_a_stride_h + chunk_64 * value_a_stride_m,
                    VALUE_A_STRIDE_T,
                    first_token - value_low_rank_start,
                    token_in_use,
                    VALUE_RANK,
                    BLOCK_T,
                    BLOCK_VALUE_RANK,
                )
                output_in_basis *= decay[:, None]
                output_in_basis += dot_exact(probabilities, coefficients, PARTS)
            if VALUE_OUTLIERS:
                offset_ptr = value_offset_ptr + batch * value_offset_stride_b + chunk_64 * value_offset_stride_m
                entry_base = batch * value_entry_stride_b + chunk_64 * value_entry_stride_m
                output = weigh_outliers(
                    output,
                    probabilities,
                    value_entry_index_ptr + entry_base,
                    value_entry_value_ptr + entry_base,
                    tl.load(offset_ptr + outlier_tile),
                    tl.load(offset_ptr + outlier_tile + 1),
                    first_token,
                    BLOCK_R,
                    BLOCK_T,
                    BLOCK_V,
                    BLOCK_E,
                    PARTS,
                )

        if VALUE_RANK > 0:
            basis_ptr = value_b_ptr + batch * value_b_stride_b + head * value_b_stride_h + chunk_64 * value_b_stride_m
            basis = load_basis(
                basis_ptr, VALUE_B_STRIDE_D, value_channels, value_channel_in_use, VALUE_RANK, BLOCK_VALUE_RANK
            )
            output += dot_exact(output_in_basis, tl.trans(basis), PARTS)

    result = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + split) * num_rows + rows
    tl.store(maximum_ptr + result, maximum, mask=row_in_use)
    tl.store(total_ptr + result, total, mask=row_in_use)
    tl.store(
        output_ptr + result[:, None] * VALUE_DIM + value_channels[None, :],
        output,
        mask=row_in_use[:, None] & value_channel_in_use[None, :],
    )
