"""Attention over tokens of which keys and values are codes, only those that were chosen, and over exact ones.

A task is one head and up to four of its queries. Its tokens are put in the order of their groups of keys first, so
that a group's steps go into queries once, and what is read lies in order. What is stored of a tile of them is copied,
one token behind the other, while the rows of the next are called for; then codes become floats in registers, as in
`tile`. Exact tokens, sink tokens and the window's, have a sum of their own, which is not rotated back.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, K slots, S sink tokens, W
tokens of the window, T tokens of a tile.
"""

from array import array
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numba import float32, int64, njit, uint16

from kvcache_plugins.ops.quantization import packed_size
from kvcache_plugins.ops.rotation import rotation_size

from .arrays import bytes_at, doubles_at, floats_at, layout_at, longs_at, table_of_layout
from .chosen_tokens import keys_of, locate, prefetch_tile, values_of
from .layout import CodeLayout, code_layout
from .new_arrays import MINUS_INFINITY, filled, zeros
from .primitives import OPTIONS, WORKER, accumulate_states, dot_codes, dot_states, scale_rows, softmax_tile
from .row_copies import copy_bytes
from .row_vectors import ROWS
from .rows import DTYPES, add_biases, bias_at, load_numbers, mask_numbers, mask_row, readable_mask, with_whole_rows
from .tasks import most_rows
from .threads import COUNT, FIRST, NEXT, bits_of, entry_of, num_tasks, num_threads, run_table, take_task
from .tile import Sums, accumulate_values, fold_scales, load_queries, scale_sums, write_sums
from .vectors import LANES, store_floats


if TYPE_CHECKING:
    from kvcache_plugins.ops.coded_tokens import CodedTokens

_TILE = 64
# Where in a table begins what is of keys, values, sink tokens, a call, its window and its mask, and how long it is
_KEYS, _VALUES, _SINKS, _CALL, _WINDOW, _MASK, _END = 8, 14, 19, 25, 32, 40, 45


class _Tile(NamedTuple):
    """What is stored of a tile's tokens: codes of keys and values `[T, bytes]`, steps and minima of the latter."""

    keys: Any
    values: Any
    scale: Any
    zero: Any


class _Softmax(NamedTuple):
    """
    The online softmax of a task: queries `[4, whole vectors]`, scores of a tile, and what those that are accumulated
    are multiplied by; the sum of exact values `[4, whole vectors]`, and of codes.
    """

    queries: Any
    scores: Any
    decay: Any
    exact: Any
    sums: Sums


@njit(**OPTIONS)
def _weigh(softmax: Any, bias: Any, start: int, tokens: int) -> None:
    """The scores of a tile to weights; `bias` are the mask's, of which those from `start` on are the tile's."""
    if bias.shape[0] > 0:
        add_biases(bias, start, tokens, softmax.scores)
    if softmax_tile(tokens, softmax.scores, softmax.sums.maximum, softmax.sums.total, softmax.decay):
        scale_rows(softmax.decay, softmax.exact)
        scale_sums(softmax.decay, softmax.sums)


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
def _attend_exact(softmax: Any, addresses: Any, dtype: int, dims: Any, bias: Any) -> None:
    """Adds the tokens whose keys and values are at `addresses` `[2, any]`."""
    keys, values = zeros(_TILE, softmax.queries.shape[1]), zeros(_TILE, softmax.exact.shape[1])
    for start in range(0, addresses.shape[1], _TILE):
        tokens = min(_TILE, addresses.shape[1] - start)
        for t in range(tokens):
            _read_row(addresses[0, start + t], dtype, dims[0], keys, t)
            _read_row(addresses[1, start + t], dtype, dims[1], values, t)
        dot_states(softmax.queries, keys, tokens, softmax.scores)
        _weigh(softmax, bias, start, tokens)
        accumulate_states(softmax.scores, values, tokens, softmax.exact)


@njit(**OPTIONS)
def _copy_tile(tokens: Any, start: int, count: int, keys: Any, values: Any, tile: _Tile) -> None:
    """What is stored of some tokens, one behind the other."""
    scale, zero, num_groups = tile.scale, tile.zero, tile.scale.shape[1]
    key_place, value_place = tile.keys.ctypes.data, tile.values.ctypes.data
    for t in range(count):
        value = tokens[1, start + t]
        copy_bytes(int64(tokens[0, start + t]), int64(key_place), int64(keys.row_bytes))
        copy_bytes(int64(value), int64(value_place), int64(values.code_bytes))
        key_place += tile.keys.shape[1]
        value_place += tile.values.shape[1]
        row = bytes_at(value + values.code_bytes, (4 * num_groups,))
        for g in range(num_groups):
            step, minimum = 2 * g, 2 * (num_groups + g)
            scale[t, g] = uint16(uint16(row[step]) | uint16(row[step + 1]) << uint16(8))
            zero[t, g] = uint16(uint16(row[minimum]) | uint16(row[minimum + 1]) << uint16(8))


@njit(**OPTIONS)
def _attend_codes(
    used: Any,
    softmax: Any,
    queries: Any,
    rows: int,
    tokens: Any,
    keys: Any,
    values: Any,
    layouts: Any,
    tile: Any,
    bias: Any,
) -> None:
    """Adds tokens in codes, `[3, any]` as `locate` says."""
    num_exact, length, scores = max(bias.shape[0] - tokens.shape[1], 0), tokens.shape[1], softmax.scores
    layout, num_groups = layouts[0], tile.scale.shape[1]
    folded, base, codes = queries.folded, queries.base, tile.keys
    places, masks, vectors = layout.places, layout.masks, (int64(0), int64(layout.places.shape[0]))
    floats, scaled = np.empty((1, _TILE * num_groups), dtype=np.float32), zeros(1, (_TILE + 2) * ROWS)
    prefetch_tile(tokens, 0, _TILE, keys.row_bytes, values.row_bytes)
    for start in range(0, length, _TILE):
        prefetch_tile(tokens, start + _TILE, start + 2 * _TILE, keys.row_bytes, values.row_bytes)
        count = min(_TILE, length - start)
        _copy_tile(tokens, start, count, keys, values, tile)
        first = 0
        while first < count:
            group, last = tokens[2, start + first], first + 1
            while last < count and tokens[2, start + last] == group:
                last += 1
            if queries.group[0] != group:
                fold_scales(queries, rows, layout, keys.scale, keys.zero, group)
                queries.group[0] = group
            dot_codes(used, folded, codes, places, masks, vectors, (int64(0), int64(first), int64(last)), base, scores)
            first = last
        _weigh(softmax, bias, num_exact + start, count)
        accumulate_values(
            used, layouts[1], tile.values, tile.scale, tile.zero, 0, count, floats, scaled, scores, softmax.sums
        )


@njit(**OPTIONS)
def _start(query: Any, scale: Any, value_dim: int, num_groups: int, layout: CodeLayout) -> _Softmax:
    """Of up to four queries `[any, D]`, and values in groups of channels."""
    key_dim = query.shape[1]
    queries = zeros(ROWS, -(-key_dim // LANES) * LANES)
    for r in range(query.shape[0]):
        for d in range(key_dim):
            queries[r, d] = query[r, d] * scale
    sums = Sums(
        zeros(ROWS, layout.places.shape[0] * LANES),
        zeros(1, ROWS * value_dim),
        zeros(num_groups, ROWS),
        zeros(0, ROWS),
        zeros(1, 2 * ROWS),
        filled(1, 2 * ROWS, MINUS_INFINITY),
    )
    exact = zeros(ROWS, -(-value_dim // LANES) * LANES)
    return _Softmax(queries, zeros(1, (_TILE + 2) * ROWS), zeros(1, 2 * ROWS), exact, sums)


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
def _attend_task(used: Any, task: int, n: Any, scale: float) -> None:
    """Attention of some queries of one head; `n` is the table of the worker."""
    batch_size, num_heads, key_dim, value_dim, num_groups, rotated_together, key_table, value_table = n[:_KEYS]
    num_slots, slot_address, count_address, groups, query_address, output_address, dtype = n[_CALL:_WINDOW]
    num_matrices, row_blocks = batch_size * num_heads, -(-groups // len(used))
    matrix, row = task // row_blocks, task % row_blocks * len(used)
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
    queries = floats_at(query_address, (num_matrices, groups, key_dim))[matrix, row : row + len(used)]
    rows, layouts = queries.shape[0], (layout_at(key_table), layout_at(value_table))
    softmax = _start(queries, float32(scale), value_dim, num_groups, layouts[1])
    tile = _Tile(
        np.zeros((_TILE, max(layouts[0].row_size, keys.row_bytes)), dtype=np.uint8),
        np.zeros((_TILE, max(layouts[1].row_size, values.code_bytes)), dtype=np.uint8),
        np.empty((_TILE, num_groups), dtype=np.uint16),
        np.empty((_TILE, num_groups), dtype=np.uint16),
    )
    own = load_queries(queries, float32(scale), rows, 0, layouts[0])
    _attend_exact(softmax, exact, dtype, dims, bias)
    _attend_codes(used, softmax, own, rows, coded, keys, values, layouts, tile, bias)
    output = floats_at(output_address, (num_matrices, groups, value_dim))[matrix, row : row + rows]
    write_sums(rotated_together, layouts[1], rows, softmax.sums, output)
    for r in range(rows):
        weight = softmax.sums.total[0, r] + softmax.sums.total[0, r + ROWS]
        factor = float32(1) / weight if weight > 0 else float32(0)
        for d in range(value_dim):
            output[r, d] = (softmax.exact[r, d] + output[r, d]) * factor


def _make_worker(used: tuple[int, ...]) -> Any:
    """
    The worker of a table, see `threads`.

    It has B, H, D, E, groups of channels of a value and channels that are rotated together, addresses of the tables of
    the layouts of keys and values; of keys and values what `keys_of` and `values_of` take;
    of sink tokens the addresses of first slots, keys and values, and S; address of the runs and how many; K, addresses
    of slots and counts, G, addresses of queries and output, float32, how many marks the window's dtype has in
    `rows.DTYPES`; W, the window's first column of the mask, address of its keys and their strides over B and H, the
    same of its values; of a mask what `rows.mask_numbers` says, or zeros; the factor of the scores, float64.
    """

    @njit(**WORKER)
    def attend(address: int) -> None:
        n = longs_at(address, (FIRST + _END,))[FIRST:]
        scale = doubles_at(address, (FIRST + _END,))[FIRST + _END - 1]
        task, count = take_task(address), num_tasks(address)
        while task < count:
            _attend_task(used, task, n, scale)
            task = take_task(address)

    return attend


# By the queries that a task has at most
_WORKERS = {rows: _make_worker((0,) * rows) for rows in range(1, ROWS + 1)}


class _Table:
    """The table of tokens, and what it has addresses of: in a model's step all that is touched comes from memory."""

    def __init__(self, tokens: "CodedTokens"):
        keys, values, sinks = tokens.keys, tokens.values, tokens.sinks
        batch_size, num_heads, _, key_dim = keys.scale.shape
        first = torch.zeros(batch_size, dtype=torch.int64) if sinks.first is None else sinks.first.cpu()
        stored = (keys.codes, keys.scale, keys.zero, first, sinks.keys, sinks.values, *values.pages)
        self._tensors = [tensor.contiguous() for tensor in stored]
        addresses = [tensor.data_ptr() for tensor in self._tensors]
        num_groups = values.head_dim // values.group_size
        layouts = code_layout(keys.nbits, key_dim, 1), code_layout(values.nbits, values.head_dim, num_groups)
        self._arrays = [*map(table_of_layout, layouts)]
        self._arrays += [np.array(each, dtype=np.int64) for each in (keys.runs, addresses[6:])]
        tables, runs, pages = self._arrays[:2], *self._arrays[2:]
        numbers = (
            *(batch_size, num_heads, key_dim, values.head_dim, num_groups, rotation_size(values.head_dim)),
            *(table.ctypes.data for table in tables),
            *(*addresses[:3], *keys.codes.shape[2:]),
            *(pages.ctypes.data, len(pages), *values.pages[0].shape[2:]),
            packed_size(values.head_dim, values.nbits),
            *(*addresses[3:6], sinks.keys.shape[2], runs.ctypes.data, len(runs)),
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
    dtype = tokens.sinks.keys.dtype
    window_keys, window_values = with_whole_rows(window_keys, dtype), with_whole_rows(window_values, dtype)
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
    run_table(entry_of(_WORKERS[most_rows(groups)]), numbers, num_threads())
    return output if query.dtype is torch.float32 else output.to(query.dtype)
