"""Codes of single tokens as floats: what attention over chosen tokens is computed from, a tile at a time.

What codes lie in is told by numbers, so there is one compiled function for all of them.

Legend: D head dim, T tokens of a tile.
"""

from typing import Any

from numba import float32, int32, njit, uint16

from .primitives import OPTIONS
from .vectors import (
    LANES,
    add,
    broadcast,
    float_of_half,
    load_bytes,
    load_floats,
    masked_to_floats,
    multiply,
    multiply_add,
    store_floats,
)


@njit(**OPTIONS)
def padded_columns(dim: int) -> int:
    """Columns that a token needs: vectors are written whole, and bytes may stand for more channels than there are."""
    return -(-dim // LANES) * LANES + LANES  # type: ignore[no-any-return]


@njit(**OPTIONS)
def _widen_plane(rows: Any, row: int, start: int, plane: Any, floats: Any, number: int) -> None:
    """One plane of a token's codes, whose bytes begin at `start`, as floats in row `number` of `floats`."""
    bits, shift, size = plane
    mask = (1 << bits) - 1
    if size < LANES:
        for field in range(8 // bits):
            for j in range(size):
                code = (rows[row, start + j] >> (bits * field)) & mask
                floats[number, field * size + j] = float32(code << shift)
        return
    for field in range(8 // bits):
        weight, own = broadcast(float32(1 << shift) / float32(1 << (bits * field))), int32(mask << (bits * field))
        for offset in range(0, size, LANES):
            # The last vector may not reach beyond the row: it repeats some of the one before
            place = min(offset, size - LANES)
            part = masked_to_floats(load_bytes(rows, row, start + place), own)
            store_floats(floats, number, field * size + place, multiply(part, weight))


@njit(**OPTIONS)
def widen_codes(rows: Any, row: int, planes: Any, floats: Any, number: int, scratch: Any) -> None:
    """
    The codes of a token as floats.

    Args:
        rows: `[any, bytes]`, and `row` the token's.
        planes: `[planes, 3]`, as of `ops.quantization.packed_planes`.
        floats: `[T, padded_columns]`, and `number` the token's.
        scratch: `[1, padded_columns]`, where a second plane waits to be added.
    """
    _widen_plane(rows, row, 0, (planes[0, 0], planes[0, 1], planes[0, 2]), floats, number)
    start = planes[0, 2]
    for plane in range(1, planes.shape[0]):
        _widen_plane(rows, row, start, (planes[plane, 0], planes[plane, 1], planes[plane, 2]), scratch, 0)
        for d in range(0, scratch.shape[1], LANES):
            store_floats(floats, number, d, add(load_floats(floats, number, d), load_floats(scratch, 0, d)))
        start += planes[plane, 2]


@njit(**OPTIONS)
def apply_steps(steps: Any, minima: Any, floats: Any, number: int) -> None:
    """Codes to numbers, where channels have steps and minima of their own, `[1, whole vectors]`."""
    for d in range(0, steps.shape[1], LANES):
        codes = load_floats(floats, number, d)
        store_floats(floats, number, d, multiply_add(codes, load_floats(steps, 0, d), load_floats(minima, 0, d)))


@njit(**OPTIONS)
def half_at(rows: Any, row: int, place: int) -> Any:
    """The float16 whose two bytes begin at a place of a row."""
    return float_of_half(uint16(uint16(rows[row, place]) | uint16(rows[row, place + 1]) << uint16(8)))


@njit(**OPTIONS)
def apply_step(step: Any, minimum: Any, first: int, stop: int, floats: Any, number: int) -> None:
    """Codes to numbers, where the channels from `first` to `stop` share a step and a minimum."""
    whole = stop - (stop - first) % LANES
    steps, minima = broadcast(step), broadcast(minimum)
    for d in range(first, whole, LANES):
        store_floats(floats, number, d, multiply_add(load_floats(floats, number, d), steps, minima))
    for d in range(whole, stop):
        floats[number, d] = minimum + step * floats[number, d]
