"""The tokens that matter to the query heads of a key/value head, chosen by their weight, on a CPU.

A softmax over each query head's scores, their mean, and the best of it in order, in one go: in plain PyTorch that is
some forty operations, half of which write arrays as large as the scores, and a decode step spends more time with them
than with attention.

Legend: M key/value heads of all items, G query heads a key/value head, N tokens, R tokens that are attended to anyway.
"""

from typing import Any

import numpy as np
import torch
from numba import float32, njit

from .arrays import doubles_at, floats_at, longs_at
from .largest import DIGIT_BITS, NUM_DIGITS, find_numbers, sort_keys
from .new_arrays import zeros
from .primitives import OPTIONS, WORKER
from .threads import FIRST, bits_of, num_tasks, run, take_task
from .vectors import (
    LANES,
    add,
    broadcast,
    exp_of_difference,
    larger,
    load_floats,
    multiply,
    multiply_add,
    store_floats,
)


_LOWEST = np.float32(-3e38)
_ZERO = np.float32(0)
# Above all probabilities
_FORCED = np.float32(2)


@njit(**OPTIONS)
def _fill(scores: Any, resident: Any, row: int, states: Any) -> None:
    """The scores of a query head side by side, -inf up to whole vectors."""
    length = scores.shape[0]
    for n in range(length):
        states[row, n] = scores[n]
    for n in range(resident.shape[0]):
        states[row, length + n] = resident[n]
    for n in range(length + resident.shape[0], states.shape[1]):
        states[row, n] = float32(-np.inf)


@njit(**OPTIONS)
def _exponentials(row: int, states: Any, lanes: Any) -> float:
    """Turns scores into weights up to a factor, and returns their sum; `lanes` `[1, 8]` is room to work in."""
    highest = broadcast(_LOWEST)
    for n in range(0, states.shape[1], LANES):
        highest = larger(load_floats(states, row, n), highest)
    store_floats(lanes, 0, 0, highest)
    highest = broadcast(lanes[0].max())
    sums = broadcast(_ZERO)
    for n in range(0, states.shape[1], LANES):
        weights = exp_of_difference(load_floats(states, row, n), highest)
        sums = add(sums, weights)
        store_floats(states, row, n, weights)
    store_floats(lanes, 0, 0, sums)
    return lanes[0].sum()  # type: ignore[no-any-return]


@njit(**OPTIONS)
def _weights(scores: Any, resident: Any) -> Any:
    """Probabilities of tokens by scores `[G, N]` and `[G, R]`, averaged over query heads, `[1, whole vectors]`."""
    groups = scores.shape[0]
    padded = -(-(scores.shape[1] + resident.shape[1]) // LANES) * LANES
    states, mean, lanes = np.empty((groups, padded), np.float32), zeros(1, padded), zeros(1, LANES)
    for g in range(groups):
        _fill(scores[g], resident[g], g, states)
        total = _exponentials(g, states, lanes)
        factor = broadcast(float32(1) / (float32(groups) * float32(total)) if total > 0 else _ZERO)
        for n in range(0, padded, LANES):
            if g == 0:
                store_floats(mean, 0, n, multiply(load_floats(states, g, n), factor))
            else:
                store_floats(mean, 0, n, multiply_add(load_floats(states, g, n), factor, load_floats(mean, 0, n)))
    return mean


@njit(**OPTIONS)
def _choose_task(matrix: int, shape: Any, bounds: Any, least: float, addresses: Any) -> None:
    """For one key/value head."""
    num_matrices, groups, length, num_resident = shape
    first, newest, cap, limit = bounds
    scores = floats_at(addresses[0], (num_matrices, groups, length))[matrix]
    resident = floats_at(addresses[1], (num_matrices, groups, num_resident))[matrix]
    slots = longs_at(addresses[2], (num_matrices, limit))[matrix]
    weights = _weights(scores, resident)[0, :length]
    num_forced = 0
    for n in range(length):
        if n < first or n >= newest:
            weights[n] += _FORCED
            num_forced += 1
    keys, places = np.empty((2, length), dtype=np.uint32), np.empty((2, length), dtype=np.int64)
    ends = np.empty((NUM_DIGITS, 2**DIGIT_BITS), dtype=np.int64)
    count = find_numbers(weights, float32(least), keys[0], places[0], ends)
    sort_keys(keys[0], places[0], keys[1], places[1], ends, count)
    count = min(count, max(cap, num_forced), limit)
    for i in range(limit):
        slots[i] = places[1, i] if i < count else 0
    longs_at(addresses[3], (num_matrices,))[matrix] = count


@njit(**WORKER)
def _choose(address: int) -> None:
    """
    The worker of a table, see `threads`: M, G, N and R; the bounds of what is forced, the cap and the limit; the least
    weight, as float64; addresses of the scores and the resident ones, and of what is filled: slots and counts.
    """
    n = longs_at(address, (FIRST + 13,))[FIRST:]
    least = doubles_at(address, (FIRST + 13,))[FIRST + 8]
    shape, bounds, addresses = (n[0], n[1], n[2], n[3]), (n[4], n[5], n[6], n[7]), (n[9], n[10], n[11], n[12])
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _choose_task(task, shape, bounds, least, addresses)
        task = take_task(address)


@torch.compiler.disable
def choose_heaviest(
    scores: torch.Tensor,
    resident_scores: torch.Tensor,
    forced: tuple[int, int],
    least: float,
    cap: int,
    limit: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tokens whose weight, their probability averaged over the query heads of a key/value head, is large enough.

    Args:
        scores (`torch.Tensor` of shape `[B, H, G, N]`):
            Scores of the tokens, float32.
        resident_scores (`torch.Tensor` of shape `[B, H, G, R]`):
            The same of the tokens that are attended to anyway; R may be 0.
        forced (`tuple[int, int]`):
            The tokens before the first number, and from the second on, are chosen whatever they weigh.
        least (`float`):
            The least weight of others.
        cap (`int`):
            The most that are chosen, unless more are forced.
        limit (`int`):
            The most that there is room for.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: tokens `[B, H, limit]`, int64, forced ones first and then those that weigh
        most, with zeros behind them; and how many they are, `[B, H]`, int64.
    """
    batch_size, num_heads, groups, length = scores.shape
    # Names keep alive what is handed over by address
    scores, resident_scores = scores.contiguous(), resident_scores.contiguous()
    slots = torch.empty(batch_size, num_heads, limit, dtype=torch.int64)
    count = torch.empty(batch_size, num_heads, dtype=torch.int64)
    shape = batch_size * num_heads, groups, length, resident_scores.shape[3]
    addresses = (tensor.data_ptr() for tensor in (scores, resident_scores, slots, count))
    run(_choose, shape[0], (*shape, *forced, cap, limit, bits_of(least), *addresses))
    return slots, count
