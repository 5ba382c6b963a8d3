"""What coding of tokens has in common whatever their quantizer: channels in the order of a table, and scales.

Legend: D channels, N blocks of eight channels.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, njit

from .arrays import bytes_at, halves_at, longs_at
from .new_arrays import zero_floats, zero_longs
from .primitives import BORROWING, OPTIONS
from .threads import FIRST
from .vectors import LANES, float_of_half


# Below that share of what it would be without error, `z.q` says nothing
_LEAST_GAIN = 0.3
_SCALE_STEPS, _SCALE_OFFSET = 16.0, 128


class Normalization(NamedTuple):
    """
    How a head's states become normal: numbers of the channels in the order of rows, or -1, means, and inverse
    deviations, `[8 N]` each; widths `[N]`.
    """

    own: Any
    means: Any
    inverses: Any
    widths: Any


@njit(**OPTIONS)
def load_normalization(num_matrices: int, head_dim: int, table: Any, matrix: int) -> Normalization:
    """That of one head; `table` is what `transform_coder.encode_rows` made."""
    order, mean_address, deviation_address, num_deviations, width_address = table
    count = -(-head_dim // LANES)
    size = count * LANES
    widths = zero_longs((count,))
    stored = bytes_at(width_address, (num_matrices, count))[matrix]
    for v in range(count):
        widths[v] = stored[v]
    deviations = halves_at(deviation_address, (num_matrices, num_deviations))[matrix]
    own, means, inverses = zero_longs((size,)), zero_floats((size,)), zero_floats((size,))
    own[head_dim:] = -1
    for i in range(head_dim):
        channel = longs_at(order, (num_matrices, head_dim))[matrix, i] if order else i
        own[i] = channel
        if mean_address:
            means[i] = float_of_half(halves_at(mean_address, (num_matrices, head_dim))[matrix, channel])
        deviation = float_of_half(deviations[channel if num_deviations > 1 else 0])
        inverses[i] = float32(1) / deviation if deviation > 0 else float32(0)
    return Normalization(own, means, inverses, widths)


@njit(**BORROWING)
def normalize(state: Any, normalization: Normalization, normal: Any) -> tuple[Any, Any]:
    """Fills `normal` `[8 N]`; returns its energy, and a scale near to that of the numbers that have bits."""
    energy, coded_energy, num_coded = float32(0), float32(0), 0
    own, means, inverses, widths = normalization
    for v in range(widths.shape[0]):
        for i in range(v * LANES, (v + 1) * LANES):
            number = (state[own[i]] - means[i]) * inverses[i] if own[i] >= 0 else float32(0)
            normal[i] = number
            energy += number * number
            if widths[v] > 0:
                coded_energy += number * number
                num_coded += 1
    return energy, scale_of(stored_scale(np.sqrt(coded_energy / max(num_coded, 1))))


@njit(**BORROWING)
def fitting_scale(weighted: bool, energy: Any, over: Any, under: Any, scale: Any) -> Any:
    """
    The scale that suits points found with `scale`, given sums of numbers squared, of numbers times their points and of
    squared points.
    """
    if weighted:
        return over / max(under, float32(1e-9))
    return energy / over if over > float32(_LEAST_GAIN) * energy / scale else scale


@njit(**BORROWING)
def stored_scale(scale: float) -> int:
    """The byte that a scale is stored as."""
    return int(min(max(np.round(np.log2(max(scale, 1e-6)) * _SCALE_STEPS) + _SCALE_OFFSET, 0.0), 255.0))


@njit(**BORROWING)
def scale_of(stored: int) -> Any:
    """The scale that a byte stands for."""
    return float32(np.exp2((stored - _SCALE_OFFSET) / _SCALE_STEPS))


@njit(**BORROWING)
def coding_at(address: int) -> Any:
    """
    What a worker that codes reads of its table, see `threads`.

    Returns:
        B H, T, D and R; address of the states `[B H, T, D]`, float32; addresses of the order, int64, or 0, means or 0,
        deviations, how many a head, and widths; how the scale is found: `is_weighted`, `by_energy` and `num_refits` of
        `RowTable`; four addresses of the codebook; address of the rows `[B H, T, R]`, filled; tokens of a task.
    """
    n = longs_at(address, (FIRST + 19,))[FIRST:]
    shape, table = (n[0], n[1], n[2], n[3]), (n[5], n[6], n[7], n[8], n[9])
    rule, codebook = (n[10] != 0, n[11] != 0, n[12]), (n[13], n[14], n[15], n[16])
    return shape, n[4], table, rule, codebook, n[17], n[18]
