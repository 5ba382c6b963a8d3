"""Query rows as the products with keys take them: apart by field, at most 2, transposed.

Legend as in `attend.py`; `SIDE` is the `SideLayout` of the keys.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.powers import inverse_power, power_below

from .codes import channel_mask, field_number


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
    for group in tl.static_range(SIDE.num_groups):
        total = tl.zeros([BLOCK_R], tl.float32)
        for p in tl.static_range(len(SIDE.pieces)):
            for f in tl.static_range(len(SIDE.pieces[p].fields)):
                # A channel's higher plane belongs to the same query
                if SIDE.pieces[p].plane == 0 and SIDE.pieces[p].fields[f].group == group:
                    total += tl.sum(queries[field_number(SIDE, p, f)].to(tl.float32), axis=0)
        sums = sums + (total,)
    return sums
