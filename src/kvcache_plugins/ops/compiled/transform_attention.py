"""Decode attention over transform-coded rows on a CPU: bytes go in, and nothing dense is ever in memory.

One task is a run of tiles of one key/value head and up to four of its queries. It ends in a partial result of an
online softmax, which `exact.merge` puts together with those of other tasks and of exact tokens. The queries are turned
back from tile to tile by the angles of a tile's length, and computed anew every so often, before roundings add up.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim, N blocks of eight
channels, T tokens of a tile, R bytes of a row.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, njit, prange

from .arrays import bytes_at, doubles_at, floats_at, halves_at, longs_at
from .exact import partial_results
from .primitives import OPTIONS, ROWS, add_bias, scale_rows, softmax_tile
from .tile import rotate_row
from .transform_primitives import Blocks, accumulate_rows, dot_rows, make_blocks
from .vectors import (
    LANES,
    broadcast,
    broadcast_four,
    float_of_half,
    load_floats,
    load_four,
    multiply,
    multiply_add,
    store_floats,
    store_four,
)


TILE = 32
# Tiles after which the queries are turned back from where they were, and not from the last tile
ANCHOR_TILES = 64
# Of a key, so that a channel that does not vary has a deviation to be divided by
_LEAST_DEVIATION = np.float32(1e-6)
_MINUS = np.float32(-1)


class Channels(NamedTuple):
    """
    The channels of a head's keys in the order of the rows, 8 N of them: their numbers, or -1, and those of their
    partners `[8 N]`; deviations and means over deviations `[1, 8 N]`; cosines and negative sines of the offsets in a
    tile `[T, 8 N]`, and in the last row of the tile's length.
    """

    own: Any
    partners: Any
    deviations: Any
    means: Any
    cosines: Any
    sines: Any


@njit(**OPTIONS)
def _load_channels(table: Any, rotary: Any, matrix: int, head_dim: int, num_blocks: int) -> Channels:
    order_address, is_wide, mean_address, deviation_address = table
    partner_address, cosine_address, sine_address = rotary[:3]
    size = num_blocks * LANES
    own, partners = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    deviations, means = np.zeros((1, size), dtype=np.float32), np.zeros((1, size), dtype=np.float32)
    cosines, sines = np.zeros((TILE + 1, size), dtype=np.float32), np.zeros((TILE + 1, size), dtype=np.float32)
    narrow = bytes_at(order_address + matrix * head_dim, (head_dim,))
    wide = halves_at(order_address + 2 * matrix * head_dim, (head_dim,))
    mean = halves_at(mean_address + 2 * matrix * head_dim, (head_dim,))
    deviation = halves_at(deviation_address + 2 * matrix * head_dim, (head_dim,))
    partner = longs_at(partner_address, (head_dim,))
    all_cosines = floats_at(cosine_address, (TILE + 1, head_dim))
    all_sines = floats_at(sine_address, (TILE + 1, head_dim))
    for i in range(head_dim):
        channel = int(wide[i]) if is_wide else int(narrow[i])
        own[i], partners[i] = channel, partner[channel]
        average = float_of_half(mean[channel])
        deviations[0, i] = max(float_of_half(deviation[channel]), _LEAST_DEVIATION * abs(average), float32(1e-9))
        means[0, i] = average / deviations[0, i]
    for t in range(TILE + 1):
        for i in range(head_dim):
            cosines[t, i], sines[t, i] = all_cosines[t, own[i]], -all_sines[t, own[i]]
    return Channels(own, partners, deviations, means, cosines, sines)


@njit(**OPTIONS)
def turn_back(
    query: Any, rows: int, scale: Any, channels: Channels, frequencies: Any, position: int, own: Any, partners: Any
) -> None:
    """Queries `[rows, D]` turned back by the angles of a position: own channels and partners', times deviations."""
    for i in range(channels.own.shape[0]):
        channel = channels.own[i]
        if channel >= 0:
            angle = position * frequencies[channel]
            cosine, sine = float32(np.cos(angle)), float32(np.sin(angle))
            factor = channels.deviations[0, i] * scale
            for r in range(rows):
                a, b = query[r, channel] * factor, query[r, channels.partners[i]] * factor
                own[r, i], partners[r, i] = a * cosine - b * sine, b * cosine + a * sine


@njit(**OPTIONS)
def turn_on(rows: int, channels: Channels, own: Any, partners: Any) -> None:
    """The same from one tile to the next."""
    for i in range(0, own.shape[1], LANES):
        cosine, minus_sine = load_floats(channels.cosines, TILE, i), load_floats(channels.sines, TILE, i)
        sine = multiply(minus_sine, broadcast(_MINUS))
        for r in range(rows):
            a, b = load_floats(own, r, i), load_floats(partners, r, i)
            store_floats(own, r, i, multiply_add(b, minus_sine, multiply(a, cosine)))
            store_floats(partners, r, i, multiply_add(a, sine, multiply(b, cosine)))


@njit(**OPTIONS)
def _run_tiles(
    query: Any,
    rows: int,
    first_row: int,
    scale: Any,
    channels: Channels,
    frequencies: Any,
    position: int,
    keys: tuple[Any, Blocks],
    values: tuple[Any, Blocks],
    scales: Any,
    bias: tuple[Any, int, int, int, int],
    tiles: tuple[int, int],
    length: int,
    sums: Any,
    total: Any,
    maximum: Any,
) -> None:
    """Attention of `rows` queries over tiles from `tiles[0]` to `tiles[1]`; `position` is that of the first token."""
    key_rows, key_blocks = keys
    value_rows, value_blocks = values
    mask, batch, head, groups, num_queries = bias
    size = channels.own.shape[0]
    own, partners = np.zeros((ROWS, size), dtype=np.float32), np.zeros((ROWS, size), dtype=np.float32)
    scores = np.zeros((1, (TILE + 2) * ROWS), dtype=np.float32)
    decay = np.zeros((1, 2 * ROWS), dtype=np.float32)
    key_scales = np.zeros(length, dtype=np.float32)
    first, last = tiles[0] * TILE, min(tiles[1] * TILE, length)
    for t in range(first, last):
        key_scales[t] = scales[key_rows[t, 0]]
    for start in range(first, last, TILE):
        tokens, tile = min(TILE, last - start), start // TILE
        if (tile - tiles[0]) % ANCHOR_TILES == 0:
            turn_back(query, rows, scale, channels, frequencies, position + start, own, partners)
        else:
            turn_on(rows, channels, own, partners)
        span = (start, tokens)
        dot_rows(
            rows, own, partners, key_rows, key_blocks, channels.means, key_scales, channels.cosines, channels.sines,
            span, scores,
        )  # fmt: skip
        if mask.shape[3] > 0:
            add_bias(mask, batch, head, groups, num_queries, first_row, start, tokens, scores)
        if softmax_tile(tokens, scores, maximum, total, decay):
            scale_rows(decay, sums)
        for t in range(tokens):
            factor = broadcast_four(scales[value_rows[start + t, 0]])
            store_four(scores, 0, t * ROWS, multiply(load_four(scores, 0, t * ROWS), factor))
        accumulate_rows(rows, scores, value_rows, value_blocks, span, sums)


@njit(**OPTIONS)
def _run(
    task: int, shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any,
    mask: Any, span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """One task of `attend_rows_block`."""
    batch_size, num_heads, groups, num_queries, key_dim, value_dim, _ = shape
    length, tiles_per_task, num_tasks = span
    num_rows = groups * num_queries
    queries = floats_at(query, (batch_size * num_heads, num_rows, key_dim))
    output, total, maximum = partial_results(scratch, shape, first, num_tasks)
    row_blocks = -(-num_rows // ROWS)
    item, part = task // num_tasks, task % num_tasks
    matrix, row = item // row_blocks, item % row_blocks * ROWS
    b, h = matrix // num_heads, matrix % num_heads
    rows = min(ROWS, num_rows - row)
    coefficients = floats_at(codebook[0], (9, 3))
    unshrunk = floats_at(codebook[1], (9, 3))
    scales = floats_at(codebook[2], (256,))
    multipliers = longs_at(codebook[3], (9,))
    sides = batch_size * num_heads
    key_rows = bytes_at(key_side[0], (sides, key_side[1], key_side[2]))[matrix]
    value_rows = bytes_at(value_side[0], (sides, value_side[1], value_side[2]))[matrix]
    key_count, value_count = -(-key_dim // LANES), -(-value_dim // LANES)
    key_widths = bytes_at(key_side[3], (sides, key_count))[matrix]
    value_widths = bytes_at(value_side[3], (sides, value_count))[matrix]
    key_blocks = make_blocks(key_widths, key_side[2], coefficients, multipliers)
    value_blocks = make_blocks(value_widths, value_side[2], unshrunk, multipliers)
    channels = _load_channels(key_side[4:], rotary, matrix, key_dim, key_count)
    frequencies = doubles_at(rotary[3], (key_dim,))
    position = rotary[5] - longs_at(rotary[4], (batch_size,))[b]
    sums = np.zeros((ROWS, value_count * LANES), dtype=np.float32)
    own_total = np.zeros((1, 2 * ROWS), dtype=np.float32)
    own_maximum = np.full((1, 2 * ROWS), -np.inf, dtype=np.float32)
    _run_tiles(
        queries[matrix, row : row + rows],
        rows,
        row,
        float32(scale),
        channels,
        frequencies,
        position,
        (key_rows, key_blocks),
        (value_rows, value_blocks),
        scales,
        (floats_at(mask[0], mask[1:]), b, h, groups, num_queries),
        (part * tiles_per_task, (part + 1) * tiles_per_task),
        length,
        sums,
        own_total,
        own_maximum,
    )
    deviation = float_of_half(halves_at(value_side[4], (sides,))[matrix])
    for r in range(rows):
        for d in range(value_dim):
            output[part, b, h, row + r, d] = sums[r, d] * deviation
        if value_side[5] > 1:
            rotate_row(output[part, b, h, row : row + rows], r, 0, value_dim, value_side[5])
        total[part, b, h, row + r] = own_total[0, r] + own_total[0, r + ROWS]
        maximum[part, b, h, row + r] = own_maximum[0, r]


@njit(**OPTIONS)
def _num_tasks(shape: Any, span: Any) -> int:
    return shape[0] * shape[1] * -(-shape[2] * shape[3] // ROWS) * span[2]


@njit(**OPTIONS)
def attend_rows_block(
    shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any, mask: Any,
    span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """
    Attention over one block of rows, as partial results of an online softmax.

    Everything comes by address, see `arrays`.

    Args:
        shape: B, H, G, Q, D, head dim of values, and partial results in all.
        scale: factor of the scores.
        query: `[B, H * G, Q, D]`, float32.
        key_side: rows, their capacity and R; widths; order, whether it is of 16 bits, means and deviations.
        value_side: rows, their capacity and R; widths; deviations; channels that are rotated together.
        codebook: coefficients of the points of keys and of values `[9, 3]`; scales of all bytes `[256]`; multipliers
            of states `[9]`.
        rotary: partners `[D]`; cosines and signed sines of offsets `[T + 1, D]`; frequencies `[D]`, float64; padding
            `[B]`; index of the first token.
        mask: address of what is added to the scores, and its four dimensions; no columns mean no mask.
        span: tokens in use, tiles of a task, and tasks, which is how many partial results are written.
        first: the first of them.
        scratch: what `exact.partial_results` makes arrays of.
    """
    for task in range(_num_tasks(shape, span)):
        _run(task, shape, scale, query, key_side, value_side, codebook, rotary, mask, span, first, scratch)


@njit(parallel=True, **OPTIONS)
def attend_rows_block_in_parallel(
    shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any, mask: Any,
    span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """The same by as many threads as Numba is set to."""
    for task in prange(_num_tasks(shape, span)):
        _run(task, shape, scale, query, key_side, value_side, codebook, rotary, mask, span, first, scratch)
