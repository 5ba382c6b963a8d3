"""Selection of what all heads of a token share: the outliers of values, and the scale of a token.

A program takes a token of the tail, of all heads, and runs only if the tail is full and will be packed. The largest
values are found one after another, then the smallest of the others; among equal ones the first counts.

Legend: B batch, H key/value heads, L tokens a chunk, E head dim of values, K outliers of a token on each side.
"""

import triton
import triton.language as tl

from .arithmetic import scale_of


@triton.jit(do_not_specialize=["capacity"])
def select_kernel(
    values_ptr, counter_ptr, column_ptr, bound_ptr, scale_ptr, zero_ptr, num_heads, capacity, SIDE: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Find the outliers of a token's values, and its scale if all heads share it."""
    batch = (tl.program_id(0) // SIDE.length).to(tl.int64)
    token = tl.program_id(0) % SIDE.length
    # Values' counters lie behind those of keys; before the push all sets are the same
    counter_ptr += 4 * batch * num_heads
    chunk = tl.load(counter_ptr) // SIDE.length
    if (tl.load(counter_ptr + 2) == SIDE.length) & (chunk < capacity):
        numbers = tl.arange(0, BLOCK_H * SIDE.block_dim)
        heads, channels = numbers // SIDE.block_dim, numbers % SIDE.block_dim
        columns = heads * SIDE.dim + channels
        in_use = (heads < num_heads) & (channels < SIDE.dim)
        rows = (batch * num_heads + heads) * SIDE.length + token
        values = tl.load(values_ptr + rows * SIDE.dim + channels, mask=in_use, other=0.0).to(tl.float32)
        free = in_use
        if SIDE.num_outliers > 0:
            column_ptr += (batch * SIDE.length + token) * (2 * SIDE.num_outliers)
            bound_ptr += (batch * SIDE.length + token) * 2
            last = num_heads * SIDE.dim - 1
            bound = 0.0
            for number in range(SIDE.num_outliers):
                bound = tl.max(tl.where(free, values, float("-inf")), axis=0)
                column = tl.min(tl.where(free & (values == bound), columns, last), axis=0)
                tl.store(column_ptr + number, column)
                free = free & (columns != column)
            tl.store(bound_ptr, bound)
            for number in range(SIDE.num_outliers):
                bound = tl.min(tl.where(free, values, float("inf")), axis=0)
                column = tl.min(tl.where(free & (values == bound), columns, last), axis=0)
                tl.store(column_ptr + SIDE.num_outliers + number, column)
                free = free & (columns != column)
            tl.store(bound_ptr + 1, bound)
        if SIDE.is_shared:
            low = tl.min(tl.where(free, values, float("inf")), axis=0)
            high = tl.max(tl.where(free, values, float("-inf")), axis=0)
            # NaN if a value is not finite
            poison = tl.sum(values - values, axis=0)
            scale, zero = scale_of(low, high, poison, SIDE.levels)
            place = (batch * capacity + chunk) * SIDE.length + token
            tl.store(scale_ptr + place, scale)
            tl.store(zero_ptr + place, zero)
