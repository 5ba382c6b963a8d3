"""Building blocks of attention over transform-coded rows: a tile of tokens meets up to four queries.

A key's code becomes a point in registers, out of a table or by a polynomial, the point a channel by the token's scale
and the channel's mean, and the channel two by cosine and sine of the token's offset within the tile: they meet the
queries as turned back to the tile's start, each lane its own channel and its partner's. So the order of channels does
not matter, and nothing is gathered from memory.

Legend: N blocks of eight channels, T tokens of a tile.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, njit

from .fields import (
    TABLE_SIZE,
    load_halves_of_block,
    load_ints,
    load_word,
    look_up,
    lookup_bits,
    multiply_ints,
    shift_right,
)
from .new_arrays import zero_flags, zero_ints, zero_longs, zeros
from .primitives import BORROWING, INLINED, OPTIONS
from .row_vectors import ROWS, add_to_rows, add_turned, add_weighted, no_sums, sums_of_two
from .vectors import (
    LANES,
    broadcast,
    load_floats,
    masked_to_floats,
    multiply,
    multiply_add,
    store_floats,
)


_ZERO = np.float32(0)
_STATE_BITS = 8


class Blocks(NamedTuple):
    """
    Where the blocks of a head's rows are and what their codes mean.

    `widths`, `low`, `high` `[N]`: bits, and where the two loads begin; `in_tables` `[N]`: whether it is one load, and
    points are looked up in `tables` `[N, 16]`; `multipliers` `[N]`: of states, 0 for codes, which are taken as they
    are; `masks` `[N]`; `shifts` `[1, 8 N]`; `points` `[N, 5]`: what makes a code lie between -1 and 1, a factor and a
    term, and the coefficients.
    """

    widths: Any
    low: Any
    high: Any
    in_tables: Any
    tables: Any
    multipliers: Any
    masks: Any
    shifts: Any
    points: Any


@njit(**OPTIONS)
def make_blocks(widths: Any, row_size: int, coefficients: Any, multipliers: Any) -> Blocks:
    """
    Those of `widths` `[N]`; `coefficients` `[9, 3]` of points, `multipliers` `[9]` of states.

    A state (`ops.transform_coding.trellis`) begins where its code does, and reaches beyond it.
    """
    count = widths.shape[0]
    low, high, wide = zero_longs((count,)), zero_longs((count,)), zero_longs((count,))
    masks, shifts, of_states = zero_ints((count,)), zero_ints((1, count * LANES)), zero_ints((count,))
    points, tables, in_tables = zeros(count, 5), zeros(count, TABLE_SIZE), zero_flags((count,))
    offset = 1
    half = LANES // 2
    for v in range(count):
        width = wide[v] = int(widths[v])
        of_states[v] = multipliers[width]
        in_tables[v] = 0 < width <= lookup_bits() and not of_states[v]
        # A load must not reach beyond the row; what it then begins with is shifted out
        low[v] = min(offset, row_size - half)
        high[v] = low[v] if in_tables[v] else min(offset + width // 2, row_size - half)
        for lane in range(half):
            shifts[0, v * LANES + lane] = 8 * (offset - low[v]) + lane * width
            shifts[0, v * LANES + half + lane] = 8 * (offset - high[v]) + (half + lane) * width
        num_codes = 1 << (_STATE_BITS if of_states[v] else width)
        masks[v] = num_codes - 1
        points[v, 0] = 2.0 / num_codes
        points[v, 1] = 1.0 / num_codes - 1.0
        # Not as slices, for whose errors Numba compiles a dozen functions
        for i in range(3):
            points[v, 2 + i] = coefficients[width, i]
        if in_tables[v]:
            for code in range(TABLE_SIZE):
                centred = float32(code % num_codes) * points[v, 0] + points[v, 1]
                square = centred * centred
                tables[v, code] = centred * (points[v, 2] + square * (points[v, 3] + square * points[v, 4]))
        offset += width
    return Blocks(wide, low, high, in_tables, tables, of_states, masks, shifts, points)


@njit(**INLINED)
def points_of(rows: Any, token: Any, blocks: Blocks, v: Any) -> Any:
    """The points of a block of a token, of 1 bit at least."""
    if blocks.in_tables[v]:
        return found_points(rows, token, blocks, v)
    return computed_points(rows, token, blocks, v)


@njit(**INLINED)
def found_points(rows: Any, token: Any, blocks: Blocks, v: Any) -> Any:
    """The points of a block of a token, looked up in tables."""
    codes = shift_right(load_word(rows, token, blocks.low[v]), load_ints(blocks.shifts, 0, v * LANES))
    return look_up(load_floats(blocks.tables, v, 0), load_floats(blocks.tables, v, LANES), codes)


@njit(**INLINED)
def computed_points(rows: Any, token: Any, blocks: Blocks, v: Any) -> Any:
    """The same of a block that has no table."""
    words = load_halves_of_block(rows, token, blocks.low[v], blocks.high[v])
    words = shift_right(words, load_ints(blocks.shifts, 0, v * LANES))
    if blocks.multipliers[v] > 0:
        words = multiply_ints(words, blocks.multipliers[v])
    codes, points = masked_to_floats(words, blocks.masks[v]), blocks.points
    centred = multiply_add(codes, broadcast(points[v, 0]), broadcast(points[v, 1]))
    square = multiply(centred, centred)
    inner = broadcast(points[v, 3])
    if points[v, 4] != _ZERO:
        inner = multiply_add(square, broadcast(points[v, 4]), inner)
    return multiply(centred, multiply_add(square, inner, broadcast(points[v, 2])))


@njit(**BORROWING)
def dot_rows(
    used: Any,
    own: Any,
    partners: Any,
    rows: Any,
    blocks: Blocks,
    means: Any,
    scales: Any,
    cosines: Any,
    sines: Any,
    span: tuple[int, int],
    scores: Any,
) -> None:
    """
    Scores of a tile.

    Args:
        used: queries in use, 1 to 4, as the length of a tuple.
        own, partners: `[4, 8 N]`: the queries as turned back to the tile's start, every channel's own and its
            partner's, times the channel's deviation.
        rows: `[tokens, bytes]`.
        blocks: of the keys.
        means: `[1, 8 N]`, of channels, over their deviations.
        scales: `[tokens]`.
        cosines, sines: `[T, 8 N]`, of the angles from the tile's start; sines negative.
        span: the tile's first token, and how many.
        scores: `[1, 4 T + 4]`, filled, four numbers a token, and one token more if they are odd.
    """
    first, count = span
    for t in range(0, count, 2):
        u = min(t + 1, count - 1)
        scale_a, scale_b = broadcast(scales[first + t]), broadcast(scales[first + u])
        sums_a = sums_b = no_sums(used)
        for v in range(blocks.low.shape[0]):
            place = v * LANES
            a = b = load_floats(means, 0, place)
            if blocks.in_tables[v]:
                a = multiply_add(found_points(rows, first + t, blocks, v), scale_a, a)
                b = multiply_add(found_points(rows, first + u, blocks, v), scale_b, b)
            elif blocks.widths[v] > 0:
                a = multiply_add(computed_points(rows, first + t, blocks, v), scale_a, a)
                b = multiply_add(computed_points(rows, first + u, blocks, v), scale_b, b)
            sums_a = add_turned(sums_a, a, own, partners, cosines, sines, t, place)
            sums_b = add_turned(sums_b, b, own, partners, cosines, sines, u, place)
        store_floats(scores, 0, t * ROWS, sums_of_two(sums_a, sums_b))


@njit(**BORROWING)
def accumulate_rows(used: Any, weights: Any, rows: Any, blocks: Blocks, span: tuple[int, int], sums: Any) -> None:
    """
    Adds the points of a tile's values, times `weights` `[1, 4 T + 4]`, to `sums` `[4, 8 N]`; the others as in
    `dot_rows`.
    """
    first, count = span
    v, num_blocks = 0, blocks.low.shape[0]
    while v < num_blocks:
        sums_a = sums_b = no_sums(used)
        # Two blocks share what is loaded of weights
        step = 1 + (v + 1 < num_blocks and blocks.in_tables[v] and blocks.in_tables[v + 1])
        if step == 2:
            for t in range(count):
                a = found_points(rows, first + t, blocks, v)
                b = found_points(rows, first + t, blocks, v + 1)
                sums_a = add_weighted(sums_a, a, weights, t * ROWS)
                sums_b = add_weighted(sums_b, b, weights, t * ROWS)
        elif blocks.widths[v] > 0:
            for t in range(count):
                a = points_of(rows, first + t, blocks, v)
                sums_a = add_weighted(sums_a, a, weights, t * ROWS)
        # The second sums are zero where there is one block
        add_to_rows(sums, v * LANES, sums_a)
        add_to_rows(sums, (v + step - 1) * LANES, sums_b)
        v += step
