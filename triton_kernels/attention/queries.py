"""Query rows as the products with keys take them: apart by field, at most 2, transposed.

Legend as in `attend.py`; pieces and fields are those of `packing.py`.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.powers import inverse_power, power_below

from .codes import channel_mask


@triton.jit
def load_queries(
    query_rows_ptr,
    row_in_use,
    PIECES: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Rows of each field `[words, rows]`, float16 if they have one part, and the power of two taken out of each."""
    largest = tl.zeros([BLOCK_R], tl.float32)
    rows = ()
    for p in tl.static_range(len(PIECES)):
        for f in tl.static_range(len(PIECES[p][4])):
            in_use = channel_mask(PIECES[p], PIECES[p][4][f], UNIT, DIM)[:, None] & row_in_use[None, :]
            pointers = query_rows_ptr[None, :] + UNIT * tl.arange(0, PIECES[p][2])[:, None] + PIECES[p][4][f][4]
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
def sum_groups(queries, PIECES: tl.constexpr, NUM_GROUPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """The sums of each group's channels `[rows]`: what a token's zero is multiplied by."""
    sums = ()
    for group in tl.static_range(NUM_GROUPS):
        total = tl.zeros([BLOCK_R], tl.float32)
        for p in tl.static_range(len(PIECES)):
            for f in tl.static_range(len(PIECES[p][4])):
                # A channel's higher plane belongs to the same query
                if PIECES[p][3] == 0 and PIECES[p][4][f][5] == group:
                    total += tl.sum(queries[field_number(PIECES, p, f)].to(tl.float32), axis=0)
        sums = sums + (total,)
    return sums


@triton.constexpr_function
def field_number(pieces, piece, field):
    """The place of a field in tuples of something for each."""
    return sum(len(each[4]) for each in pieces[:piece]) + field
