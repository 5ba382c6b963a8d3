"""The largest numbers of rows, in order: `ops.gather.largest` on a CPU.

Of a row only the numbers that may count are sorted, by their bits, eleven at a time from the lowest on. It takes time
in proportion to how many there are, and equal numbers keep their order.

Legend: R rows, N numbers of a row, K that are asked for.
"""

from typing import Any

import numpy as np
import torch
from numba import int64, njit, uint32

from .arrays import floats_at, longs_at
from .primitives import OPTIONS, WORKER
from .threads import FIRST, num_tasks, run, take_task


DIGIT_BITS = 11
NUM_DIGITS = 3
_NUM_BINS = 2**DIGIT_BITS


@njit(**OPTIONS)
def find_numbers(numbers: Any, least: Any, keys: Any, places: Any, ends: Any) -> int:
    """
    Notes the numbers that are not below `least`: as integers in the opposite order, and where they stand.

    Args:
        numbers: `[N]`.
        keys, places: `[N]`, filled as far as the result says.
        ends: `[3, bins]`, filled with how many keys have each digit.
    """
    bits = numbers.view(np.uint32)
    ends[:] = 0
    count = 0
    for i in range(numbers.shape[0]):
        if not numbers[i] >= least:
            continue
        # Integers are ordered as floats are once the bits of negative ones are turned over
        key = bits[i] if bits[i] >> uint32(31) else uint32(0x7FFFFFFF) - bits[i]
        keys[count], places[count] = key, i
        count += 1
        for digit in range(NUM_DIGITS):
            ends[digit, key >> uint32(digit * DIGIT_BITS) & uint32(_NUM_BINS - 1)] += 1
    return count


@njit(**OPTIONS)
def sort_keys(keys: Any, places: Any, spare_keys: Any, spare_places: Any, ends: Any, count: int) -> None:
    """Sorts the first `count` keys with their places, into the spare arrays: the number of digits is odd."""
    for digit in range(NUM_DIGITS):
        starts, total = ends[digit], int64(0)
        for b in range(_NUM_BINS):
            size = starts[b]
            starts[b] = total
            total += size
        for i in range(count):
            b = keys[i] >> uint32(digit * DIGIT_BITS) & uint32(_NUM_BINS - 1)
            place = starts[b]
            starts[b] = place + 1
            spare_keys[place], spare_places[place] = keys[i], places[i]
        keys, spare_keys = spare_keys, keys
        places, spare_places = spare_places, places


@njit(**OPTIONS)
def _select_task(row: int, shape: Any, addresses: Any) -> None:
    """One row."""
    num_rows, length, limit = shape
    numbers = floats_at(addresses[0], (num_rows, length))[row]
    least = floats_at(addresses[1], (num_rows,))[row]
    values = floats_at(addresses[2], (num_rows, limit))[row]
    indices = longs_at(addresses[3], (num_rows, limit))[row]
    keys, places = np.empty((2, length), dtype=np.uint32), np.empty((2, length), dtype=np.int64)
    ends = np.empty((NUM_DIGITS, _NUM_BINS), dtype=np.int64)
    count = find_numbers(numbers, least, keys[0], places[0], ends)
    sort_keys(keys[0], places[0], keys[1], places[1], ends, count)
    count = min(count, limit)
    for i in range(count):
        indices[i] = places[1, i]
        values[i] = numbers[places[1, i]]
    values[count:] = -np.inf
    indices[count:] = 0


@njit(**WORKER)
def _select(address: int) -> None:
    """
    The worker of a table, see `threads`: rows, numbers of each and how many are wanted; addresses of the numbers, of
    the least that count, and of what is found: values and indices.
    """
    n = longs_at(address, (FIRST + 7,))[FIRST:]
    shape, addresses = (n[0], n[1], n[2]), (n[3], n[4], n[5], n[6])
    row, count = take_task(address), num_tasks(address)
    while row < count:
        _select_task(row, shape, addresses)
        row = take_task(address)


@torch.compiler.disable
def largest(numbers: torch.Tensor, limit: int, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.gather.largest`; `least` has as many numbers as there are rows."""
    shape = (*numbers.shape[:-1], limit)
    numbers, least = numbers.contiguous(), least.contiguous()
    values, indices = torch.empty(shape, dtype=torch.float32), torch.empty(shape, dtype=torch.int64)
    num_rows = least.numel()
    addresses = (numbers.data_ptr(), least.data_ptr(), values.data_ptr(), indices.data_ptr())
    run(_select, num_rows, (num_rows, numbers.shape[-1], limit, *addresses))
    return values, indices
