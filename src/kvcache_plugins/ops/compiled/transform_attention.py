"""Decode attention over transform-coded rows on a CPU: bytes go in, and nothing dense is ever in memory.

One task is a run of tiles of one key/value head and up to four of its queries. It ends in a partial result of an
online softmax, which `exact.merge` puts together with those of other tasks and of exact tokens. The queries are turned
back from tile to tile by the angles of a tile's length, and computed anew every so often, before roundings add up.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim, N blocks of eight
channels, T tokens of a tile, R bytes of a row.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, njit

from .arrays import bytes_at, doubles_at, floats_at, halves_at, longs_at
from .calls import Call, Part, call_at, part_of
from .exact import attend_exact, end_task, partial_results
from .new_arrays import MINUS_INFINITY, filled, zero_floats, zero_longs, zeros
from .primitives import BORROWING, INLINED, OPTIONS, WORKER, add_bias, scale_rows, softmax_tile
from .row_vectors import ROWS
from .tasks import Task, queries_of, task_of
from .threads import num_tasks, take_task
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
# Offsets in a tile whose angles are read: all below it, and its multiples
_STEP = 8
# Of a key, so that a channel that does not vary has a deviation to be divided by
_LEAST_DEVIATION = np.float32(1e-6)
_MINUS = np.float32(-1)


class Channels(NamedTuple):
    """
    The channels of a head's keys in the order of the rows, 8 N of them: their numbers, or -1, and the places of their
    partners `[8 N]`; deviations and means over deviations `[1, 8 N]`; cosines and negative sines of the offsets in a
    tile `[T, 8 N]`, and in the last row of the tile's length.
    """

    own: Any
    partners: Any
    deviations: Any
    means: Any
    cosines: Any
    sines: Any


@njit(**INLINED)
def _load_channels(table: Any, rotary: Any, matrix: int, head_dim: int, num_blocks: int) -> Channels:
    order_address, is_wide, mean_address, deviation_address = table
    partner_address, cosine_address, sine_address = rotary[:3]
    size = num_blocks * LANES
    own, partners = zero_longs((size,)), zero_longs((size,))
    deviations, means = zeros(1, size), zeros(1, size)
    cosines, sines = zeros(TILE + 1, size), zeros(TILE + 1, size)
    narrow = bytes_at(order_address + matrix * head_dim, (head_dim,))
    wide = halves_at(order_address + 2 * matrix * head_dim, (head_dim,))
    mean = halves_at(mean_address + 2 * matrix * head_dim, (head_dim,))
    deviation = halves_at(deviation_address + 2 * matrix * head_dim, (head_dim,))
    partner = longs_at(partner_address, (head_dim,))
    all_cosines = floats_at(cosine_address, (TILE + 1, head_dim))
    all_sines = floats_at(sine_address, (TILE + 1, head_dim))
    places = zero_longs((head_dim,))
    for i in range(head_dim):
        channel = int(wide[i]) if is_wide else int(narrow[i])
        own[i], places[channel] = channel, i
        partners[i] = partner[channel]
        average = float_of_half(mean[channel])
        deviations[0, i] = max(float_of_half(deviation[channel]), _LEAST_DEVIATION * abs(average), float32(1e-9))
        means[0, i] = average / deviations[0, i]
    own[head_dim:], partners[head_dim:] = -1, -1
    for i in range(head_dim):
        partners[i] = places[partners[i]]
    # Of every offset is made what a few of them add up to: in another order, channel by channel, they are dear to read
    for number in range(_STEP + TILE // _STEP):
        t = number if number < _STEP else (number - _STEP + 1) * _STEP
        for i in range(head_dim):
            cosines[t, i], sines[t, i] = all_cosines[t, own[i]], -all_sines[t, own[i]]
    for t in range(_STEP + 1, TILE):
        if t % _STEP > 0:
            _add_angles(cosines, sines, t - t % _STEP, t % _STEP)
    return Channels(own, partners, deviations, means, cosines, sines)


@njit(**BORROWING)
def _add_angles(cosines: Any, sines: Any, first: int, second: int) -> None:
    """Fills the row of an offset that is the sum of two; sines are negative."""
    minus = broadcast(_MINUS)
    for i in range(0, cosines.shape[1], LANES):
        cosine, minus_sine = load_floats(cosines, first, i), load_floats(sines, first, i)
        other_cosine, other_sine = load_floats(cosines, second, i), load_floats(sines, second, i)
        both = multiply(multiply(minus_sine, other_sine), minus)
        store_floats(cosines, first + second, i, multiply_add(cosine, other_cosine, both))
        product = multiply(cosine, other_sine)
        store_floats(sines, first + second, i, multiply_add(minus_sine, other_cosine, product))


@njit(**INLINED)
def _turn_back(
    query: Any, rows: int, scale: Any, channels: Channels, frequencies: Any, position: int, own: Any, partners: Any
) -> None:
    """Queries `[rows, D]` turned back by the angles of a position: own channels and partners', times deviations."""
    for i in range(channels.own.shape[0]):
        channel, j = channels.own[i], channels.partners[i]
        # Both channels of a pair at once: they turn as fast, the other way around
        if channel >= 0 and i <= j:
            angle, other = position * frequencies[channel], channels.own[j]
            cosine, sine = float32(np.cos(angle)), float32(np.sin(angle))
            for r in range(rows):
                q, p = query[r, channel] * scale, query[r, other] * scale
                turned, turned_partner = q * cosine - p * sine, p * cosine + q * sine
                own[r, i], partners[r, i] = (
                    turned * channels.deviations[0, i],
                    turned_partner * channels.deviations[0, i],
                )
                if j > i:
                    own[r, j], partners[r, j] = (
                        turned_partner * channels.deviations[0, j],
                        turned * channels.deviations[0, j],
                    )


@njit(**INLINED)
def _turn_on(rows: int, channels: Channels, own: Any, partners: Any) -> None:
    """The same from one tile to the next."""
    for i in range(0, own.shape[1], LANES):
        cosine, minus_sine = load_floats(channels.cosines, TILE, i), load_floats(channels.sines, TILE, i)
        sine = multiply(minus_sine, broadcast(_MINUS))
        for r in range(rows):
            a, b = load_floats(own, r, i), load_floats(partners, r, i)
            store_floats(own, r, i, multiply_add(b, minus_sine, multiply(a, cosine)))
            store_floats(partners, r, i, multiply_add(a, sine, multiply(b, cosine)))


class Rows(NamedTuple):
    """Rows of a head `[capacity, R]`, and where what is in them."""

    rows: Any
    blocks: Blocks


class Work(NamedTuple):
    """
    What a task does, but for the keys: its queries `[rows, D]` and the factor of their scores, the channels of keys,
    the frequencies of their embedding and the position of the first token; values, and the scales of all bytes; what
    is added to scores `[.., .., .., T]`; from which tile up to which; and tokens in use.
    """

    task: Task
    num_queries: int
    groups: int
    query: Any
    scale: Any
    channels: Channels
    frequencies: Any
    position: int
    values: Rows
    scales: Any
    bias: Any
    tiles: tuple[int, int]
    length: int


class RowSums(NamedTuple):
    """The online softmax of a task: values `[4, 8 N]`, and twice every row's sum of weights and maximum `[1, 8]`."""

    sums: Any
    total: Any
    maximum: Any


@njit(**OPTIONS)
def rows_at(side: Any, task: Task, shape: Any) -> Any:
    """Rows of a task's head, of a side that begins with address, capacity and R."""
    return bytes_at(side[0], (shape[0] * shape[1], side[1], side[2]))[task.matrix]


@njit(**INLINED)
def load_work(
    task: Task, call: Call, part: Part, channels: Channels, values: Rows, codebook: Any, rotary: Any
) -> Work:
    """`codebook`, `rotary`: what `shared_numbers` returned."""
    shape, span, mask = call.shape, part.span, part.mask
    tiles = (task.part * span[1], (task.part + 1) * span[1])
    position = rotary[5] - longs_at(rotary[4], (shape[0],))[task.batch]
    return Work(
        task,
        shape[3],
        shape[2],
        queries_of(task, shape, call.query),
        float32(call.scale),
        channels,
        doubles_at(rotary[3], (shape[4],)),
        position,
        values,
        floats_at(codebook[2], (256,)),
        floats_at(mask[0], mask[1:]),
        tiles,
        span[0],
    )


@njit(**INLINED)
def make_sums(size: int) -> RowSums:
    """Of nothing so far."""
    return RowSums(
        zeros(ROWS, size),
        zeros(1, 2 * ROWS),
        filled(1, 2 * ROWS, MINUS_INFINITY),
    )


@njit(**OPTIONS)
def ends_of(work: Work) -> tuple[int, int]:
    """A task's first token, and the one behind its last."""
    return work.tiles[0] * TILE, min(work.tiles[1] * TILE, work.length)


@njit(**INLINED)
def load_scales(work: Work, rows: Any) -> Any:
    """The scales of a task's tokens, `[T]`, of all that are in use."""
    scales = zero_floats((work.length,))
    first, last = ends_of(work)
    for t in range(first, last):
        scales[t] = work.scales[rows[t, 0]]
    return scales


@njit(**INLINED)
def turn_to(work: Work, start: int, own: Any, partners: Any) -> None:
    """Turns the queries to the tile that begins at a token, in turn."""
    if (start // TILE - work.tiles[0]) % ANCHOR_TILES == 0:
        _turn_back(
            work.query,
            work.task.rows,
            work.scale,
            work.channels,
            work.frequencies,
            work.position + start,
            own,
            partners,
        )
    else:
        _turn_on(work.task.rows, work.channels, own, partners)


@njit(**INLINED)
def add_tile(used: Any, work: Work, span: tuple[int, int], scores: Any, decay: Any, sums: RowSums) -> None:
    """Adds a tile, whose keys have made its scores `[1, 4 T + 4]`; `decay` `[1, 8]` has room for what it needs."""
    start, tokens = span
    if work.bias.shape[3] > 0:
        add_bias(
            work.bias,
            work.task.batch,
            work.task.head,
            work.groups,
            work.num_queries,
            work.task.row,
            start,
            tokens,
            scores,
        )
    if softmax_tile(tokens, scores, sums.maximum, sums.total, decay):
        scale_rows(decay, sums.sums)
    for t in range(tokens):
        factor = broadcast_four(work.scales[work.values.rows[start + t, 0]])
        store_four(scores, 0, t * ROWS, multiply(load_four(scores, 0, t * ROWS), factor))
    accumulate_rows(used, scores, work.values.rows, work.values.blocks, span, sums.sums)


@njit(**INLINED)
def _run_tiles(used: Any, work: Work, keys: Rows, sums: RowSums) -> None:
    channels, size = work.channels, work.channels.own.shape[0]
    own, partners = zeros(ROWS, size), zeros(ROWS, size)
    scores = zeros(1, (TILE + 2) * ROWS)
    decay = zeros(1, 2 * ROWS)
    key_scales = load_scales(work, keys.rows)
    first, last = ends_of(work)
    for start in range(first, last, TILE):
        span = (start, min(TILE, last - start))
        turn_to(work, start, own, partners)
        dot_rows(
            used, own, partners, keys.rows, keys.blocks, channels.means, key_scales, channels.cosines,
            channels.sines, span, scores,
        )  # fmt: skip
        add_tile(used, work, span, scores, decay, sums)


@njit(**BORROWING)
def shared_numbers(own: Any, first: int) -> tuple[Any, Any]:
    """
    What rows of both kinds have of a part's numbers, from one of them on.

    Returns:
        The codebook: coefficients of the points of keys and of values `[9, 3]`; scales of all bytes `[256]`;
        multipliers of states `[9]`. And the embedding: partners `[D]`; cosines and signed sines of offsets
        `[T + 1, D]`; frequencies `[D]`, float64; padding `[B]`; index of the first token.
    """
    angles = (own[first + 4], own[first + 5], own[first + 6], own[first + 7], own[first + 8], own[first + 9])
    return (own[first], own[first + 1], own[first + 2], own[first + 3]), angles


@njit(**INLINED)
def _run(used: Any, number: int, call: Call, part: Part) -> None:
    """
    One task of attention over a block of rows, as a partial result of an online softmax.

    `part.own` has of keys: rows, their capacity and R; widths; order, whether it is of 16 bits, means and deviations.
    Of values: rows, their capacity and R; widths; deviations; channels that are rotated together; means `[D]` that
    were taken off before that, or 0. Then what `shared_numbers` returns.
    """
    shape, own = call.shape, part.own
    task, key_dim, value_dim = task_of(number, shape, part.span), shape[4], shape[5]
    output, total, maximum = partial_results(call.scratch, shape, part.first, part.span[2])
    codebook, rotary = shared_numbers(own, 15)
    key_rows, value_rows = (own[0], own[1], own[2]), (own[8], own[9], own[10])
    sides, multipliers = shape[0] * shape[1], longs_at(codebook[3], (9,))
    key_count, value_count = -(-key_dim // LANES), -(-value_dim // LANES)
    key_widths = bytes_at(own[3], (sides, key_count))[task.matrix]
    value_widths = bytes_at(own[11], (sides, value_count))[task.matrix]
    key_blocks = make_blocks(key_widths, own[2], floats_at(codebook[0], (9, 3)), multipliers)
    value_blocks = make_blocks(value_widths, own[10], floats_at(codebook[1], (9, 3)), multipliers)
    channels = _load_channels((own[4], own[5], own[6], own[7]), rotary, task.matrix, key_dim, key_count)
    values = Rows(rows_at(value_rows, task, shape), value_blocks)
    sums = make_sums(value_count * LANES)
    work = load_work(task, call, part, channels, values, codebook, rotary)
    _run_tiles(used, work, Rows(rows_at(key_rows, task, shape), key_blocks), sums)
    deviation = float_of_half(halves_at(own[12], (sides,))[task.matrix])
    run, b, h, row = task.part, task.batch, task.head, task.row
    for r in range(task.rows):
        for d in range(value_dim):
            output[run, b, h, row + r, d] = sums.sums[r, d] * deviation
        if own[13] > 1:
            rotate_row(output[run, b, h, row : row + task.rows], r, 0, value_dim, own[13])
        weight = sums.total[0, r] + sums.total[0, r + ROWS]
        total[run, b, h, row + r] = weight
        if own[14]:
            mean = halves_at(own[14], (sides, value_dim))[task.matrix]
            for d in range(value_dim):
                output[run, b, h, row + r, d] += weight * float_of_half(mean[d])
        maximum[run, b, h, row + r] = sums.maximum[0, r]


def _make_worker(used: tuple[int, ...]) -> Any:
    """Attention over exact parts and blocks of rows: the worker of a table, see `calls` and `threads`."""

    @njit(**WORKER)
    def attend_row_parts(address: int) -> None:
        call, count = call_at(address), num_tasks(address)
        task = take_task(address)
        while task < count:
            number, part = part_of(task, call)
            if part.exact > 0:
                attend_exact(number, call, part)
            else:
                _run(used, number, call, part)
            end_task(address, call)
            task = take_task(address)

    return attend_row_parts


# By the queries that a task has at most
attend_row_parts = {rows: _make_worker((0,) * rows) for rows in range(1, ROWS + 1)}
