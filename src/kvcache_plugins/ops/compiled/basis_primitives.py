"""Building blocks of attention over rows in calibrated bases: a tile of keys is brought back from its components.

Components that have bits meet the basis in registers, four tokens and two vectors of channels at a time: that is the
price of the transform, and half of it is saved where half of the components have no bits.

Legend: T tokens of a tile, K components, S channels, rounded up to two vectors.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .primitives import OPTIONS, ROWS
from .transform_primitives import Blocks, add_turned, points_of
from .vectors import LANES, broadcast, load_floats, multiply, multiply_add, store_floats, sums_of_eight


# Channels that are summed up at a time
STRIDE = 2 * LANES
# Tokens of which channels are
TOKENS = 4
_ZERO = np.float32(0)


@njit(**OPTIONS)
def widen_rows(rows: Any, blocks: Blocks, scales: Any, span: tuple[int, int], components: Any) -> None:
    """Components `[T, K]` of a tile; those without bits are left as they are."""
    first, count = span
    for t in range(count):
        scale = broadcast(scales[first + t])
        for v in range(blocks.low.shape[0]):
            if blocks.widths[v] > 0:
                store_floats(components, t, v * LANES, multiply(points_of(rows, first + t, blocks, v), scale))


@njit(**OPTIONS)
def combine_rows(components: Any, num_components: int, count: int, basis: Any, mean: Any, states: Any) -> None:
    """States `[T, S]` of `count` tokens: a mean `[1, S]`, and components `[T, K]` times the basis `[K, S]`."""
    for t in range(0, count, TOKENS):
        for d in range(0, basis.shape[1], STRIDE):
            e = d + LANES
            a0 = a1 = a2 = a3 = load_floats(mean, 0, d)
            b0 = b1 = b2 = b3 = load_floats(mean, 0, e)
            for i in range(num_components):
                a, b = load_floats(basis, i, d), load_floats(basis, i, e)
                z = broadcast(components[t, i])
                a0, b0 = multiply_add(z, a, a0), multiply_add(z, b, b0)
                z = broadcast(components[t + 1, i])
                a1, b1 = multiply_add(z, a, a1), multiply_add(z, b, b1)
                z = broadcast(components[t + 2, i])
                a2, b2 = multiply_add(z, a, a2), multiply_add(z, b, b2)
                z = broadcast(components[t + 3, i])
                a3, b3 = multiply_add(z, a, a3), multiply_add(z, b, b3)
            store_floats(states, t, d, a0)
            store_floats(states, t, e, b0)
            store_floats(states, t + 1, d, a1)
            store_floats(states, t + 1, e, b1)
            store_floats(states, t + 2, d, a2)
            store_floats(states, t + 2, e, b2)
            store_floats(states, t + 3, d, a3)
            store_floats(states, t + 3, e, b3)


def _make_dot_states(num_rows: int) -> Callable[..., None]:
    @njit(**OPTIONS)
    def dot_states(own: Any, partners: Any, states: Any, cosines: Any, sines: Any, count: Any, scores: Any) -> None:
        for t in range(0, count, 2):
            u = min(t + 1, count - 1)
            zero = broadcast(_ZERO)
            sums = (zero, zero, zero, zero, zero, zero, zero, zero)
            for d in range(0, states.shape[1], LANES):
                pair = load_floats(states, t, d), load_floats(states, u, d)
                sums = add_turned(num_rows, own, partners, d, pair, (t, u), cosines, sines, sums)
            store_floats(scores, 0, t * ROWS, sums_of_eight(*sums))

    return dot_states  # type: ignore[no-any-return]


_dot_1, _dot_2, _dot_3, _dot_4 = (_make_dot_states(rows) for rows in range(1, ROWS + 1))


@njit(**OPTIONS)
def dot_states(
    num_rows: int, own: Any, partners: Any, states: Any, cosines: Any, sines: Any, count: int, scores: Any
) -> None:
    """Scores of a tile of keys `[T, S]`, before the rotary embedding; the arguments are those of `dot_rows`."""
    if num_rows == 1:
        _dot_1(own, partners, states, cosines, sines, count, scores)
    elif num_rows == 2:
        _dot_2(own, partners, states, cosines, sines, count, scores)
    elif num_rows == 3:
        _dot_3(own, partners, states, cosines, sines, count, scores)
    else:
        _dot_4(own, partners, states, cosines, sines, count, scores)
