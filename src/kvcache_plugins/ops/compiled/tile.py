"""What happens to a tile of up to 64 tokens of one key/value head and up to four of its queries.

Codes become floats in registers. Every other part goes its own way: low-rank factors `q B` first, then `A^T`, and
weights times `A` first, then `B^T`; zeros and outliers by what they add to a score or to a channel.

Legend: D head dim, V vectors of codes, T tokens of a tile.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64, njit

from .arrays import Side
from .layout import CodeLayout
from .new_arrays import zero_longs, zeros
from .primitives import (
    BORROWING,
    INLINED,
    accumulate_codes,
    dot_codes,
    scale_columns,
    scale_rows,
    sum_products,
    to_floats,
)
from .row_vectors import ROWS
from .vectors import (
    LANES,
    add,
    broadcast,
    broadcast_four,
    float_of_half,
    hadamard_of_eight,
    load_floats,
    load_four,
    load_halves,
    multiply,
    multiply_add,
    store_floats,
    store_four,
    sums_of_eight,
)


class Queries(NamedTuple):
    """
    Up to four queries of a task.

    `by_row` `[4, D]`; `by_channel` `[1, 4 D]`: four numbers a channel; `by_vector` `[4, 8 V]`: in the order of the
    codes, with their weights; `folded`: the same times the scales of one group, whose number is in `group` `[1]`;
    `base` `[1, 8]`: what the zeros of that group add to a score, twice; `projected` `[rank, 4]`: `q B` of the chunk.
    """

    by_row: Any
    by_channel: Any
    by_vector: Any
    folded: Any
    base: Any
    group: Any
    projected: Any


class Sums(NamedTuple):
    """
    The online softmax of a task: codes `[4, 8 V]`, outliers and low rank by channel `[1, 4 D]`, zeros by group
    `[groups, 4]`, weighted rows of A `[rank, 4]`, and twice every row's sum of weights and maximum score `[1, 8]`.
    """

    codes: Any
    by_channel: Any
    zeros: Any
    weighted_a: Any
    total: Any
    maximum: Any


class Outliers(NamedTuple):
    """Those of a chunk: places in 16 or 32 bits, values, and the first of every tile and head, if there are any."""

    indices: Any
    wide_indices: Any
    values: Any
    offsets: Any


@njit(**INLINED)
def load_queries(query: Any, scale: Any, rows: int, rank: int, layout: CodeLayout) -> Queries:
    """`query` `[rows, D]`."""
    head_dim = query.shape[1]
    by_row = zeros(ROWS, head_dim)
    by_channel = zeros(1, ROWS * head_dim)
    by_vector = zeros(ROWS, layout.places.shape[0] * LANES)
    group = zero_longs((1,))
    group[0] = -1
    for r in range(rows):
        for d in range(head_dim):
            by_row[r, d] = by_channel[0, ROWS * d + r] = query[r, d] * scale
        for v in range(layout.places.shape[0]):
            for lane in range(LANES):
                channel = layout.channels[v, lane]
                if channel >= 0:
                    by_vector[r, v * LANES + lane] = by_row[r, channel] * layout.weights[v]
    return Queries(
        by_row,
        by_channel,
        by_vector,
        by_vector.copy(),
        zeros(1, 2 * ROWS),
        group,
        zeros(rank, ROWS),
    )


@njit(**INLINED)
def fold_scales(queries: Queries, rows: int, layout: CodeLayout, scale: Any, zero: Any, group: int) -> None:
    """Multiplies queries by a group's scales, and its zeros by queries; `scale`, `zero` `[groups, D]`."""
    for v in range(layout.places.shape[0]):
        if layout.in_order[v]:
            steps = load_halves(scale, group, layout.channels[v, 0])
            for r in range(rows):
                products = multiply(load_floats(queries.by_vector, r, v * LANES), steps)
                store_floats(queries.folded, r, v * LANES, products)
        else:
            for lane in range(LANES):
                channel = layout.channels[v, lane]
                if channel >= 0:
                    step, place = float_of_half(scale[group, channel]), v * LANES + lane
                    for r in range(rows):
                        queries.folded[r, place] = queries.by_vector[r, place] * step
    a0 = a1 = a2 = a3 = broadcast(float32(0))
    whole = scale.shape[1] // LANES * LANES
    for d in range(0, whole, LANES):
        lows = load_halves(zero, group, d)
        a0 = multiply_add(lows, load_floats(queries.by_row, 0, d), a0)
        a1 = multiply_add(lows, load_floats(queries.by_row, 1, d), a1)
        a2 = multiply_add(lows, load_floats(queries.by_row, 2, d), a2)
        a3 = multiply_add(lows, load_floats(queries.by_row, 3, d), a3)
    store_floats(queries.base, 0, 0, sums_of_eight(a0, a1, a2, a3, a0, a1, a2, a3))
    for d in range(whole, scale.shape[1]):
        for r in range(2 * ROWS):
            queries.base[0, r] += queries.by_row[r % ROWS, d] * float_of_half(zero[group, d])


@njit(**INLINED)
def score_by_channel(
    used: Any,
    queries: Queries,
    rows: int,
    layout: CodeLayout,
    codes: Any,
    scale: Any,
    zero: Any,
    start: int,
    tokens: int,
    scores: Any,
) -> None:
    """Scores of a tile of keys whose channels share scales, a group of tokens after the other."""
    first, group_size = start, codes.shape[0] // scale.shape[0]
    vectors = (int64(0), int64(layout.places.shape[0]))
    while first < start + tokens:
        group = first // group_size
        last = min(start + tokens, (group + 1) * group_size)
        if queries.group[0] != group:
            fold_scales(queries, rows, layout, scale, zero, group)
            queries.group[0] = group
        span = (int64(start), int64(first), int64(last))
        dot_codes(used, queries.folded, codes, layout.places, layout.masks, vectors, span, queries.base, scores)
        first = last


@njit(**INLINED)
def score_by_token(
    used: Any,
    queries: Queries,
    layout: CodeLayout,
    codes: Any,
    scale: Any,
    zero: Any,
    start: int,
    tokens: int,
    products: Any,
    scores: Any,
) -> None:
    """Scores of a tile of keys whose tokens have scales; `scale`, `zero` `[tokens of the chunk, groups]`."""
    num_groups = scale.shape[1]
    group_size = queries.by_channel.shape[1] // ROWS // num_groups
    span = (int64(start), int64(start), int64(start + tokens))
    scores[:] = 0
    queries.base[:] = 0
    for group in range(num_groups):
        vectors = (layout.group_ends[group], layout.group_ends[group + 1])
        dot_codes(used, queries.by_vector, codes, layout.places, layout.masks, vectors, span, queries.base, products)
        total = broadcast_four(float32(0))
        for d in range(group * group_size, (group + 1) * group_size):
            total = multiply_add(broadcast_four(float32(1)), load_four(queries.by_channel, 0, d * ROWS), total)
        for t in range(tokens):
            step = broadcast_four(float_of_half(scale[start + t, group]))
            base = broadcast_four(float_of_half(zero[start + t, group]))
            score = multiply_add(step, load_four(products, 0, t * ROWS), load_four(scores, 0, t * ROWS))
            store_four(scores, 0, t * ROWS, multiply_add(base, total, score))


@njit(**INLINED)
def score_outliers(outliers: Outliers, slot: int, channel_bits: int, by_channel: Any, scores: Any) -> None:
    """Adds what the outliers of a tile and head add to its scores."""
    ones = (1 << channel_bits) - 1
    if outliers.offsets.shape[0] > 0:
        for entry in range(outliers.offsets[slot], outliers.offsets[slot + 1]):
            index = outliers.indices[entry] if outliers.indices.shape[0] else outliers.wide_indices[entry]
            value = broadcast_four(float_of_half(outliers.values[entry]))
            token, channel = (index >> channel_bits) * ROWS, (index & ones) * ROWS
            score = multiply_add(value, load_four(by_channel, 0, channel), load_four(scores, 0, token))
            store_four(scores, 0, token, score)


@njit(**INLINED)
def accumulate_outliers(outliers: Outliers, slot: int, channel_bits: int, weights: Any, by_channel: Any) -> None:
    """Adds the weighted outliers of a tile and head to their channels."""
    ones = (1 << channel_bits) - 1
    if outliers.offsets.shape[0] > 0:
        for entry in range(outliers.offsets[slot], outliers.offsets[slot + 1]):
            index = outliers.indices[entry] if outliers.indices.shape[0] else outliers.wide_indices[entry]
            value = broadcast_four(float_of_half(outliers.values[entry]))
            token, channel = (index >> channel_bits) * ROWS, (index & ones) * ROWS
            total = multiply_add(value, load_four(weights, 0, token), load_four(by_channel, 0, channel))
            store_four(by_channel, 0, channel, total)


@njit(**INLINED)
def load_factor(factor: Any, first: int, tokens: int, floats: Any) -> None:
    """A tile's rows of A; A `[rows, rank]` begins at token `-first` of the tile if that is negative."""
    rank = factor.shape[1]
    missing = min(max(0, -first), tokens)
    count = (tokens - missing) * rank
    to_floats(factor, 0, (first + missing) * rank, count, floats)
    if missing > 0:
        for i in range(count - 1, -1, -1):
            floats[0, missing * rank + i] = floats[0, i]
        floats[0, : missing * rank] = 0


@njit(**INLINED)
def accumulate_values(
    used: Any,
    layout: CodeLayout,
    codes: Any,
    scale: Any,
    zero: Any,
    start: int,
    tokens: int,
    floats: Any,
    scaled: Any,
    weights: Any,
    sums: Sums,
) -> None:
    """Adds a tile's weighted codes and zeros; `scale`, `zero` `[tokens of the chunk, groups]`."""
    num_groups = scale.shape[1]
    span = (int64(start), int64(start + tokens))
    to_floats(zero, 0, start * num_groups, tokens * num_groups, floats)
    sum_products(floats, weights, tokens, sums.zeros)
    to_floats(scale, 0, start * num_groups, tokens * num_groups, floats)
    for group in range(num_groups):
        for t in range(tokens):
            step = broadcast_four(floats[0, t * num_groups + group])
            store_four(scaled, 0, t * ROWS, multiply(load_four(weights, 0, t * ROWS), step))
        vectors = (layout.group_ends[group], layout.group_ends[group + 1])
        accumulate_codes(used, scaled, codes, layout.places, layout.masks, vectors, span, sums.codes)


@njit(**INLINED)
def outliers_of(side: Side, batch: int, chunk: int) -> Outliers:
    # Where there are none, these are empty too
    indices, wide, values, offsets = side.outlier_indices, side.wide_indices, side.outlier_values, side.outlier_offsets
    return Outliers(indices[batch, 0, chunk], wide[batch, 0, chunk], values[batch, 0, chunk], offsets[batch, 0, chunk])


@njit(**INLINED)
def scale_sums(decay: Any, sums: Sums) -> None:
    scale_rows(decay, sums.codes)
    factor = load_four(decay, 0, 0)
    for place in range(0, sums.by_channel.shape[1], ROWS):
        store_four(sums.by_channel, 0, place, multiply(load_four(sums.by_channel, 0, place), factor))
    scale_columns(decay, sums.zeros)
    scale_columns(decay, sums.weighted_a)


@njit(**BORROWING)
def rotate_row(rows: Any, row: int, first: int, stop: int, size: int) -> None:
    """
    `ops.rotation.rotate` of the columns from `first` to `stop` of a row, in place: a fast Walsh-Hadamard transform of
    every `size` of them.
    """
    half = 1
    if size >= LANES:
        for d in range(first, stop, LANES):
            store_floats(rows, row, d, hadamard_of_eight(load_floats(rows, row, d)))
        half = LANES
    minus = broadcast(float32(-1))
    while half < size:
        for start in range(first, stop, 2 * half):
            if half < LANES:
                for d in range(start, start + half):
                    low, high = rows[row, d], rows[row, d + half]
                    rows[row, d], rows[row, d + half] = low + high, low - high
            else:
                for d in range(start, start + half, LANES):
                    low_eight, high_eight = load_floats(rows, row, d), load_floats(rows, row, d + half)
                    store_floats(rows, row, d, add(low_eight, high_eight))
                    store_floats(rows, row, d + half, multiply_add(high_eight, minus, low_eight))
        half *= 2
    factor = float32(1 / np.sqrt(size))
    for d in range(first, stop):
        rows[row, d] *= factor


@njit(**INLINED)
def write_sums(rotation_size: int, layout: CodeLayout, rows: int, sums: Sums, output: Any) -> None:
    """What was accumulated, in the order of the channels and rotated back: `output` `[R, D]`."""
    num_groups = sums.zeros.shape[0]
    group_size = output.shape[1] // num_groups
    for r in range(rows):
        for group in range(num_groups):
            zero = sums.zeros[group, r]
            for d in range(group * group_size, (group + 1) * group_size):
                output[r, d] = sums.by_channel[0, d * ROWS + r] + zero
        for v in range(layout.places.shape[0]):
            for lane in range(LANES):
                channel = layout.channels[v, lane]
                if channel >= 0:
                    output[r, channel] += sums.codes[r, v * LANES + lane] * layout.weights[v]
        if rotation_size > 1:
            rotate_row(output, r, 0, output.shape[1], rotation_size)


@njit(**INLINED)
def write_result(
    values: Side, layout: CodeLayout, rows: int, sums: Sums, output: Any, total: Any, maximum: Any
) -> None:
    """The result of a task: `output` `[R, D]`, `total` and `maximum` `[R]`."""
    write_sums(values.rotation_size, layout, rows, sums, output)
    for r in range(rows):
        total[r] = sums.total[0, r] + sums.total[0, r + ROWS]
        maximum[r] = sums.maximum[0, r]
