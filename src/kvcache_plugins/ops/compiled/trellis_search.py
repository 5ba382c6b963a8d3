"""Viterbi's search of a trellis of 256 states, for eight tokens of a head at a time, one in each lane of a vector.

All tokens of a head have the same widths at the same places, so no step needs a branch. What a path into a state has
cost depends on the number there and on the least cost of the paths that can go there, which is one number for all
states with the same old bits: these minima are kept of every step, and nothing else. On the way back the choices are
found again, only those along the path.

All numbers are integers below 2^24 in float32, so sums and squares are exact, and paths those of
`ops.transform_coding.trellis` but for numbers so far out that no path near them can win.

Legend: S coded numbers of a token.
"""

from typing import Any

import numpy as np
from numba import float32, njit

from .primitives import OPTIONS
from .vectors import LANES, add, broadcast, load_floats, multiply, multiply_add, smaller, store_floats


STATE_BITS = 8
NUM_STATES = 1 << STATE_BITS
_NO_PATH = np.float32(1e30)
_MINUS = np.float32(-1)


@njit(**OPTIONS)
def make_room(widths: Any) -> Any:
    """Room for the minima of all steps, for the widths `[S]` of a head."""
    rows = 1
    for step in range(widths.shape[0]):
        rows += NUM_STATES >> widths[step]
    return np.empty((rows, LANES), dtype=np.float32)


@njit(**OPTIONS)
def _go_forward(numbers: Any, widths: Any, grids: Any, minima: Any) -> None:
    """Fills `minima`: those into step 0, 1, ... one after another, and at last the cost of the best path."""
    num_steps, first = widths.shape[0], 0
    for group in range(NUM_STATES >> widths[0]):
        store_floats(minima, group, 0, broadcast(float32(0) if group == 0 else _NO_PATH))
    for step in range(num_steps):
        width = widths[step]
        # Behind the last number all paths go on as one
        leaving = widths[step + 1] if step + 1 < num_steps else STATE_BITS
        num_groups = NUM_STATES >> leaving
        following = first + (NUM_STATES >> width)
        number = multiply(load_floats(numbers, step, 0), broadcast(_MINUS))
        for group in range(num_groups):
            least = broadcast(_NO_PATH)
            # A range with steps would divide
            for old in range(1 << leaving):
                state = group + old * num_groups
                error = add(number, broadcast(grids[width, state]))
                cost = multiply_add(error, error, load_floats(minima, first + (state >> width), 0))
                least = smaller(cost, least)
            store_floats(minima, following + group, 0, least)
        first = following


@njit(**OPTIONS)
def _go_back(lane: int, numbers: Any, widths: Any, grids: Any, minima: Any, states: Any) -> None:
    """Fills a lane of `states` from the last number to the first."""
    first = minima.shape[0] - 1
    group, leaving = 0, STATE_BITS
    for step in range(widths.shape[0] - 1, -1, -1):
        width = widths[step]
        num_groups = NUM_STATES >> leaving
        least, target = _NO_PATH, minima[first + group, lane]
        first -= NUM_STATES >> width
        number, best = numbers[step, lane], group
        for old in range(1 << leaving):
            state = group + old * num_groups
            error = grids[width, state] - number
            cost = error * error + minima[first + (state >> width), lane]
            if cost < least:
                least, best = cost, state
                if cost <= target:
                    break
        states[step, lane] = best
        group, leaving = best >> width, width


@njit(**OPTIONS)
def search(numbers: Any, widths: Any, grids: Any, minima: Any, states: Any) -> None:
    """
    The states of the paths whose points are nearest.

    Args:
        numbers: `[S, 8]`, float32, integers: a number of eight tokens in each row.
        widths: `[S]`, int64.
        grids: `[7, 256]`, float32, integers: the points of all widths.
        minima: what `make_room` returned.
        states: `[S, 8]`, int64, filled; of equal paths the one of lower states.
    """
    _go_forward(numbers, widths, grids, minima)
    for lane in range(LANES):
        _go_back(lane, numbers, widths, grids, minima, states)
