"""Decode attention over rows in calibrated bases on a CPU: see `transform_attention`, which codes channels themselves.

Keys are coded before the rotary embedding in a basis that mixes channels of different frequencies. So they are brought
back tile by tile, and meet the queries as these are turned back to the tile's start. Values stay as components, of
which sums are brought back once.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim, K components, N blocks
of eight of them, T tokens of a tile, R bytes of a row, S channels, rounded up to two vectors.
"""

from typing import Any

import numpy as np
from numba import float32, njit

from .arrays import bytes_at, floats_at, halves_at, longs_at, signed_bytes_at
from .basis_primitives import STRIDE, combine_rows, dot_states, widen_rows
from .calls import Call, Part, call_at, part_of
from .exact import attend_exact, end_task, partial_results
from .new_arrays import filled, zero_floats, zero_longs, zeros
from .primitives import INLINED, OPTIONS, WORKER
from .row_vectors import ROWS
from .tasks import task_of
from .threads import num_tasks, take_task
from .transform_attention import (
    TILE,
    Channels,
    Rows,
    RowSums,
    Work,
    add_tile,
    ends_of,
    load_scales,
    load_work,
    make_sums,
    rows_at,
    shared_numbers,
    turn_to,
)
from .transform_primitives import Blocks, make_blocks
from .vectors import LANES, float_of_half


@njit(**OPTIONS)
def _load_channels(rotary: Any, head_dim: int) -> Channels:
    """All channels in their own order, of deviation 1."""
    partner_address, cosine_address, sine_address = rotary[:3]
    size = -(-head_dim // STRIDE) * STRIDE
    own, partners = zero_longs((size,)), zero_longs((size,))
    own[head_dim:], partners[head_dim:] = -1, -1
    deviations, means = filled(1, size, np.float32(1)), zeros(1, size)
    cosines, sines = zeros(TILE + 1, size), zeros(TILE + 1, size)
    partner = longs_at(partner_address, (head_dim,))
    all_cosines = floats_at(cosine_address, (TILE + 1, head_dim))
    all_sines = floats_at(sine_address, (TILE + 1, head_dim))
    for i in range(head_dim):
        own[i], partners[i] = i, partner[i]
        for t in range(TILE + 1):
            cosines[t, i], sines[t, i] = all_cosines[t, i], -all_sines[t, i]
    return Channels(own, partners, deviations, means, cosines, sines)


@njit(**OPTIONS)
def _load_basis(side: Any, head: int, num_heads: int, head_dim: int, size: int) -> tuple[Any, Any, Any]:
    """Widths `[N]`, basis `[K, S]` with rows as long as deviations of components, and mean `[1, S]` of a head."""
    width_address, mean_address, factor_address, basis_address, step_address = (
        side[0],
        side[1],
        side[2],
        side[3],
        side[4],
    )
    count = side[5]
    widths = bytes_at(width_address, (num_heads, count))[head]
    basis, mean = zeros(count * LANES, size), zeros(1, size)
    codes = signed_bytes_at(basis_address, (num_heads, head_dim, head_dim))[head]
    steps = floats_at(step_address, (num_heads, head_dim))[head]
    factors = floats_at(factor_address, (num_heads, head_dim))[head]
    means = halves_at(mean_address, (num_heads, head_dim))[head]
    inverses = zero_floats((head_dim,))
    for d in range(head_dim):
        mean[0, d], inverses[d] = float_of_half(means[d]), float32(1) / factors[d]
    for i in range(min(count * LANES, head_dim)):
        if widths[i // LANES] > 0:
            for d in range(head_dim):
                basis[i, d] = steps[i] * float32(codes[i, d]) * inverses[d]
    return widths, basis, mean


@njit(**OPTIONS)
def _num_components(blocks: Blocks) -> int:
    """Components before the first one behind which none has bits."""
    count = 0
    for v in range(blocks.widths.shape[0]):
        if blocks.widths[v] > 0:
            count = (v + 1) * LANES
    return count


@njit(**INLINED)
def _run_tiles(used: Any, work: Work, keys: Rows, basis: Any, mean: Any, sums: RowSums) -> None:
    channels, size = work.channels, work.channels.own.shape[0]
    own, partners = zeros(ROWS, size), zeros(ROWS, size)
    components = zeros(TILE, basis.shape[0])
    states = zeros(TILE, size)
    num_components = _num_components(keys.blocks)
    scores = zeros(1, (TILE + 2) * ROWS)
    decay = zeros(1, 2 * ROWS)
    key_scales = load_scales(work, keys.rows)
    first, last = ends_of(work)
    for start in range(first, last, TILE):
        span = (start, min(TILE, last - start))
        turn_to(work, start, own, partners)
        widen_rows(keys.rows, keys.blocks, key_scales, span, components)
        combine_rows(components, num_components, span[1], basis, mean, states)
        dot_states(used, own, partners, states, channels.cosines, channels.sines, span[1], scores)
        add_tile(used, work, span, scores, decay, sums)


@njit(**INLINED)
def _run(used: Any, number: int, call: Call, part: Part) -> None:
    """
    One task of attention over a block of rows in calibrated bases, as a partial result of an online softmax.

    `part.own` has of keys and then of values: rows, their capacity and R; widths `[H, N]`, means and factors
    `[H, D]`, basis `[H, D, D]` and its steps `[H, D]`; and N. Then what `shared_numbers` returns.
    """
    shape, own = call.shape, part.own
    task, num_heads, key_dim, value_dim = task_of(number, shape, part.span), shape[1], shape[4], shape[5]
    output, total, maximum = partial_results(call.scratch, shape, part.first, part.span[2])
    codebook, rotary = shared_numbers(own, 18)
    key_rows, value_rows = (own[0], own[1], own[2]), (own[9], own[10], own[11])
    channels, multipliers = _load_channels(rotary, key_dim), longs_at(codebook[3], (9,))
    key_widths, basis, mean = _load_basis(own[3:9], task.head, num_heads, key_dim, channels.own.shape[0])
    value_widths, value_basis, value_mean = _load_basis(own[12:18], task.head, num_heads, value_dim, value_dim)
    key_blocks = make_blocks(key_widths, own[2], floats_at(codebook[0], (9, 3)), multipliers)
    value_blocks = make_blocks(value_widths, own[11], floats_at(codebook[1], (9, 3)), multipliers)
    values = Rows(rows_at(value_rows, task, shape), value_blocks)
    sums = make_sums(value_basis.shape[0])
    work = load_work(task, call, part, channels, values, codebook, rotary)
    _run_tiles(used, work, Rows(rows_at(key_rows, task, shape), key_blocks), basis, mean, sums)
    run, b, h = task.part, task.batch, task.head
    for r in range(task.rows):
        weight, row = sums.total[0, r] + sums.total[0, r + ROWS], task.row + r
        for d in range(value_dim):
            output[run, b, h, row, d] = weight * value_mean[0, d]
        for i in range(value_basis.shape[0]):
            for d in range(value_dim):
                output[run, b, h, row, d] += sums.sums[r, i] * value_basis[i, d]
        total[run, b, h, row] = weight
        maximum[run, b, h, row] = sums.maximum[0, r]


def _make_worker(used: tuple[int, ...]) -> Any:
    """Attention over exact parts and such blocks: the worker of a table, see `calls` and `threads`."""

    @njit(**WORKER)
    def attend_basis_parts(address: int) -> None:
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

    return attend_basis_parts


# By the queries that a task has at most
attend_basis_parts = {rows: _make_worker((0,) * rows) for rows in range(1, ROWS + 1)}
