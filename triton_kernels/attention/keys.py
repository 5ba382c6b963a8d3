"""Scores of a tile's keys, as far as codes make them.

Legend as in `attend.py`; a tile is of one chunk and head, and all pointers are those of that chunk and head. `SIDE` is
the `SideLayout` of the keys. Scores are those of queries without the power of two taken out of each row.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_parts

from .codes import field_number, load_by_field, load_words, take_field


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
    SIDE: tl.constexpr,
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
    scores = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
    if SIDE.by_channel:
        # All pieces of the first plane are equally wide
        products = tl.zeros([SIDE.pieces[0].block, BLOCK_R], tl.float32)
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
        for group in tl.static_range(SIDE.num_groups):
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
    """Returns the weight of a field's codes, a quarter at most, so that no scale of float16 overflows."""
    own = side.pieces[piece].fields[field]
    return 2.0 ** (own.shift - own.bit - 2)
