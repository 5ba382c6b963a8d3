"""The compiled attention over exact tokens, and the merging of partial results: what is left once the compressed parts
are attended to, without the cost of a dozen small operations of PyTorch a layer.

Legend: S partial results, B batch, H key/value heads, R rows (queries of a group times new tokens), D head dim, T
tokens.
"""

from typing import Any

import numpy as np
import torch
from numba import njit

from kvcache_plugins.ops.outliers import OUTLIER_TILE

from .arrays import floats_at, halves_at
from .calls import DONE, Call, Part
from .new_arrays import MINUS_INFINITY, filled, zeros
from .primitives import BORROWING, OPTIONS, accumulate_states, add_bias, dot_states, scale_rows, softmax_tile
from .row_vectors import ROWS
from .tasks import queries_of, task_of
from .threads import num_tasks, take_task
from .vectors import LANES, load_bfloats, store_floats


# What exact tokens can be stored as, and its number in a table; 0 is what is not exact
FLOATS, _BFLOATS = 1, 2


def storage_of(dtype: torch.dtype, head_dim: int) -> int:
    """The number of what tokens are stored as; 0 if they have to be made float32 first."""
    if dtype == torch.bfloat16 and head_dim >= LANES:
        return _BFLOATS
    return FLOATS if dtype == torch.float32 else 0


@njit(**BORROWING)
def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


@njit(**OPTIONS)
def partial_results(scratch: int, shape: Any, first: int, count: int) -> Any:
    """
    Some of the partial results that are kept at an address.

    Args:
        scratch: address of `B H G Q (head dim of values + 2)` float32 for every partial result.
        shape: B, H, G, Q, D, head dim of values, and partial results in all.
        first, count: which ones.

    Returns:
        The weighted sum of the values `[count, B, H, R, head dim of values]`, the sum of the weights and the maximum
        score `[count, B, H, R]`.
    """
    batch_size, num_heads, groups, num_queries, _, value_dim, num_results = shape
    dims = (count, batch_size, num_heads, groups * num_queries)
    size = 4 * batch_size * num_heads * groups * num_queries
    total = floats_at(scratch + first * size, dims)
    maximum = floats_at(scratch + (num_results + first) * size, dims)
    output = floats_at(scratch + (2 * num_results + first * value_dim) * size, (*dims, value_dim))
    return output, total, maximum


@njit(**BORROWING)
def _is_read_in_place(storage: int, dim: int) -> bool:
    return storage == FLOATS and dim % LANES == 0


@njit(**OPTIONS)
def _room(storage: int, tokens: int, dim: int) -> Any:
    """What `_states` needs for so many tokens: `[tokens, whole vectors]`, without tokens where it needs none."""
    return zeros(0 if _is_read_in_place(storage, dim) else tokens, _padded(dim))


@njit(**OPTIONS)
def _states(address: int, storage: int, first: int, tokens: int, dim: int, room: Any) -> Any:
    """Rows of `[any, dim]` at an address, from one of them on, as float32 `[at least tokens, whole vectors]`."""
    if _is_read_in_place(storage, dim):
        return floats_at(address + 4 * first * dim, (tokens, dim))
    if storage == _BFLOATS:
        halves = halves_at(address + 2 * first * dim, (tokens, dim))
        for t in range(tokens):
            for d in range(0, dim, LANES):
                # The last vector lies at the end of a row
                column = min(d, dim - LANES)
                store_floats(room, t, column, load_bfloats(halves, t, column))
    else:
        floats = floats_at(address + 4 * first * dim, (tokens, dim))
        # Not by slices, for whose errors Numba compiles a dozen functions
        for t in range(tokens):
            for d in range(dim):
                room[t, d] = floats[t, d]
    return room


@njit(**BORROWING)
def _write_row(source: int, target: int, row: int, size: int, storage: int, dim: int) -> None:
    """A row of `[any, dim]` at an address, to the last row of `[size, dim]` at another."""
    if storage == _BFLOATS:
        halves, kept_halves = halves_at(source, (row + 1, dim)), halves_at(target, (size, dim))
        for d in range(dim):
            kept_halves[size - 1, d] = halves[row, d]
    else:
        floats, kept = floats_at(source, (row + 1, dim)), floats_at(target, (size, dim))
        for d in range(dim):
            kept[size - 1, d] = floats[row, d]


@njit(**OPTIONS)
def attend_exact(number: int, call: Call, part: Part) -> None:
    """
    One task of attention over exact tokens, few of them, as a partial result of an online softmax.

    `part.own` has the addresses of keys and values `[B, H, capacity, D]`, and their capacity; and those of the last
    token's `[B, H, 1, D]`, if it is to be written there.
    """
    shape, length = call.shape, part.span[0]
    key_dim, value_dim = shape[4], shape[5]
    task = task_of(number, shape, part.span)
    query = queries_of(task, shape, call.query)
    origin = task.matrix * part.own[2]
    if part.own[3] != 0:
        # By every task of the head, which all write the same
        _write_row(part.own[3], part.own[0], task.matrix, origin + length, part.exact, key_dim)
        _write_row(part.own[4], part.own[1], task.matrix, origin + length, part.exact, value_dim)
    bias = floats_at(part.mask[0], part.mask[1:])
    most = min(length, OUTLIER_TILE)
    key_room, value_room = _room(part.exact, most, key_dim), _room(part.exact, most, value_dim)
    rows = zeros(ROWS, _padded(key_dim))
    sums = zeros(ROWS, _padded(value_dim))
    scores = zeros(1, (OUTLIER_TILE + 2) * ROWS)
    own_total, decay = zeros(1, 2 * ROWS), zeros(1, 2 * ROWS)
    own_maximum = filled(1, 2 * ROWS, MINUS_INFINITY)
    for r in range(task.rows):
        for d in range(key_dim):
            rows[r, d] = query[r, d] * np.float32(call.scale)
    for start in range(0, length, OUTLIER_TILE):
        tokens = min(OUTLIER_TILE, length - start)
        key_states = _states(part.own[0], part.exact, origin + start, tokens, key_dim, key_room)
        value_states = _states(part.own[1], part.exact, origin + start, tokens, value_dim, value_room)
        dot_states(rows, key_states, tokens, scores)
        if bias.shape[3] > 0:
            add_bias(bias, task.batch, task.head, shape[2], shape[3], task.row, start, tokens, scores)
        if softmax_tile(tokens, scores, own_maximum, own_total, decay):
            scale_rows(decay, sums)
        accumulate_states(scores, value_states, tokens, sums)
    outputs, totals, maxima = partial_results(call.scratch, shape, part.first, 1)
    for r in range(task.rows):
        row = task.row + r
        for d in range(value_dim):
            outputs[0, task.batch, task.head, row, d] = sums[r, d]
        totals[0, task.batch, task.head, row] = own_total[0, r] + own_total[0, r + ROWS]
        maxima[0, task.batch, task.head, row] = own_maximum[0, r]


@njit(**BORROWING)
def end_task(address: int, call: Call) -> None:
    """Takes down that a task of a table is done, and merges all results if it was the last."""
    if take_task(address + 8 * DONE) + 1 == num_tasks(address):
        merge(call.shape, call.scratch, call.result)


@njit(**BORROWING)
def merge(shape: Any, scratch: int, result_address: int) -> None:
    """
    The attention output of partial results; zero where a query may attend to nothing.

    Args:
        shape, scratch: as in `partial_results`.
        result_address: `[B, H * G, Q, head dim of values]`, float32, to be filled.
    """
    batch_size, num_heads, groups, num_queries, _, value_dim, num_results = shape
    output, total, maximum = partial_results(scratch, shape, 0, num_results)
    result = floats_at(result_address, (batch_size, num_heads, groups * num_queries, value_dim))
    for b in range(result.shape[0]):
        for h in range(result.shape[1]):
            for r in range(result.shape[2]):
                highest = maximum[0, b, h, r]
                for s in range(1, output.shape[0]):
                    highest = max(highest, maximum[s, b, h, r])
                for d in range(result.shape[3]):
                    result[b, h, r, d] = 0
                if highest == -np.inf:
                    continue
                weights = np.float32(0)
                for s in range(output.shape[0]):
                    decay = np.float32(np.exp(maximum[s, b, h, r] - highest))
                    weights += decay * total[s, b, h, r]
                    for d in range(result.shape[3]):
                        result[b, h, r, d] += decay * output[s, b, h, r, d]
                for d in range(result.shape[3]):
                    result[b, h, r, d] /= weights
