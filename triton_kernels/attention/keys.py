"""Query rows as products with keys take them, apart by field, at most 2, transposed; and scores of a tile's keys.

Legend as in `attend.py`; a tile is of one chunk and head, and all pointers are those of that chunk and head. `SIDE` is
the `SideLayout` of the keys. Scores are those of queries without the power of two taken out of each row.
"""

import triton
import triton.language as tl

from ..arithmetic import dot_parts, inverse_power, power_below
from .codes import channel_mask, field_number, load_by_field, load_words, take_field


@triton.jit
def load_queries(query_rows_ptr, row_in_use, SIDE: tl.constexpr, BLOCK_R: tl.constexpr, PARTS: tl.constexpr):
    """Rows of each field `[words, rows]`, float16 if they have one part, and the power of two taken out of each."""
    largest = tl.zeros([BLOCK_R], tl.float32)
    rows = ()
    for p in tl.static_range(len(SIDE.pieces)):
        for f in tl.static_range(len(SIDE.pieces[p].fields)):
            in_use = channel_mask(SIDE, p, f)[:, None] & row_in_use[None, :]
            words = SIDE.pieces[p].unit * tl.arange(0, SIDE.pieces[p].block)[:, None]
            pointers = query_rows_ptr[None, :] + words + SIDE.pieces[p].fields[f].first_channel
            query = tl.load(pointers, mask=in_use, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(query), axis=0))
            rows = rows + (query,)
    power = power_below(largest)
    inverse = inverse_power(power)
    queries = ()
    for i in tl.static_range(len(rows)):
        query = rows[i] * inverse[None, :]
        if PARTS == 1:
            query = query.to(tl.float16)
        queries = queries + (query,)
    return queries, power


@triton.jit
def sum_groups(queries, SIDE: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums of each group's channels `[rows]`: what a token's zero is multiplied by."""
    sums = ()
    for group in tl.static_range(tl.constexpr(SIDE.num_groups)):
        total = tl.zeros([BLOCK_R], tl.float32)
        for p in tl.static_range(len(SIDE.pieces)):
            for f in tl.static_range(len(SIDE.pieces[p].fields)):
                # A channel's higher plane belongs to the same query
                if SIDE.pieces[p].plane == 0 and SIDE.pieces[p].fields[f].group == group:
                    total += tl.sum(queries[field_number(SIDE, p, f)].to(tl.float32), axis=0)
        sums = sums + (total,)
    return sums


# A code read as a float16 is so much too small
_SUBNORMAL = tl.constexpr(2.0**24)


@triton.jit
def score_codes(
    queries, query_sums, codes_ptr, scale_ptr, zero_ptr, token_in_use, SIDE: tl.constexpr, PARTS: tl.constexpr,
    PACKED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """
    `keys query^T` `[tokens, rows]`, with keys `zero + scale * code`.

    A scale per channel multiplies the queries, which the tile's tokens share. A scale per token multiplies what the
    group's channels have given.
    """
    scores = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if SIDE.by_channel:
        # All pieces of the first plane are equally wide
        products = tl.zeros([tl.constexpr(SIDE.pieces[0].block), BLOCK_R], tl.float32)
        for p in tl.static_range(len(SIDE.pieces)):
            words = load_words(codes_ptr, token_in_use, SIDE, p, 0)
            for f in tl.static_range(len(SIDE.pieces[p].fields)):
                query = queries[field_number(SIDE, p, f)]
                codes = take_field(words, SIDE, p, f, PACKED)
                scale = load_by_field(scale_ptr, SIDE, p, f) * _weight(SIDE, p, f)
                if PARTS > 1:
                    scale = scale.to(tl.float32)
                scores = dot_parts(codes, query * scale[:, None], scores, PARTS)
                if SIDE.pieces[p].plane == 0:
                    zero = load_by_field(zero_ptr, SIDE, p, f).to(tl.float32)
                    products += query.to(tl.float32) * zero[:, None]
        scores = scores * (4 * _SUBNORMAL) + tl.sum(products, axis=0)[None, :]
    else:
        # A piece may have channels of several groups
        words = ()
        for p in tl.static_range(len(SIDE.pieces)):
            words = words + (load_words(codes_ptr, token_in_use, SIDE, p, 0),)
        tokens = tl.arange(0, BLOCK_T) * SIDE.scale_stride_s
        for group in tl.static_range(tl.constexpr(SIDE.num_groups)):
            scale = tl.load(scale_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            zero = tl.load(zero_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            product = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for p in tl.static_range(len(SIDE.pieces)):
                for f in tl.static_range(len(SIDE.pieces[p].fields)):
                    if SIDE.pieces[p].fields[f].group == group:
                        query = queries[field_number(SIDE, p, f)] * _weight(SIDE, p, f)
                        product = dot_parts(take_field(words[p], SIDE, p, f, PACKED), query, product, PARTS)
            scores += product * (scale * (4 * _SUBNORMAL))[:, None] + zero[:, None] * query_sums[group][None, :]
    return scores


@triton.constexpr_function
def _weight(side, piece, field):
    """Return the weight of a field's codes, a quarter at most, so that no scale of float16 overflows."""
    own = side.pieces[piece].fields[field]
    return 2.0 ** (own.shift - own.bit - 2)
