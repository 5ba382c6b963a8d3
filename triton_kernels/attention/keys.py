"""Scores of a tile's keys, the sum of all parts stored.

Legend as in `attend.py`; a tile is of one chunk and head, and all pointers are those of that chunk and head. Pieces
and fields are those of `packing.py`. Scores are those of queries without the power of two taken out of each row.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_parts

from .codes import load_by_field, load_words, take_field
from .queries import field_number


# A code read as a float16 is so much too small
_SUBNORMAL = tl.constexpr(2.0**24)


@triton.jit
def score_codes(
    queries,
    query_sums,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    token_in_use,
    PIECES: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    CODES_STRIDE_T: tl.constexpr,
    SCALE_STRIDE_T: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """
    `keys query^T` `[tokens, rows]`, with keys `zero + scale * code`.

    A scale per channel multiplies the queries, which the tile's tokens share. A scale per token multiplies what the
    group's channels have given.
    """
    words = ()
    for p in tl.static_range(len(PIECES)):
        words = words + (load_words(codes_ptr, token_in_use, CODES_STRIDE_T, PIECES[p], UNIT, 0),)
    scores = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if BY_CHANNEL:
        # All pieces of the first plane are equally wide
        products = tl.zeros([PIECES[0][2], BLOCK_R], tl.float32)
        for p in tl.static_range(len(PIECES)):
            for f in tl.static_range(len(PIECES[p][4])):
                query = queries[field_number(PIECES, p, f)]
                codes = take_field(words[p], PIECES[p][4][f], PACKED)
                scale = load_by_field(scale_ptr, PIECES[p], PIECES[p][4][f], UNIT, DIM) * _weight(PIECES[p][4][f])
                if PARTS > 1:
                    scale = scale.to(tl.float32)
                scores = dot_parts(codes, query * scale[:, None], scores, PARTS)
                if PIECES[p][3] == 0:
                    zero = load_by_field(zero_ptr, PIECES[p], PIECES[p][4][f], UNIT, DIM).to(tl.float32)
                    products += query.to(tl.float32) * zero[:, None]
        scores = scores * (4 * _SUBNORMAL) + tl.sum(products, axis=0)[None, :]
    else:
        tokens = tl.arange(0, BLOCK_T) * SCALE_STRIDE_T
        for group in tl.static_range(NUM_GROUPS):
            scale = tl.load(scale_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            zero = tl.load(zero_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            product = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for p in tl.static_range(len(PIECES)):
                for f in tl.static_range(len(PIECES[p][4])):
                    if PIECES[p][4][f][5] == group:
                        query = queries[field_number(PIECES, p, f)] * _weight(PIECES[p][4][f])
                        product = dot_parts(take_field(words[p], PIECES[p][4][f], PACKED), query, product, PARTS)
            scores += product * (scale * (4 * _SUBNORMAL))[:, None] + zero[:, None] * query_sums[group][None, :]
    return scores


@triton.constexpr_function
def _weight(field):
    """What the codes of a field count, a quarter at most, so that no scale of float16 overflows."""
    return 2.0 ** (field[3] - field[1] - 2)
