"""The kernel of `attend.py`: partial attention of one key/value head over one stretch of the sequence.

Legend as in `attend.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_KEY_RANK` and `BLOCK_VALUE_RANK`
ranks, `BLOCK_E` outlier entries. Blocks of channels are those of `packing.py`. A side is `BY_CHANNEL` if tokens share
a scale.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_parts
from kvcache_plugins.triton_kernels.powers import inverse_power

from .keys import score_codes
from .low_rank import add_from_basis, load_coefficients, to_basis
from .masks import mask_row_offsets, mask_scores
from .outliers import score_outliers, weigh_outliers
from .queries import load_queries, sum_groups
from .softmax import update_softmax
from .values import empty_outputs, store_partials, weigh_codes


# What differs from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "length",
    "chunk_length",
    "num_tiles",
    "tiles_per_chunk",
    "tiles_per_split",
    "key_low_rank_start",
    "value_low_rank_start",
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


# Sides stand beside each other
# fmt: off
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
    number_ptr,
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
    scale,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PIECES: tl.constexpr, VALUE_PIECES: tl.constexpr,
    KEY_UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr,
    PLANES: tl.constexpr,
    KEY_CODES_STRIDE_T: tl.constexpr,
    KEY_SCALE_STRIDE_S: tl.constexpr,
    KEY_A_STRIDE_T: tl.constexpr,
    KEY_B_STRIDE_D: tl.constexpr,
    VALUE_CODES_STRIDE_T: tl.constexpr,
    VALUE_SCALE_STRIDE_S: tl.constexpr,
    VALUE_A_STRIDE_T: tl.constexpr,
    VALUE_B_STRIDE_D: tl.constexpr,
    KEY_BY_CHANNEL: tl.constexpr, VALUE_BY_CHANNEL: tl.constexpr,
    KEY_NUM_GROUPS: tl.constexpr, VALUE_NUM_GROUPS: tl.constexpr,
    KEY_TOKENS_PER_GROUP: tl.constexpr, VALUE_TOKENS_PER_GROUP: tl.constexpr,
    TOKENS_PER_STRETCH: tl.constexpr,
    KEY_RANK: tl.constexpr, VALUE_RANK: tl.constexpr,
    KEY_OUTLIERS: tl.constexpr, VALUE_OUTLIERS: tl.constexpr,
    KEY_CHANNEL_BITS: tl.constexpr, VALUE_CHANNEL_BITS: tl.constexpr,
    STORED_TILES: tl.constexpr,
    MASK: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_KEY_RANK: tl.constexpr,
    BLOCK_VALUE_RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Partial attention of some rows of one key/value head over one split."""
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_in_use = rows < num_rows
    query_rows_ptr = query_ptr + batch * query_stride_b + head * query_stride_h + rows * query_stride_r
    queries, query_power = load_queries(query_rows_ptr, row_in_use, KEY_PIECES, KEY_UNIT, KEY_DIM, BLOCK_R, PARTS)
    query_sums = sum_groups(queries, KEY_PIECES, KEY_NUM_GROUPS, BLOCK_R)
    row_scale = query_power * (scale * 1.4426950408889634)
    mask_rows = mask_row_offsets(
        rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
    key_codes_ptr += batch * key_codes_stride_b + head * key_codes_stride_h
    value_codes_ptr += batch * value_codes_stride_b + head * value_codes_stride_h
    key_group = batch * key_scale_stride_b + head * key_scale_stride_h
    value_group = batch * value_scale_stride_b + head * value_scale_stride_h

    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    outputs, zero_sums = empty_outputs(VALUE_PIECES, VALUE_NUM_GROUPS, BLOCK_R)
    # Below every scale; 1 where scales are not relative to it
    reference = tl.full([], 1.0 if VALUE_BY_CHANNEL else 2.0**-24, tl.float32)
    first_tile = tl.program_id(1) * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    for chunk in range(first_tile // tiles_per_chunk, tl.cdiv(last_tile, tiles_per_chunk)):
        chunk_64 = tl.cast(chunk, tl.int64)
        first_tile_of_chunk = chunk * tiles_per_chunk
        query_in_basis, basis_power = to_basis(
            queries, key_b_ptr, batch * key_b_stride_b + head * key_b_stride_h + chunk_64 * key_b_stride_m,
            KEY_B_STRIDE_D, KEY_PIECES, KEY_UNIT, KEY_DIM, KEY_RANK, PARTS, BLOCK_R, BLOCK_KEY_RANK)
        output_in_basis = tl.zeros([BLOCK_VALUE_RANK, BLOCK_R], tl.float32)
        for tile in range(tl.maximum(first_tile - first_tile_of_chunk, 0),
                          tl.minimum(last_tile - first_tile_of_chunk, tiles_per_chunk)):
            first_token, limit = tile_bounds(tile, chunk_length, TOKENS_PER_STRETCH, BLOCK_T)
            first_token_64 = tl.cast(first_token, tl.int64)
            tokens = first_token + tl.arange(0, BLOCK_T)
            positions = chunk * chunk_length + tokens
            token_in_use = (tokens < limit) & (positions < length)
            key_scale_start = key_group + chunk_64 * key_scale_stride_m + scale_row(
                first_token_64, KEY_BY_CHANNEL, KEY_TOKENS_PER_GROUP) * KEY_SCALE_STRIDE_S
            scores = score_codes(
                queries, query_sums,
                key_codes_ptr + chunk_64 * key_codes_stride_m + first_token_64 * KEY_CODES_STRIDE_T,
                key_scale_ptr + key_scale_start, key_zero_ptr + key_scale_start, token_in_use,
                KEY_PIECES, KEY_UNIT, KEY_DIM, KEY_CODES_STRIDE_T, KEY_SCALE_STRIDE_S, KEY_BY_CHANNEL, KEY_NUM_GROUPS,
                PARTS, PACKED, BLOCK_R, BLOCK_T)
            if KEY_RANK > 0:
                coefficients = load_coefficients(
                    key_a_ptr + batch * key_a_stride_b + head * key_a_stride_h + chunk_64 * key_a_stride_m,
                    KEY_A_STRIDE_T, first_token - key_low_rank_start, token_in_use, KEY_RANK, BLOCK_T, BLOCK_KEY_RANK)
                no_product = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                scores += dot_parts(coefficients, query_in_basis, no_product, PARTS) * basis_power[None, :]
            if KEY_OUTLIERS:
                entries = batch * key_entry_stride_b + chunk_64 * key_entry_stride_m
                scores = score_outliers(
                    scores, query_rows_ptr, row_in_use, inverse_power(query_power), number_ptr,
                    key_entry_index_ptr + entries, key_entry_value_ptr + entries,
                    key_offset_ptr + batch * key_offset_stride_b + chunk_64 * key_offset_stride_m, head, num_heads,
                    first_token, limit, STORED_TILES, KEY_CHANNEL_BITS, BLOCK_T, BLOCK_E, PARTS, PACKED)
            mask_ptrs = mask_ptr
            if MASK:
                mask_ptrs = mask_ptr + (mask_rows[None, :] + tl.cast(positions, tl.int64)[:, None] * mask_stride_t)
            in_use = token_in_use[:, None] & row_in_use[None, :]
            scores = mask_scores(scores * row_scale[None, :], mask_ptrs, in_use, MASK)
            probabilities, decay, maximum, total = update_softmax(scores, maximum, total, 0)
            value_scale_start = value_group + chunk_64 * value_scale_stride_m + scale_row(
                first_token_64, VALUE_BY_CHANNEL, VALUE_TOKENS_PER_GROUP) * VALUE_SCALE_STRIDE_S
            outputs, zero_sums, reference = weigh_codes(
                outputs, zero_sums, reference, probabilities, decay,
                value_codes_ptr + chunk_64 * value_codes_stride_m + first_token_64 * VALUE_CODES_STRIDE_T,
                value_scale_ptr + value_scale_start, value_zero_ptr + value_scale_start, token_in_use,
                VALUE_PIECES, VALUE_UNIT, VALUE_DIM, VALUE_CODES_STRIDE_T, VALUE_SCALE_STRIDE_S, VALUE_BY_CHANNEL,
                VALUE_NUM_GROUPS, PARTS, PACKED, BLOCK_T)
            if VALUE_RANK > 0:
                coefficients = load_coefficients(
                    value_a_ptr + batch * value_a_stride_b + head * value_a_stride_h + chunk_64 * value_a_stride_m,
                    VALUE_A_STRIDE_T, first_token - value_low_rank_start, token_in_use, VALUE_RANK, BLOCK_T,
                    BLOCK_VALUE_RANK)
                output_in_basis = dot_parts(
                    tl.trans(coefficients), probabilities, output_in_basis * decay[None, :], PARTS)
            if VALUE_OUTLIERS:
                entries = batch * value_entry_stride_b + chunk_64 * value_entry_stride_m
                outputs = weigh_outliers(
                    outputs, probabilities, reference, number_ptr,
                    value_entry_index_ptr + entries, value_entry_value_ptr + entries,
                    value_offset_ptr + batch * value_offset_stride_b + chunk_64 * value_offset_stride_m,
                    head, num_heads, first_token, limit, VALUE_PIECES, VALUE_UNIT, VALUE_BY_CHANNEL, STORED_TILES,
                    VALUE_CHANNEL_BITS, BLOCK_R, BLOCK_T, BLOCK_E, PARTS, PACKED)
        outputs = add_from_basis(
            outputs, output_in_basis, reference, value_b_ptr,
            batch * value_b_stride_b + head * value_b_stride_h + chunk_64 * value_b_stride_m, VALUE_B_STRIDE_D,
            VALUE_PIECES, VALUE_UNIT, VALUE_DIM, VALUE_BY_CHANNEL, VALUE_RANK, PARTS, BLOCK_VALUE_RANK)
    store_partials(
        output_ptr, maximum_ptr, total_ptr, outputs, zero_sums, reference, maximum, total, rows, num_rows,
        VALUE_PIECES, VALUE_UNIT, VALUE_DIM, VALUE_BY_CHANNEL, PLANES)
    # fmt: on
# fmt: on


@triton.jit
def tile_bounds(tile, chunk_length, TOKENS_PER_STRETCH: tl.constexpr, BLOCK_T: tl.constexpr):
    """A tile's first token in its chunk, and where its tokens end. A stretch (0: the chunk) is what it lies within."""
    if TOKENS_PER_STRETCH == 0:
        return tile * BLOCK_T, chunk_length
    tiles: tl.constexpr = (TOKENS_PER_STRETCH + BLOCK_T - 1) // BLOCK_T
    first_token = tile // tiles * TOKENS_PER_STRETCH + tile % tiles * BLOCK_T
    return first_token, tl.minimum((tile // tiles + 1) * TOKENS_PER_STRETCH, chunk_length)


@triton.jit
def scale_row(first_token, BY_CHANNEL: tl.constexpr, TOKENS_PER_GROUP: tl.constexpr):
    """The row of scales that a tile begins with: its group's, the chunk's only one, or its first token's."""
    if not BY_CHANNEL:
        return first_token
    if TOKENS_PER_GROUP == 0:
        return tl.zeros_like(first_token)
    return first_token // TOKENS_PER_GROUP
