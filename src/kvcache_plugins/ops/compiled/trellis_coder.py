"""Coding of tokens on a CPU with trellis codes: `ops.transform_coding.trellis`, eight tokens of a head at a time.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, S coded numbers, R bytes of a row.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit, uint64

from kvcache_plugins.ops.transform_coding import trellis

from .arrays import bytes_at, floats_at
from .new_arrays import zeros
from .primitives import OPTIONS, WORKER
from .threads import num_tasks, take_task
from .transform_tokens import (
    Normalization,
    coding_at,
    fitting_scale,
    load_normalization,
    normalize,
    scale_of,
    stored_scale,
)
from .trellis_search import NUM_STATES, make_room, search
from .vectors import LANES


_NUM_WIDTHS = trellis.MAX_WIDTH + 1
_SEARCH_STEPS, _SEARCH_END = trellis.SEARCH_STEPS, np.float32(trellis.SEARCH_END)


@cache
def points() -> torch.Tensor:
    """Those of all states at all widths, `[7, 256]`."""
    return trellis.all_points(torch.device("cpu")).contiguous()


@njit(**OPTIONS)
def _search_factors(widths: Any, rule: tuple[bool, bool, int]) -> Any:
    """`trellis.search_factors` of all widths, `[7]`."""
    by_width = rule[0] or rule[1]
    factors, finest = np.zeros(_NUM_WIDTHS, dtype=np.float32), 0
    for v in range(widths.shape[0]):
        finest = max(finest, widths[v])
    for width in range(_NUM_WIDTHS):
        factors[width] = _SEARCH_STEPS << (width if by_width else finest)
    return factors


@njit(**OPTIONS)
def _write_row(
    lane: int,
    rule: tuple[bool, bool, int],
    energy: Any,
    scale: Any,
    widths: Any,
    normal: Any,
    states: Any,
    tables: Any,
    row: Any,
) -> None:
    """One token's row of its states, which begin with the last channel, and of the scale that suits them."""
    all_points, factors = tables
    weighted, by_energy, _ = rule
    energy = float32(0) if by_energy else energy
    over, under, step, place = float32(0), float32(0), states.shape[0], 1
    for v in range(widths.shape[0]):
        width = widths[v]
        if width == 0:
            continue
        weight = float32(1 << (2 * width)) if weighted or by_energy else float32(1)
        bits = uint64(0)
        for i in range(LANES):
            step -= 1
            state = states[step, lane]
            point = all_points[width, state] * factors[width]
            number = normal[v * LANES + i]
            over += weight * number * point
            under += weight * point * point
            if by_energy:
                energy += weight * number * number
            bits |= uint64(state & ((1 << width) - 1)) << uint64(i * width)
        for byte in range(width):
            row[place] = (bits >> uint64(8 * byte)) & uint64(255)
            place += 1
    row[0] = stored_scale(fitting_scale(weighted, energy, over, under, scale))


@njit(**OPTIONS)
def _encode_tokens(
    states: Any,
    first: int,
    last: int,
    rule: tuple[bool, bool, int],
    normalization: Normalization,
    tables: Any,
    rows: Any,
) -> None:
    all_points, factors = tables
    widths = normalization.widths
    search_factors = _search_factors(widths, rule)
    grids = np.round(all_points * search_factors.reshape(-1, 1))
    by_number = np.repeat(widths, LANES)
    # The last channel is the first to be coded
    places = np.nonzero(by_number)[0][::-1].copy()
    by_number = by_number[places]
    minima = make_room(by_number)
    numbers = zeros(places.shape[0], LANES)
    found = np.zeros((places.shape[0], LANES), dtype=np.int64)
    normal = zeros(LANES, widths.shape[0] * LANES)
    energies, scales = np.zeros(LANES, dtype=np.float32), np.zeros(LANES, dtype=np.float32)
    for start in range(first, last, LANES):
        count = min(LANES, last - start)
        for lane in range(count):
            energies[lane], scales[lane] = normalize(states[start + lane], normalization, normal[lane])
        for _ in range(1 + rule[2]):
            for lane in range(count):
                inverse = float32(1) / scales[lane]
                for step in range(places.shape[0]):
                    number = min(max(normal[lane, places[step]] * inverse, -_SEARCH_END), _SEARCH_END)
                    numbers[step, lane] = np.round(number * search_factors[by_number[step]])
            search(numbers, by_number, grids, minima, found)
            is_settled = True
            for lane in range(count):
                row, scale = rows[start + lane], scales[lane]
                _write_row(lane, rule, energies[lane], scale, widths, normal[lane], found, tables, row)
                scales[lane] = scale_of(int64(row[0]))
                # Searched for again with the same scale a token gets the same codes
                is_settled = is_settled and scales[lane] == scale
            if is_settled:
                break


@njit(**OPTIONS)
def _encode_task(
    task: int, shape: Any, states: int, table: Any, rule: tuple[bool, bool, int], codebook: Any, rows: int, span: Any
) -> None:
    num_matrices, length, head_dim, row_size = shape
    matrix, part = task % num_matrices, task // num_matrices
    _encode_tokens(
        floats_at(states, (num_matrices, length, head_dim))[matrix],
        part * span,
        min((part + 1) * span, length),
        rule,
        load_normalization(num_matrices, head_dim, table, matrix),
        (floats_at(codebook[0], (_NUM_WIDTHS, NUM_STATES)), floats_at(codebook[3], (_NUM_WIDTHS,))),
        bytes_at(rows, (num_matrices, length, row_size))[matrix],
    )


@njit(**WORKER)
def encode(address: int) -> None:
    """
    The worker of a table that `coding_at` reads.

    The codebook is points `[7, 256]` and, in the end, what those of every width are multiplied by.
    """
    shape, states, table, rule, codebook, rows, span = coding_at(address)
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _encode_task(task, shape, states, table, rule, codebook, rows, span)
        task = take_task(address)
