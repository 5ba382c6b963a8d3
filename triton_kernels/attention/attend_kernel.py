"""The kernel of `attend.py`: partial attention of one key/value head over one stretch of the sequence.

Legend as in `attend.py`. Blocks: `BLOCK_R` query rows, `BLOCK_T` tokens, `BLOCK_E` outlier entries. `KEY` and `VALUE`
are a `SideLayout` each, with blocks of channels and ranks.
"""

import triton
import triton.language as tl

from ..arithmetic import LOG2_E, dot_parts, inverse_power, same_number, update_softmax
from .keys import load_queries, score_codes, sum_groups
from .low_rank import add_from_basis, load_coefficients, to_basis
from .masks import mask_row_offsets, mask_scores
from .outliers import score_outliers, weigh_outliers
from .values import empty_outputs, store_partials, weigh_codes


# Arguments that differ from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "length",
    "chunk_length",
    "num_tiles",
    "tiles_per_chunk",
    "tiles_per_split",
    "key_rank",
    "value_rank",
    "num_rows",
    "num_queries",
    *(f"mask_stride_{dimension}" for dimension in "bhq"),
    *(
        f"{side}_{part}_stride_{dimension}"
        for side in ("key", "value")
        for part in ("entry", "offset")
        for dimension in "bm"
    ),
    *(
        f"{side}_{part}_stride_{dimension}"
        for side in ("key", "value")
        for part in ("a", "scale")
        for dimension in "bhm"
    ),
]


# Sides stand beside each other
# fmt: off
@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["mask_ptr", "length_ptr"])
def attend_kernel(
    query_ptr, query_stride_b, query_stride_h, query_stride_r, mask_ptr, mask_stride_b, mask_stride_h, mask_stride_q,
    mask_stride_t, output_ptr, maximum_ptr, total_ptr, number_ptr, key_codes_ptr, key_codes_stride_b,
    key_codes_stride_h, key_codes_stride_m, key_scale_ptr, key_zero_ptr, key_scale_stride_b, key_scale_stride_h,
    key_scale_stride_m, key_a_ptr, key_a_stride_b, key_a_stride_h, key_a_stride_m, key_b_ptr, key_b_stride_b,
    key_b_stride_h, key_b_stride_m, key_entry_index_ptr, key_entry_value_ptr, key_entry_stride_b, key_entry_stride_m,
    key_offset_ptr, key_offset_stride_b, key_offset_stride_m, value_codes_ptr, value_codes_stride_b,
    value_codes_stride_h, value_codes_stride_m, value_scale_ptr, value_zero_ptr, value_scale_stride_b,
    value_scale_stride_h, value_scale_stride_m, value_a_ptr, value_a_stride_b, value_a_stride_h, value_a_stride_m,
    value_b_ptr, value_b_stride_b, value_b_stride_h, value_b_stride_m, value_entry_index_ptr, value_entry_value_ptr,
    value_entry_stride_b, value_entry_stride_m, value_offset_ptr, value_offset_stride_b, value_offset_stride_m,
    num_heads, num_rows, num_queries, length, length_ptr, chunk_length, num_tiles, tiles_per_chunk, tiles_per_split,
    key_rank, value_rank, scale, KEY: tl.constexpr, VALUE: tl.constexpr,
    QUERIES: tl.constexpr, PLANES: tl.constexpr, TOKENS_PER_STRETCH: tl.constexpr, STORED_TILES: tl.constexpr,
    MASK: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Partial attention of some rows of one key/value head over one split."""
    rows = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_in_use = rows < num_rows
    if QUERIES != "loaded":
        first_rows_ptr, _, _ = row_pointers(
            query_ptr, query_stride_b, query_stride_h, query_stride_r, rows, tl.program_id(0), num_heads)
        first_queries, first_power = load_queries(first_rows_ptr, row_in_use, KEY, BLOCK_R, PARTS)

    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    outputs, zero_sums = empty_outputs(VALUE, BLOCK_R)
    # Below every scale; 1 where scales are not relative to it
    reference = tl.full([], 1.0 if VALUE.by_channel else 2.0**-24, tl.float32)
    first_tile = tl.program_id(1) * tiles_per_split
    if length_ptr is not None:
        length = tl.load(length_ptr).to(tl.int32)
        num_tiles = count_tiles(length, chunk_length, tiles_per_chunk, TOKENS_PER_STRETCH, BLOCK_T)
        # Splits behind the last token have no tiles
        first_tile = tl.where(first_tile < num_tiles, first_tile, 0)
        num_tiles = tl.where(tl.program_id(1) * tiles_per_split < num_tiles, num_tiles, 0)
    last_tile = tl.minimum(first_tile + tiles_per_split, num_tiles)
    for chunk in range(first_tile // tiles_per_chunk, tl.cdiv(last_tile, tiles_per_chunk)):
        chunk_64 = tl.cast(chunk, tl.int64)
        program = tl.program_id(0)
        if QUERIES == "loaded":
            # Addresses are made anew every chunk: with those of factors they are too many to be kept
            program = same_number(program, PACKED)
        query_rows_ptr, batch, head = row_pointers(
            query_ptr, query_stride_b, query_stride_h, query_stride_r, rows, program, num_heads)
        mask_rows = mask_row_offsets(
            rows, num_rows, num_queries, batch, head, mask_stride_b, mask_stride_h, mask_stride_q)
        if QUERIES != "loaded":
            queries, query_power = first_queries, first_power
        else:
            # So are queries, which a chunk multiplies by its own scales and factor
            queries, query_power = load_queries(query_rows_ptr, row_in_use, KEY, BLOCK_R, PARTS)
        query_sums = sum_groups(queries, KEY, BLOCK_R)
        row_scale = query_power * (scale * LOG2_E)
        first_tile_of_chunk = chunk * tiles_per_chunk
        query_in_basis, basis_power = to_basis(
            queries, key_b_ptr, batch * key_b_stride_b + head * key_b_stride_h + chunk_64 * key_b_stride_m,
            key_rank, KEY, QUERIES, PARTS, BLOCK_R)
        output_in_basis = tl.zeros([tl.constexpr(VALUE.block_rank), BLOCK_R], tl.float32)
        for tile in range(tl.maximum(first_tile - first_tile_of_chunk, 0),
                          tl.minimum(last_tile - first_tile_of_chunk, tiles_per_chunk)):
            first_token, limit = tile_bounds(tile, chunk_length, TOKENS_PER_STRETCH, BLOCK_T)
            first_token_64 = tl.cast(first_token, tl.int64)
            tokens = first_token + tl.arange(0, BLOCK_T)
            positions = chunk * chunk_length + tokens
            token_in_use = (tokens < limit) & (positions < length)
            key_scale_start = batch * key_scale_stride_b + head * key_scale_stride_h + chunk_64 * key_scale_stride_m
            key_scale_start += scale_row(first_token_64, KEY.by_channel, KEY.tokens_per_group)
            key_scale_start *= KEY.scale_stride_s
            key_codes = batch * key_codes_stride_b + head * key_codes_stride_h + chunk_64 * key_codes_stride_m
            scores = score_codes(
                queries, query_sums,
                key_codes_ptr + key_codes + first_token_64 * KEY.codes_stride_t,
                key_scale_ptr + key_scale_start, key_zero_ptr + key_scale_start, token_in_use,
                KEY, PARTS, PACKED, BLOCK_R, BLOCK_T)
            if len(KEY.ranks) > 0:
                coefficients = load_coefficients(
                    key_a_ptr + batch * key_a_stride_b + head * key_a_stride_h + chunk_64 * key_a_stride_m,
                    key_rank, first_token, token_in_use, KEY, BLOCK_T)
                no_product = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                scores += dot_parts(coefficients, query_in_basis, no_product, PARTS) * basis_power[None, :]
            if KEY.has_outliers:
                entries = batch * key_entry_stride_b + chunk_64 * key_entry_stride_m
                scores = score_outliers(
                    scores, query_rows_ptr, row_in_use, inverse_power(query_power), number_ptr,
                    key_entry_index_ptr + entries, key_entry_value_ptr + entries,
                    key_offset_ptr + batch * key_offset_stride_b + chunk_64 * key_offset_stride_m, head, num_heads,
                    first_token, limit, STORED_TILES, KEY, BLOCK_T, BLOCK_E, PARTS, PACKED)
            mask_ptrs = mask_ptr
            if MASK:
                mask_ptrs = mask_ptr + (mask_rows[None, :] + tl.cast(positions, tl.int64)[:, None] * mask_stride_t)
            in_use = token_in_use[:, None] & row_in_use[None, :]
            scores = mask_scores(scores * row_scale[None, :], mask_ptrs, in_use, MASK)
            probabilities, decay, maximum, total = update_softmax(scores, maximum, total, 0)
            value_scale_start = (
                batch * value_scale_stride_b + head * value_scale_stride_h + chunk_64 * value_scale_stride_m)
            value_scale_start += scale_row(first_token_64, VALUE.by_channel, VALUE.tokens_per_group)
            value_scale_start *= VALUE.scale_stride_s
            value_codes = batch * value_codes_stride_b + head * value_codes_stride_h + chunk_64 * value_codes_stride_m
            outputs, zero_sums, reference = weigh_codes(
                outputs, zero_sums, reference, probabilities, decay,
                value_codes_ptr + value_codes + first_token_64 * VALUE.codes_stride_t,
                value_scale_ptr + value_scale_start, value_zero_ptr + value_scale_start, token_in_use,
                VALUE, PARTS, PACKED, BLOCK_T)
            if len(VALUE.ranks) > 0:
                coefficients = load_coefficients(
                    value_a_ptr + batch * value_a_stride_b + head * value_a_stride_h + chunk_64 * value_a_stride_m,
                    value_rank, first_token, token_in_use, VALUE, BLOCK_T)
                output_in_basis = dot_parts(
                    tl.trans(coefficients), probabilities, output_in_basis * decay[None, :], PARTS)
            if VALUE.has_outliers:
                entries = batch * value_entry_stride_b + chunk_64 * value_entry_stride_m
                outputs = weigh_outliers(
                    outputs, probabilities, reference, number_ptr,
                    value_entry_index_ptr + entries, value_entry_value_ptr + entries,
                    value_offset_ptr + batch * value_offset_stride_b + chunk_64 * value_offset_stride_m,
                    head, num_heads, first_token, limit, VALUE, STORED_TILES, BLOCK_R, BLOCK_T, BLOCK_E, PARTS, PACKED)
        outputs = add_from_basis(
            outputs, output_in_basis, reference, value_b_ptr,
            batch * value_b_stride_b + head * value_b_stride_h + chunk_64 * value_b_stride_m,
            value_rank, VALUE, PARTS)
    store_partials(
        output_ptr, maximum_ptr, total_ptr, outputs, zero_sums, reference, maximum, total, rows, num_rows,
        VALUE, PLANES)
    # fmt: on
# fmt: on


@triton.jit
def row_pointers(query_ptr, stride_b, stride_h, stride_r, rows, program, num_heads):
    """Return pointers to the query rows of a program, and its batch item and head."""
    batch, head = (program // num_heads).to(tl.int64), (program % num_heads).to(tl.int64)
    return query_ptr + batch * stride_b + head * stride_h + rows * stride_r, batch, head


@triton.jit
def tile_bounds(tile, chunk_length, TOKENS_PER_STRETCH: tl.constexpr, BLOCK_T: tl.constexpr):
    """A tile's first token in its chunk, and where its tokens end. A stretch (0: the chunk) is what it lies within."""
    if TOKENS_PER_STRETCH == 0:
        return tile * BLOCK_T, chunk_length
    tiles: tl.constexpr = (TOKENS_PER_STRETCH + BLOCK_T - 1) // BLOCK_T
    first_token = tile // tiles * TOKENS_PER_STRETCH + tile % tiles * BLOCK_T
    return first_token, tl.minimum((tile // tiles + 1) * TOKENS_PER_STRETCH, chunk_length)


@triton.jit
def count_tiles(length, chunk_length, tiles_per_chunk, TOKENS_PER_STRETCH: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the tiles of the first tokens of a sequence of chunks."""
    rest = length % chunk_length
    if TOKENS_PER_STRETCH == 0:
        tiles = tl.cdiv(rest, BLOCK_T)
    else:
        tiles_per_stretch: tl.constexpr = (TOKENS_PER_STRETCH + BLOCK_T - 1) // BLOCK_T
        tiles = rest // TOKENS_PER_STRETCH * tiles_per_stretch + tl.cdiv(rest % TOKENS_PER_STRETCH, BLOCK_T)
    return length // chunk_length * tiles_per_chunk + tiles


@triton.jit
def scale_row(first_token, BY_CHANNEL: tl.constexpr, TOKENS_PER_GROUP: tl.constexpr):
    """The row of scales that a tile begins with: its group's, the chunk's only one, or its first token's."""
    if not BY_CHANNEL:
        return first_token
    if TOKENS_PER_GROUP == 0:
        return tl.zeros_like(first_token)
    return first_token // TOKENS_PER_GROUP
