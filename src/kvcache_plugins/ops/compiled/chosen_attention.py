"""Attention over tokens of which keys and values are codes, only those that were chosen, and over exact ones.

A task is one head and up to four of its queries. Its tokens are put in the order of their groups of keys first, so
that a group's steps become floats once, and what is read lies in order. A tile of them becomes floats in arrays that
stay in the machine's nearest cache, while the rows of the next are called for. Values are summed as they are stored,
rotated, and the sum is rotated back. Exact tokens, sink tokens and the window's, have a sum of their own.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, K slots, S sink tokens, W
tokens of the window, T tokens of a tile.
"""

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numba import float32, njit

from kvcache_plugins.ops.quantization import packed_planes
from kvcache_plugins.ops.rotation import rotation_size

from .arrays import MINUS_INFINITY, bytes_at, doubles_at, filled, floats_at, longs_at, zeros
from .chosen_tokens import keys_of, locate, prefetch_tile, values_of
from .coded_rows import apply_step, apply_steps, half_at, padded_columns, widen_codes
from .primitives import (
    OPTIONS,
    ROWS,
    WORKER,
    accumulate_states,
    dot_states,
    scale_rows,
    softmax_tile,
    to_floats,
)
from .rows import DTYPES, add_biases, bias_at, load_numbers, mask_numbers, mask_row, readable_mask, with_whole_rows
from .threads import (
    COUNT,
    FIRST,
    NEXT,
    bits_of,
    entry_of,
    num_tasks,
    num_threads,
    run_table,
    take_task,
)
from .tile import rotate_row
from .vectors import LANES, store_floats


if TYPE_CHECKING:
    from kvcache_plugins.ops.coded_tokens import CodedTokens

_TILE = 32
# Where in a table begins what is of keys, values, sink tokens, a call, its window and its mask, and how long it is
_KEYS, _VALUES, _SINKS, _CALL, _WINDOW, _MASK, _END = 5, 13, 20, 26, 33, 41, 46


class _Softmax(NamedTuple):
    """
    The online softmax of a task: queries `[4, whole vectors]`; scores of a tile; maximum, total and decay as of
    `primitives.softmax_tile`; the sum of exact values and that of rotated ones, `[4, whole vectors]`.
    """

    queries: Any
    scores: Any
    maximum: Any
    total: Any
    decay: Any
    exact: Any
    rotated: Any


@njit(**OPTIONS)
def _weigh(softmax: Any, keys: Any, bias: Any, start: int, tokens: int) -> None:
    """The weights of a tile of keys, in its scores; `bias` are the mask's, which token `start` on are of the tile."""
    dot_states(softmax.queries, keys, tokens, softmax.scores)
    if bias.shape[0] > 0:
        add_biases(bias, start, tokens, softmax.scores)
    if softmax_tile(tokens, softmax.scores, softmax.maximum, softmax.total, softmax.decay):
        scale_rows(softmax.decay, softmax.exact)
        scale_rows(softmax.decay, softmax.rotated)


@njit(**OPTIONS)
def _read_row(address: int, dtype: int, dim: int, floats: Any, number: int) -> None:
    """The numbers at an address as floats; `dtype` is how many marks `rows.DTYPES` has for it."""
    for d in range(0, dim, LANES):
        column = min(d, dim - LANES)
        if dtype == 1:
            store_floats(floats, number, column, load_numbers(address, column, (0,)))
        elif dtype == 2:
            store_floats(floats, number, column, load_numbers(address, column, (0, 0)))
        else:
            store_floats(floats, number, column, load_numbers(address, column, (0, 0, 0)))


@njit(**OPTIONS)
def _attend_exact(softmax: Any, addresses: Any, dtype: int, dims: Any, bias: Any, keys: Any, values: Any) -> None:
    """Adds the tokens whose keys and values are at `addresses` `[2, any]`."""
    for start in range(0, addresses.shape[1], _TILE):
        tokens = min(_TILE, addresses.shape[1] - start)
        for t in range(tokens):
            _read_row(addresses[0, start + t], dtype, dims[0], keys, t)
            _read_row(addresses[1, start + t], dtype, dims[1], values, t)
        _weigh(softmax, keys, bias, start, tokens)
        accumulate_states(softmax.scores, values, tokens, softmax.exact)


@njit(**OPTIONS)
def _attend_codes(
    softmax: Any, tokens: Any, keys: Any, values: Any, dims: Any, bias: Any, key_floats: Any, value_floats: Any
) -> None:
    """Adds tokens in codes: `[3, any]`, addresses of their key's codes and their value's row, and group of the key."""
    num_exact, count, key_bytes = max(bias.shape[0] - tokens.shape[1], 0), tokens.shape[1], keys.row_bytes
    steps, minima = zeros(1, -(-dims[0] // LANES) * LANES), zeros(1, -(-dims[0] // LANES) * LANES)
    scratch = zeros(1, max(key_floats.shape[1], value_floats.shape[1]))
    num_groups, code_bytes, group = dims[1] // values.group_size, 0, -1
    for plane in range(values.planes.shape[0]):
        code_bytes += values.planes[plane, 2]
    prefetch_tile(tokens, 0, _TILE, key_bytes, values.row_bytes)
    for start in range(0, count, _TILE):
        prefetch_tile(tokens, start + _TILE, start + 2 * _TILE, key_bytes, values.row_bytes)
        in_tile = min(_TILE, count - start)
        for t in range(in_tile):
            if tokens[2, start + t] != group:
                group = tokens[2, start + t]
                to_floats(keys.scale, group, 0, dims[0], steps)
                to_floats(keys.zero, group, 0, dims[0], minima)
            widen_codes(bytes_at(tokens[0, start + t], (1, key_bytes)), 0, keys.planes, key_floats, t, scratch)
            apply_steps(steps, minima, key_floats, t)
            row = bytes_at(tokens[1, start + t], (1, values.row_bytes))
            widen_codes(row, 0, values.planes, value_floats, t, scratch)
            for g in range(num_groups):
                step, minimum = half_at(row, 0, code_bytes + 2 * g), half_at(row, 0, code_bytes + 2 * (num_groups + g))
                apply_step(step, minimum, g * values.group_size, (g + 1) * values.group_size, value_floats, t)
        _weigh(softmax, key_floats, bias, num_exact + start, in_tile)
        accumulate_states(softmax.scores, value_floats, in_tile, softmax.rotated)


@njit(**OPTIONS)
def _start(query: Any, scale: Any, value_dim: int) -> _Softmax:
    """Of up to four queries `[any, D]`."""
    key_dim = query.shape[1]
    queries = zeros(ROWS, -(-key_dim // LANES) * LANES)
    for r in range(query.shape[0]):
        for d in range(key_dim):
            queries[r, d] = query[r, d] * scale
    padded = -(-value_dim // LANES) * LANES
    maximum, total, decay = filled(1, 2 * ROWS, MINUS_INFINITY), zeros(1, 2 * ROWS), zeros(1, 2 * ROWS)
    scores = zeros(1, (_TILE + 2) * ROWS)
    return _Softmax(queries, scores, maximum, total, decay, zeros(ROWS, padded), zeros(ROWS, padded))


@njit(**OPTIONS)
def _window_of(batch: int, head: int, n: Any, key_size: int, value_size: int, item_size: int) -> Any:
    """The window as `locate` takes it, of numbers of a table."""
    keys = n[2] + (batch * n[3] + head * n[4]) * item_size
    values = n[5] + (batch * n[6] + head * n[7]) * item_size
    return n[0], n[1], keys, values, key_size, value_size


@njit(**OPTIONS)
def _biases_of(batch: int, mask: Any, columns: Any) -> Any:
    """What a mask, of numbers of a table, adds to the scores of tokens with some columns; nothing without one."""
    bias = np.empty(columns.shape[0] if mask[0] else 0, dtype=np.float32)
    if mask[0]:
        row = mask_row(batch, (mask[0], mask[1], mask[2], mask[3]))
        for t in range(columns.shape[0]):
            bias[t] = bias_at(row, columns[t])
    return bias


@njit(**OPTIONS)
def _attend_task(task: int, n: Any, scale: float) -> None:
    """Attention of some queries of one head; `n` is the table of `_attend`."""
    batch_size, num_heads, key_dim, value_dim, rotated_together = n[:_KEYS]
    num_slots, slot_address, count_address, groups, query_address, output_address, dtype = n[_CALL:_WINDOW]
    num_matrices, row_blocks = batch_size * num_heads, -(-groups // ROWS)
    matrix, row = task // row_blocks, task % row_blocks * ROWS
    batch, head = matrix // num_heads, matrix % num_heads
    item_size = 4 if dtype == 1 else 2
    dims, sizes = (key_dim, value_dim), (key_dim * item_size, value_dim * item_size)
    keys, values = keys_of(matrix, num_matrices, key_dim, n[_KEYS:]), values_of(matrix, n[_VALUES:])
    first_address, sink_keys, sink_values, num_sinks, run_address, num_runs = n[_SINKS:_CALL]
    origin = matrix * num_sinks
    sinks = (
        *(longs_at(first_address, (batch_size,))[batch], num_sinks),
        *(sink_keys + origin * sizes[0], sink_values + origin * sizes[1]),
    )
    window = _window_of(batch, head, n[_WINDOW:], sizes[0], sizes[1], item_size)
    slots = longs_at(slot_address, (num_matrices, num_slots))[matrix]
    count = longs_at(count_address, (num_matrices,))[matrix]
    exact, coded, columns = locate(slots, count, longs_at(run_address, (num_runs, 3)), keys, values, sinks, window)
    bias = _biases_of(batch, n[_MASK:], columns)
    queries = floats_at(query_address, (num_matrices, groups, key_dim))[matrix, row : row + ROWS]
    softmax = _start(queries, float32(scale), value_dim)
    # A row more than tokens, as they are gone through in pairs
    key_floats, value_floats = zeros(_TILE + 1, padded_columns(key_dim)), zeros(_TILE + 1, padded_columns(value_dim))
    _attend_exact(softmax, exact, dtype, dims, bias, key_floats, value_floats)
    _attend_codes(softmax, coded, keys, values, dims, bias, key_floats, value_floats)
    output = floats_at(output_address, (num_matrices, groups, value_dim))[matrix]
    for r in range(queries.shape[0]):
        if rotated_together > 1:
            rotate_row(softmax.rotated, r, 0, value_dim, rotated_together)
        weight = softmax.total[0, r] + softmax.total[0, r + ROWS]
        factor = float32(1) / weight if weight > 0 else float32(0)
        for d in range(value_dim):
            output[row + r, d] = (softmax.exact[r, d] + softmax.rotated[r, d]) * factor


@njit(**WORKER)
def _attend(address: int) -> None:
    """
    The worker of a table, see `threads`.

    It has B, H, D, E and channels that are rotated together; of keys and values what `keys_of` and `values_of` take;
    of sink tokens the addresses of first slots, keys and values, and S; address of the runs and how many; K, addresses
    of slots and counts, G, addresses of queries and output, float32, how many marks the window's dtype has in
    `rows.DTYPES`; W, the window's first column of the mask, address of its keys and their strides over B and H, the
    same of its values; of a mask what `rows.mask_numbers` says, or zeros; the factor of the scores, float64.
    """
    n = longs_at(address, (FIRST + _END,))[FIRST:]
    scale = doubles_at(address, (FIRST + _END,))[FIRST + _END - 1]
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _attend_task(task, n, scale)
        task = take_task(address)


class _Table:
    """The table of tokens, and what it has addresses of: in a model's step all that is touched comes from memory."""

    def __init__(self, tokens: "CodedTokens"):
        keys, values, sinks = tokens.keys, tokens.values, tokens.sinks
        batch_size, num_heads, _, key_dim = keys.scale.shape
        stored = (keys.codes, keys.scale, keys.zero, sinks.first, sinks.keys, sinks.values, *values.pages)
        self._tensors = [tensor.contiguous() for tensor in stored]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        planes = [packed_planes(key_dim, keys.nbits), packed_planes(values.head_dim, values.nbits)]
        self._arrays = [np.array(each, dtype=np.int64) for each in (*planes, keys.runs, addresses[6:])]
        key_planes, value_planes, runs, pages = ((each.ctypes.data, len(each)) for each in self._arrays)
        numbers = (
            *(batch_size, num_heads, key_dim, values.head_dim, rotation_size(values.head_dim)),
            *(*addresses[:3], *keys.codes.shape[2:], *key_planes),
            *(*pages, *values.pages[0].shape[2:], *value_planes, values.group_size),
            *(*addresses[3:6], sinks.keys.shape[2], *runs),
        )
        assert len(numbers) == _CALL
        self.num_matrices, self.value_dim = batch_size * num_heads, values.head_dim
        self.numbers = array("q", (0, 0, *numbers, *(0,) * (_END - _CALL)))


# Of tokens that live
_TABLES: "WeakKeyDictionary[CodedTokens, _Table]" = WeakKeyDictionary()


@torch.compiler.disable
def attend_chosen(
    query: torch.Tensor,
    tokens: "CodedTokens",
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """
    Attention of one new token over chosen tokens and the window.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        tokens (`CodedTokens`): the tokens in all slots; exact ones are in the window's dtype.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): slots of the tokens that were chosen.
        count (`torch.Tensor` of shape `[B, H]`, int64): how many of those every head attends to, the first ones.
        window_keys, window_values (`torch.Tensor` of shape `[B, H, W, D]`, `[B, H, W, E]`): the newest tokens, of a
            kind that `rows.can_attend_rows`.
        scale (`float`): factor of the scores.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask, boolean or added to the
            scores; slots are columns of it.
        window_start (`int`): column of the window's first token.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype; zero where there is nothing to attend to.
    """
    table = _TABLES.get(tokens)
    if table is None:
        table = _TABLES[tokens] = _Table(tokens)
    groups = query.shape[2]
    # Names keep alive what is handed over by address
    queries, slots, count = query.float().contiguous(), slots.contiguous(), count.contiguous()
    window_keys, window_values = with_whole_rows(window_keys), with_whole_rows(window_values)
    mask = None if mask is None else readable_mask(mask)
    output = torch.empty((*query.shape[:3], table.value_dim), dtype=torch.float32)
    numbers = table.numbers
    numbers[NEXT], numbers[COUNT] = 0, table.num_matrices * -(-groups // ROWS)
    call = (
        *(slots.shape[2], slots.data_ptr(), count.data_ptr(), groups, queries.data_ptr(), output.data_ptr()),
        *(len(DTYPES[window_keys.dtype]), window_keys.shape[2], window_start),
        *(window_keys.data_ptr(), *window_keys.stride()[:2], window_values.data_ptr(), *window_values.stride()[:2]),
        *((0, 0, 0, 0) if mask is None else mask_numbers(mask)),
        bits_of(scale),
    )
    numbers[FIRST + _CALL :] = array("q", call)
    run_table(entry_of(_attend), numbers, num_threads())
    return output if query.dtype is torch.float32 else output.to(query.dtype)
