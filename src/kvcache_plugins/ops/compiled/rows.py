"""Attention over rows that are read where they stand: `ops.gather.attend_rows` on a CPU.

A task is one head and up to four of its queries. The addresses of all its tokens are made first, those chosen and the
window alike, so that rows to come can be called into the machine's caches while others are computed: chosen rows lie
scattered, and no machine foresees them. Then tiles of 64 tokens are gone through twice, for the scores and for the
weighted sum of the values.

What numbers are stored as, and how many rows share what is read, is told by the lengths of two tuples, which Numba
knows when it compiles: only what is used is compiled. Tasks share nothing, so a result depends on its own tokens only.

Legend: B batch, H key/value heads, G queries a head, R of them that share what is read, D and E head dims of keys and
values, K slots, T tokens of a task.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import float32, int64, njit

from .arrays import bytes_at, doubles_at, floats_at, longs_at
from .new_arrays import MINUS_INFINITY, filled, zeros
from .primitives import OPTIONS, WORKER, scale_rows, softmax_tile
from .row_vectors import ROWS
from .threads import FIRST, bits_of, num_tasks, run, take_task
from .vectors import (
    LANES,
    add,
    broadcast,
    broadcast_four,
    load_bfloats,
    load_floats,
    load_four,
    load_halves,
    multiply_add,
    prefetch,
    store_floats,
    store_four,
    sums_of_eight,
)


_TILE = 64
# Rows that are called for before they are needed, and bytes that come at once
_AHEAD = 8
_LINE = 64
# What is stored, as the length of a tuple
DTYPES = {torch.float32: (0,), torch.float16: (0, 0), torch.bfloat16: (0, 0, 0)}
_ZERO = np.float32(0)


@njit(**OPTIONS)
def load_numbers(address: int, column: int, dtype: Any) -> Any:
    """Eight numbers of the row at an address, as float32."""
    row = bytes_at(address, (1, 1))
    if len(dtype) == 1:
        return load_floats(row, 0, column)
    if len(dtype) == 2:
        return load_halves(row, 0, column)
    return load_bfloats(row, 0, column)


@njit(**OPTIONS)
def prefetch_row(address: int, size: int) -> None:
    for offset in range(0, size, _LINE):
        prefetch(int64(address + offset))


@njit(**OPTIONS)
def _load_queries(query: Any, scale: Any, padded: int) -> Any:
    """Queries `[R, D]`, scaled, in vectors of which the last one lies at the end: what it repeats of others is 0."""
    head_dim = query.shape[1]
    queries = zeros(ROWS, padded)
    for r in range(query.shape[0]):
        for d in range(head_dim):
            place = d if d < padded - LANES else d - head_dim + padded
            queries[r, place] = query[r, d] * scale
    return queries


@njit(**OPTIONS)
def _dot_rows(
    query: Any, addresses: Any, rows: Any, dtype: Any, span: Any, sizes: Any, head_dim: int, scores: Any
) -> None:
    """Products of queries with the keys of tokens from `span[0]` up to `span[1]`, four numbers a token."""
    start, stop = span
    for t in range(start, stop, 2):
        first, second = t, min(t + 1, stop - 1)
        for ahead in range(t + _AHEAD, min(t + _AHEAD + 2, addresses.shape[1])):
            prefetch_row(addresses[0, ahead], sizes[0])
        # Values are needed when all scores of the tile are there
        prefetch_row(addresses[1, first], sizes[1])
        prefetch_row(addresses[1, second], sizes[1])
        key_a, key_b = addresses[0, first], addresses[0, second]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
        for d in range(0, head_dim, LANES):
            column = min(d, head_dim - LANES)
            a, b = load_numbers(key_a, column, dtype), load_numbers(key_b, column, dtype)
            q = load_floats(query, 0, d)
            a0, b0 = multiply_add(a, q, a0), multiply_add(b, q, b0)
            if len(rows) > 1:
                q = load_floats(query, 1, d)
                a1, b1 = multiply_add(a, q, a1), multiply_add(b, q, b1)
            if len(rows) > 2:
                q = load_floats(query, 2, d)
                a2, b2 = multiply_add(a, q, a2), multiply_add(b, q, b2)
            if len(rows) > 3:
                q = load_floats(query, 3, d)
                a3, b3 = multiply_add(a, q, a3), multiply_add(b, q, b3)
        store_floats(scores, 0, (t - start) * ROWS, sums_of_eight(a0, a1, a2, a3, b0, b1, b2, b3))


@njit(**OPTIONS)
def add_biases(bias: Any, start: int, tokens: int, scores: Any) -> None:
    """Adds to the scores of a tile what the mask adds to its tokens."""
    for t in range(tokens):
        place = t * ROWS
        store_four(scores, 0, place, add(load_four(scores, 0, place), broadcast_four(bias[start + t])))


@njit(**OPTIONS)
def _accumulate_rows(weights: Any, addresses: Any, rows: Any, dtype: Any, span: Any, head_dim: int, sums: Any) -> None:
    """Adds values, times weights, to `sums` `[4, whole vectors]`; the last vector lies at the end of a value."""
    start, stop = span
    for d in range(0, head_dim, LANES):
        column = min(d, head_dim - LANES)
        a0 = a1 = a2 = a3 = broadcast(_ZERO)
        for t in range(start, stop):
            a, place = load_numbers(addresses[1, t], column, dtype), (t - start) * ROWS
            a0 = multiply_add(a, broadcast(weights[0, place]), a0)
            if len(rows) > 1:
                a1 = multiply_add(a, broadcast(weights[0, place + 1]), a1)
            if len(rows) > 2:
                a2 = multiply_add(a, broadcast(weights[0, place + 2]), a2)
            if len(rows) > 3:
                a3 = multiply_add(a, broadcast(weights[0, place + 3]), a3)
        store_floats(sums, 0, d, add(load_floats(sums, 0, d), a0))
        if len(rows) > 1:
            store_floats(sums, 1, d, add(load_floats(sums, 1, d), a1))
        if len(rows) > 2:
            store_floats(sums, 2, d, add(load_floats(sums, 2, d), a2))
        if len(rows) > 3:
            store_floats(sums, 3, d, add(load_floats(sums, 3, d), a3))


@njit(**OPTIONS)
def _locate(batch: int, head: int, shape: Any, count: int, dtype: Any, chosen: Any, window: Any) -> Any:
    """Addresses of the keys and of the values of a head's tokens, `[2, T]`: those chosen, then those of the window."""
    batch_size, num_heads, _, key_dim, value_dim, num_slots, window_length = shape
    page_address, num_pages, page_tokens, slot_address, _ = chosen
    key_address, key_stride_b, key_stride_h, value_address, value_stride_b, value_stride_h = window
    item_size = 4 if len(dtype) == 1 else 2
    pages, row_size = longs_at(page_address, (num_pages,)), (key_dim + value_dim) * item_size
    matrix = batch * num_heads + head
    slots = longs_at(slot_address, (batch_size * num_heads, num_slots))[matrix]
    addresses = np.empty((2, count + window_length), dtype=np.int64)
    for t in range(count):
        row = matrix * page_tokens + slots[t] % page_tokens
        addresses[0, t] = pages[slots[t] // page_tokens] + row * row_size
        addresses[1, t] = addresses[0, t] + key_dim * item_size
    keys = key_address + (batch * key_stride_b + head * key_stride_h) * item_size
    values = value_address + (batch * value_stride_b + head * value_stride_h) * item_size
    for t in range(window_length):
        addresses[0, count + t] = keys + t * key_dim * item_size
        addresses[1, count + t] = values + t * value_dim * item_size
    return addresses


@njit(**OPTIONS)
def mask_row(batch: int, mask: Any) -> Any:
    """An item's row of a mask, as booleans and as what is added; only one of the two is what is there."""
    address, stride, num_columns, is_boolean = mask[:4]
    allowed = bytes_at(address + batch * stride, (num_columns * is_boolean,))
    return allowed, floats_at(address + 4 * batch * stride, (num_columns * (1 - is_boolean),))


@njit(**OPTIONS)
def bias_at(row: Any, column: int) -> Any:
    """What that adds to the score of one token."""
    allowed, added = row
    if added.shape[0] > 0:
        return added[column]
    return float32(0) if allowed[column] else float32(-np.inf)


@njit(**OPTIONS)
def _bias_of(batch: int, head: int, shape: Any, count: int, mask: Any) -> Any:
    """What the mask adds to the scores of a head's tokens, `[T]`."""
    batch_size, num_heads, _, _, _, num_slots, window_length = shape
    window_start = mask[5]
    positions = longs_at(mask[4], (batch_size * num_heads, num_slots))[batch * num_heads + head]
    row = mask_row(batch, mask)
    bias = np.empty(count + window_length, dtype=np.float32)
    for t in range(count + window_length):
        column = max(positions[t], 0) if t < count else window_start + t - count
        bias[t] = bias_at(row, column)
    return bias


@njit(**OPTIONS)
def _attend_task(
    task: int, shape: Any, scale: float, rows: Any, dtype: Any, chosen: Any, window: Any, mask: Any, ends: Any
) -> None:
    """Attention of some queries of one head over all its tokens."""
    batch_size, num_heads, groups, key_dim, value_dim, _, _ = shape
    row_blocks = -(-groups // len(rows))
    matrix = task // row_blocks
    batch, head = matrix // num_heads, matrix % num_heads
    # The last ones again, where they are no multiple
    row = min(task % row_blocks * len(rows), groups - len(rows))
    count = longs_at(chosen[4], (batch_size * num_heads,))[matrix]
    addresses = _locate(batch, head, shape, count, dtype, chosen, window)
    length = addresses.shape[1]
    bias = np.empty(0, dtype=np.float32) if mask[0] == 0 else _bias_of(batch, head, shape, count, mask)
    all_queries = floats_at(ends[0], (batch_size * num_heads, groups, key_dim))[matrix]
    padded_key, padded_value = -(-key_dim // LANES) * LANES, -(-value_dim // LANES) * LANES
    query = _load_queries(all_queries[row : row + len(rows)], float32(scale), padded_key)
    sums = zeros(ROWS, padded_value)
    scores = zeros(1, (_TILE + 2) * ROWS)
    total, decay = zeros(1, 2 * ROWS), zeros(1, 2 * ROWS)
    maximum = filled(1, 2 * ROWS, MINUS_INFINITY)
    item_size = 4 if len(dtype) == 1 else 2
    sizes = (key_dim * item_size, value_dim * item_size)
    for start in range(0, length, _TILE):
        span = (start, min(start + _TILE, length))
        tokens = span[1] - start
        _dot_rows(query, addresses, rows, dtype, span, sizes, key_dim, scores)
        if bias.shape[0] > 0:
            add_biases(bias, start, tokens, scores)
        if softmax_tile(tokens, scores, maximum, total, decay):
            scale_rows(decay, sums)
        _accumulate_rows(scores, addresses, rows, dtype, span, value_dim, sums)
    output = floats_at(ends[1], (batch_size * num_heads, groups, value_dim))[matrix]
    for r in range(len(rows)):
        weight = total[0, r] + total[0, r + ROWS]
        factor = float32(1) / weight if weight > 0 else float32(0)
        for d in range(value_dim):
            place = d if d < padded_value - LANES else d - value_dim + padded_value
            output[row + r, d] = sums[r, place] * factor


def _make_worker(rows: tuple[int, ...], dtype: tuple[int, ...]) -> Any:
    """
    The worker of a table, see `threads`, for tuples whose lengths count.

    It has B, H, G, D, E, K and tokens of the window; address of the pages' addresses, how many, tokens of a page,
    addresses of the slots and of the counts; address of the window's keys and their strides over B and H, the same of
    the values; of a mask its address, or 0 if there is none, stride and columns, whether it is boolean, address of the
    slots' positions and column of the window's first token; addresses of the queries and of the output, float32; and
    the factor of the scores, float64.
    """

    @njit(**WORKER)
    def attend(address: int) -> None:
        n = longs_at(address, (FIRST + 27,))[FIRST:]
        shape = (n[0], n[1], n[2], n[3], n[4], n[5], n[6])
        chosen, window = (n[7], n[8], n[9], n[10], n[11]), (n[12], n[13], n[14], n[15], n[16], n[17])
        mask, ends = (n[18], n[19], n[20], n[21], n[22], n[23]), (n[24], n[25])
        scale = doubles_at(address, (FIRST + 27,))[FIRST + 26]
        task, count = take_task(address), num_tasks(address)
        while task < count:
            _attend_task(task, shape, scale, rows, dtype, chosen, window, mask, ends)
            task = take_task(address)

    return attend


# By rows that share what is read, and by what is stored
_WORKERS = {
    (rows, dtype): _make_worker((0,) * rows, marks) for rows in range(1, ROWS + 1) for dtype, marks in DTYPES.items()
}


def can_attend_rows(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether rows are of a kind that is read here."""
    return min(key_dim, value_dim) >= LANES and dtype in DTYPES


@torch.compiler.disable
def attend_rows(
    query: torch.Tensor,
    pages: Sequence[torch.Tensor],
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """See `ops.gather.attend_rows`."""
    batch_size, num_heads, groups, key_dim = query.shape
    window_length, value_dim = window_values.shape[2:]
    # Names keep alive what is handed over by address
    queries, slots, count = query.float().contiguous(), slots.contiguous(), count.contiguous()
    pages = [page.contiguous() for page in pages]
    page_addresses = np.array([page.data_ptr() for page in pages], dtype=np.int64)
    dtype = pages[0].dtype
    window_keys, window_values = with_whole_rows(window_keys, dtype), with_whole_rows(window_values, dtype)
    output = torch.empty((batch_size, num_heads, groups, value_dim), dtype=torch.float32)
    masking = (0, 0, 0, 0, 0, 0)
    if mask is not None:
        mask = readable_mask(mask)
        # Read by address: as many as there are slots, as in plain PyTorch
        positions = slots if positions is None else positions[:, :, : slots.shape[2]].contiguous()
        masking = (*mask_numbers(mask), positions.data_ptr(), window_start)
    rows = min(groups, ROWS)
    numbers = (
        *(batch_size, num_heads, groups, key_dim, value_dim, slots.shape[2], window_length),
        *(page_addresses.ctypes.data, len(pages), pages[0].shape[2], slots.data_ptr(), count.data_ptr()),
        *(window_keys.data_ptr(), *window_keys.stride()[:2], window_values.data_ptr(), *window_values.stride()[:2]),
        *masking,
        *(queries.data_ptr(), output.data_ptr(), bits_of(scale)),
    )
    run(_WORKERS[rows, dtype], batch_size * num_heads * -(-groups // rows), numbers)
    return output.to(query.dtype)


def readable_mask(mask: torch.Tensor) -> torch.Tensor:
    """A mask `[B, tokens]`, boolean or added to scores, as it is read by address."""
    mask = mask if mask.dtype == torch.bool else mask.float()
    return mask if mask.stride(1) == 1 else mask.contiguous()


def mask_numbers(mask: torch.Tensor) -> tuple[int, int, int, int]:
    """What a table has of such a mask: address, stride over items, columns, and whether it is boolean."""
    return mask.data_ptr(), mask.stride(0), mask.shape[1], int(mask.dtype == torch.bool)


def with_whole_rows(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """States `[B, H, tokens, D]` of a dtype, in which the tokens of a head follow each other."""
    states = states.to(dtype)
    if states.stride(3) == 1 and states.stride(2) == states.shape[3]:
        return states
    return states.contiguous()
