"""Building blocks of attention over transform-coded rows: a tile of tokens meets up to four queries.

A key's code becomes a point in registers, out of a table or by a polynomial, the point a channel by the token's scale
and the channel's mean, and the channel two by cosine and sine of the token's offset within the tile: they meet the
queries as turned back to the tile's start, each lane its own channel and its partner's. So the order of channels does
not matter, and nothing is gathered from memory.

Legend: N blocks of eight channels, T tokens of a tile.
"""

from collections.abc import Callable
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
from .primitives import INLINED, OPTIONS, ROWS
from .vectors import (
    LANES,
    add,
    broadcast,
    load_floats,
    masked_to_floats,
    multiply,
    multiply_add,
    store_floats,
    sums_of_eight,
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
    low, high = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    masks, shifts = np.zeros(count, dtype=np.int32), np.zeros((1, count * LANES), dtype=np.int32)
    points, wide = np.zeros((count, 5), dtype=np.float32), np.zeros(count, dtype=np.int64)
    of_states, in_tables = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.bool_)
    tables = np.zeros((count, TABLE_SIZE), dtype=np.float32)
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
        points[v, 2:] = coefficients[width]
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


@njit(**INLINED)
def add_turned(
    num_rows: int, own: Any, partners: Any, place: int, states: Any, offsets: Any, cosines: Any, sines: Any, sums: Any
) -> Any:
    """
    Adds what eight channels of two tokens' keys add to scores.

    Args:
        num_rows: queries in use, 1 to 4.
        own, partners, cosines, sines: as in `dot_rows`.
        place: of the channels.
        states: the channels of both tokens.
        offsets: places of both tokens in the tile.
        sums: the sums of the first token for four queries, and of the second.
    """
    (a, b), (t, u), (a0, a1, a2, a3, b0, b1, b2, b3) = states, offsets, sums
    a_sine, b_sine = multiply(a, load_floats(sines, t, place)), multiply(b, load_floats(sines, u, place))
    a, b = multiply(a, load_floats(cosines, t, place)), multiply(b, load_floats(cosines, u, place))
    q, p = load_floats(own, 0, place), load_floats(partners, 0, place)
    a0, b0 = multiply_add(a_sine, p, multiply_add(a, q, a0)), multiply_add(b_sine, p, multiply_add(b, q, b0))
    if num_rows > 1:
        q, p = load_floats(own, 1, place), load_floats(partners, 1, place)
        a1, b1 = multiply_add(a_sine, p, multiply_add(a, q, a1)), multiply_add(b_sine, p, multiply_add(b, q, b1))
    if num_rows > 2:
        q, p = load_floats(own, 2, place), load_floats(partners, 2, place)
        a2, b2 = multiply_add(a_sine, p, multiply_add(a, q, a2)), multiply_add(b_sine, p, multiply_add(b, q, b2))
    if num_rows > 3:
        q, p = load_floats(own, 3, place), load_floats(partners, 3, place)
        a3, b3 = multiply_add(a_sine, p, multiply_add(a, q, a3)), multiply_add(b_sine, p, multiply_add(b, q, b3))
    return a0, a1, a2, a3, b0, b1, b2, b3


def _make_dot_rows(num_rows: int) -> Callable[..., None]:
    @njit(**OPTIONS)
    def dot_rows(
        own: Any, partners: Any, rows: Any, blocks: Any, means: Any, scales: Any, cosines: Any, sines: Any, span: Any,
        scores: Any,
    ) -> None:  # fmt: skip
        first, count = span
        for t in range(0, count, 2):
            u = min(t + 1, count - 1)
            scale_a, scale_b = broadcast(scales[first + t]), broadcast(scales[first + u])
            zero = broadcast(_ZERO)
            sums = (zero, zero, zero, zero, zero, zero, zero, zero)
            for v in range(blocks.low.shape[0]):
                place = v * LANES
                a = b = load_floats(means, 0, place)
                if blocks.in_tables[v]:
                    a = multiply_add(found_points(rows, first + t, blocks, v), scale_a, a)
                    b = multiply_add(found_points(rows, first + u, blocks, v), scale_b, b)
                elif blocks.widths[v] > 0:
                    a = multiply_add(computed_points(rows, first + t, blocks, v), scale_a, a)
                    b = multiply_add(computed_points(rows, first + u, blocks, v), scale_b, b)
                sums = add_turned(num_rows, own, partners, place, (a, b), (t, u), cosines, sines, sums)
            store_floats(scores, 0, t * ROWS, sums_of_eight(*sums))

    return dot_rows  # type: ignore[no-any-return]


@njit(**INLINED)
def add_to_rows(num_rows: int, vectors: Any, place: int, sums: Any) -> None:
    """Adds a vector of every row in use to `sums` `[4, 8 N]`."""
    a0, a1, a2, a3 = vectors
    store_floats(sums, 0, place, add(load_floats(sums, 0, place), a0))
    if num_rows > 1:
        store_floats(sums, 1, place, add(load_floats(sums, 1, place), a1))
    if num_rows > 2:
        store_floats(sums, 2, place, add(load_floats(sums, 2, place), a2))
    if num_rows > 3:
        store_floats(sums, 3, place, add(load_floats(sums, 3, place), a3))


def _make_accumulate_rows(num_rows: int) -> Callable[..., None]:
    @njit(**OPTIONS)
    def accumulate_rows(weights: Any, rows: Any, blocks: Any, span: Any, sums: Any) -> None:
        first, count = span
        v, num_blocks = 0, blocks.low.shape[0]
        while v < num_blocks:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
            # Two blocks share what is loaded of weights
            step = 1 + (v + 1 < num_blocks and blocks.in_tables[v] and blocks.in_tables[v + 1])
            if step == 2:
                for t in range(count):
                    a = found_points(rows, first + t, blocks, v)
                    b = found_points(rows, first + t, blocks, v + 1)
                    w = broadcast(weights[0, t * ROWS])
                    a0, b0 = multiply_add(a, w, a0), multiply_add(b, w, b0)
                    if num_rows > 1:
                        w = broadcast(weights[0, t * ROWS + 1])
                        a1, b1 = multiply_add(a, w, a1), multiply_add(b, w, b1)
                    if num_rows > 2:
                        w = broadcast(weights[0, t * ROWS + 2])
                        a2, b2 = multiply_add(a, w, a2), multiply_add(b, w, b2)
                    if num_rows > 3:
                        w = broadcast(weights[0, t * ROWS + 3])
                        a3, b3 = multiply_add(a, w, a3), multiply_add(b, w, b3)
            elif blocks.widths[v] > 0:
                for t in range(count):
                    a = points_of(rows, first + t, blocks, v)
                    a0 = multiply_add(a, broadcast(weights[0, t * ROWS]), a0)
                    if num_rows > 1:
                        a1 = multiply_add(a, broadcast(weights[0, t * ROWS + 1]), a1)
                    if num_rows > 2:
                        a2 = multiply_add(a, broadcast(weights[0, t * ROWS + 2]), a2)
                    if num_rows > 3:
                        a3 = multiply_add(a, broadcast(weights[0, t * ROWS + 3]), a3)
            place, last = v * LANES, (v + step - 1) * LANES
            # The second sums are zero where there is one block
            add_to_rows(num_rows, (a0, a1, a2, a3), place, sums)
            add_to_rows(num_rows, (b0, b1, b2, b3), last, sums)
            v += step

    return accumulate_rows  # type: ignore[no-any-return]


_dot_1, _dot_2, _dot_3, _dot_4 = (_make_dot_rows(rows) for rows in range(1, ROWS + 1))
_accumulate_1, _accumulate_2, _accumulate_3, _accumulate_4 = (_make_accumulate_rows(r) for r in range(1, ROWS + 1))


@njit(**OPTIONS)
def dot_rows(
    num_rows: int,
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
        num_rows: queries in use, 1 to 4.
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
    if num_rows == 1:
        _dot_1(own, partners, rows, blocks, means, scales, cosines, sines, span, scores)
    elif num_rows == 2:
        _dot_2(own, partners, rows, blocks, means, scales, cosines, sines, span, scores)
    elif num_rows == 3:
        _dot_3(own, partners, rows, blocks, means, scales, cosines, sines, span, scores)
    else:
        _dot_4(own, partners, rows, blocks, means, scales, cosines, sines, span, scores)


@njit(**OPTIONS)
def accumulate_rows(num_rows: int, weights: Any, rows: Any, blocks: Blocks, span: tuple[int, int], sums: Any) -> None:
    """
    Adds the points of a tile's values, times `weights` `[1, 4 T + 4]`, to `sums` `[4, 8 N]`; the others as in
    `dot_rows`.
    """
    if num_rows == 1:
        _accumulate_1(weights, rows, blocks, span, sums)
    elif num_rows == 2:
        _accumulate_2(weights, rows, blocks, span, sums)
    elif num_rows == 3:
        _accumulate_3(weights, rows, blocks, span, sums)
    else:
        _accumulate_4(weights, rows, blocks, span, sums)
