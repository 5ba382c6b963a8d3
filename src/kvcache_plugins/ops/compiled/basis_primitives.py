"""Building blocks of attention over rows in calibrated bases: a tile of keys is brought back from its components.

Components that have bits meet the basis in registers, four tokens and two vectors of channels at a time: that is the
price of the transform, and half of it is saved where half of the components have no bits.

Legend: T tokens of a tile, K components, S channels, rounded up to two vectors.
"""

from typing import Any

import numpy as np
from numba import njit

from .primitives import BORROWING
from .row_vectors import ROWS, add_turned, no_sums, sums_of_two
from .transform_primitives import Blocks, points_of
from .vectors import LANES, broadcast, load_floats, multiply, multiply_add, store_floats


# Channels that are summed up at a time
STRIDE = 2 * LANES
# Tokens of which channels are
TOKENS = 4
_ZERO = np.float32(0)


@njit(**BORROWING)
def widen_rows(rows: Any, blocks: Blocks, scales: Any, span: tuple[int, int], components: Any) -> None:
    """Components `[T, K]` of a tile; those without bits are left as they are."""
    first, count = span
    for t in range(count):
        scale = broadcast(scales[first + t])
        for v in range(blocks.low.shape[0]):
            if blocks.widths[v] > 0:
                store_floats(components, t, v * LANES, multiply(points_of(rows, first + t, blocks, v), scale))


@njit(**BORROWING)
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


@njit(**BORROWING)
def dot_states(
    used: Any, own: Any, partners: Any, states: Any, cosines: Any, sines: Any, count: int, scores: Any
) -> None:
    """Scores of a tile of keys `[T, S]`, before the rotary embedding; the arguments are those of `dot_rows`."""
    for t in range(0, count, 2):
        u = min(t + 1, count - 1)
        sums_a = sums_b = no_sums(used)
        for d in range(0, states.shape[1], LANES):
            sums_a = add_turned(sums_a, load_floats(states, t, d), own, partners, cosines, sines, t, d)
            sums_b = add_turned(sums_b, load_floats(states, u, d), own, partners, cosines, sines, u, d)
        store_floats(scores, 0, t * ROWS, sums_of_two(sums_a, sums_b))
