"""Attention over tokens of which keys and values are codes, only those that were chosen, and over exact ones.

A task is one head and up to four of its queries. Its tokens are put in the order of their groups of keys first, so
that a group's steps become floats once, and what is read lies in order. A tile of them becomes floats in arrays that
stay in the machine's nearest cache, while the rows of the next are called for. Values are summed as they are stored,
rotated, and the sum is rotated back. Exact tokens, sink tokens and the window's, have a sum of their own.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, K slots, S sink tokens, W
tokens of the window, T tokens of a tile.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import float32, int64, njit

from kvcache_plugins.ops.quantization import packed_planes
from kvcache_plugins.ops.rotation import rotation_size

from .arrays import MINUS_INFINITY, bytes_at, doubles_at, filled, floats_at, halves_at, longs_at, zeros
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
from .row_copies import order_by_share
from .rows import DTYPES, add_biases, bias_at, load_numbers, mask_numbers, mask_row, readable_mask, with_whole_rows
from .threads import FIRST, bits_of, num_tasks, run, take_task
from .tile import rotate_row
from .vectors import LANES, prefetch, store_floats


if TYPE_CHECKING:
    from kvcache_plugins.ops.grouped_scores import KeyGroups

_TILE = 32


class ValuePages(NamedTuple):
    """
    Rotated values in rows of bytes: a row has codes, then the steps and then the minima of its groups in float16.

    Attributes:
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, bytes]`, uint8): slot `i` is row `i`
            of all pages one behind the other.
        head_dim (`int`): E.
        nbits (`int`): bits a code.
        group_size (`int`): channels that share a step.
    """

    pages: Sequence[torch.Tensor]
    head_dim: int
    nbits: int
    group_size: int


class SinkStates(NamedTuple):
    """
    Tokens that are exact though they are in slots.

    Attributes:
        first (`torch.Tensor` of shape `[B]`, int64): slot of every item's first; the others follow.
        keys, values (`torch.Tensor` of shape `[B, H, S, D]`, `[B, H, S, E]`): their states.
    """

    first: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class _Keys(NamedTuple):
    """Keys of a head: address and bytes of a token of its codes, steps and minima `[groups, D]`, planes, and tokens of
    a group."""

    codes: Any
    row_bytes: Any
    scale: Any
    zero: Any
    planes: Any
    group_size: Any


class _Values(NamedTuple):
    """Values of a head: addresses of the pages and of the head in each, tokens of a page, bytes of a row, planes, and
    channels of a group."""

    pages: Any
    offset: Any
    page_tokens: Any
    row_bytes: Any
    planes: Any
    group_size: Any


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
def _prefetch_tile(tokens: Any, start: int, key_bytes: int, row_bytes: int) -> None:
    """Calls for the rows of a tile, which lie in a line of memory or two."""
    for t in range(start, min(start + _TILE, tokens.shape[1])):
        prefetch(int64(tokens[0, t]))
        prefetch(int64(tokens[0, t] + key_bytes - 1))
        prefetch(int64(tokens[1, t]))
        prefetch(int64(tokens[1, t] + row_bytes - 1))


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
    _prefetch_tile(tokens, 0, key_bytes, values.row_bytes)
    for start in range(0, count, _TILE):
        _prefetch_tile(tokens, start + _TILE, key_bytes, values.row_bytes)
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
def _places_of(slots: Any, count: int, runs: Any) -> Any:
    """Places of the first tokens in slots; see `KeyGroups`."""
    places = np.empty(count, dtype=np.int64)
    for k in range(count):
        number = runs.shape[0] - 1
        while slots[k] < runs[number, 0]:
            number -= 1
        places[k] = slots[k] + runs[number, 2]
    return places


@njit(**OPTIONS)
def _locate(slots: Any, count: int, runs: Any, keys: Any, values: Any, sinks: Any, window: Any) -> Any:
    """
    Where a head's tokens are: addresses of the exact ones `[2, any]`, tokens in codes as in `_attend_codes`, and of
    all of them, the exact ones first, the columns of the mask.
    """
    first_slot, num_sinks, sink_keys, sink_values = sinks
    length, window_start, window_keys, window_values, key_size, value_size = window
    places = _places_of(slots, count, runs)
    ends = np.zeros(keys.scale.shape[0] + 1, dtype=np.int64)
    order = order_by_share(places, keys.group_size, ends)
    exact = np.empty((2, min(num_sinks, count) + length), dtype=np.int64)
    coded, columns = np.empty((3, count), dtype=np.int64), np.empty(count + length, dtype=np.int64)
    num_exact, num_coded = 0, 0
    for k in range(count):
        number = slots[order[k]] - first_slot
        if 0 <= number < num_sinks:
            exact[0, num_exact], exact[1, num_exact] = sink_keys + number * key_size, sink_values + number * value_size
            columns[num_exact] = slots[order[k]]
            num_exact += 1
    for t in range(length):
        exact[0, num_exact + t], exact[1, num_exact + t] = window_keys + t * key_size, window_values + t * value_size
        columns[num_exact + t] = window_start + t
    num_exact += length
    for k in range(count):
        slot, place = slots[order[k]], places[order[k]]
        if not 0 <= slot - first_slot < num_sinks:
            page = slot // values.page_tokens
            coded[0, num_coded] = keys.codes + place * keys.row_bytes
            coded[1, num_coded] = values.pages[page] + values.offset + slot % values.page_tokens * values.row_bytes
            coded[2, num_coded] = place // keys.group_size
            columns[num_exact + num_coded] = slot
            num_coded += 1
    return exact[:, :num_exact], coded[:, :num_coded], columns[: num_exact + num_coded]


@njit(**OPTIONS)
def _keys_of(matrix: int, num_matrices: int, dim: int, n: Any) -> _Keys:
    """The keys of a head, of the numbers of a table from the codes' address on."""
    return _Keys(
        n[0] + matrix * n[3] * n[4] * n[5],
        n[5],
        halves_at(n[1], (num_matrices, n[3], dim))[matrix],
        halves_at(n[2], (num_matrices, n[3], dim))[matrix],
        longs_at(n[6], (n[7], 3)),
        n[4],
    )


@njit(**OPTIONS)
def _values_of(matrix: int, n: Any) -> _Values:
    """The values of a head, of the numbers of a table from the address of the pages' addresses on."""
    pages, planes = longs_at(n[0], (n[1],)), longs_at(n[4], (n[5], 3))
    return _Values(pages, matrix * n[2] * n[3], n[2], n[3], planes, n[6])


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
def _attend_task(task: int, n: Any, scale: float) -> None:
    """Attention of some queries of one head; `n` is the table of `_attend`."""
    num_matrices, num_heads, groups, key_dim, value_dim, num_slots = n[0] * n[1], n[1], n[2], n[3], n[4], n[5]
    row_blocks = -(-groups // ROWS)
    matrix, row = task // row_blocks, task % row_blocks * ROWS
    batch, head = matrix // num_heads, matrix % num_heads
    dtype, item_size = n[30], 4 if n[30] == 1 else 2
    keys, values = _keys_of(matrix, num_matrices, key_dim, n[6:]), _values_of(matrix, n[16:])
    key_size, value_size = key_dim * item_size, value_dim * item_size
    first_slot, origin = longs_at(n[26], (n[0],))[batch], matrix * n[29]
    sinks = (first_slot, n[29], n[27] + origin * key_size, n[28] + origin * value_size)
    window_keys = n[33] + (batch * n[34] + head * n[35]) * item_size
    window_values = n[36] + (batch * n[37] + head * n[38]) * item_size
    window = (n[31], n[32], window_keys, window_values, key_size, value_size)
    slots, count = longs_at(n[24], (num_matrices, num_slots))[matrix], longs_at(n[25], (num_matrices,))[matrix]
    exact, coded, columns = _locate(slots, count, longs_at(n[14], (n[15], 3)), keys, values, sinks, window)
    bias = np.empty(columns.shape[0] if n[39] else 0, dtype=np.float32)
    if n[39]:
        mask = mask_row(batch, (n[39], n[40], n[41], n[42]))
        for t in range(columns.shape[0]):
            bias[t] = bias_at(mask, columns[t])
    queries = floats_at(n[43], (num_matrices, groups, key_dim))[matrix, row : row + ROWS]
    softmax = _start(queries, float32(scale), value_dim)
    # A row more than tokens, as they are gone through in pairs
    key_floats, value_floats = zeros(_TILE + 1, padded_columns(key_dim)), zeros(_TILE + 1, padded_columns(value_dim))
    _attend_exact(softmax, exact, dtype, (key_dim, value_dim), bias, key_floats, value_floats)
    _attend_codes(softmax, coded, keys, values, (key_dim, value_dim), bias, key_floats, value_floats)
    output = floats_at(n[44], (num_matrices, groups, value_dim))[matrix]
    for r in range(queries.shape[0]):
        if n[23] > 1:
            rotate_row(softmax.rotated, r, 0, value_dim, n[23])
        weight = softmax.total[0, r] + softmax.total[0, r + ROWS]
        factor = float32(1) / weight if weight > 0 else float32(0)
        for d in range(value_dim):
            output[row + r, d] = (softmax.exact[r, d] + softmax.rotated[r, d]) * factor


@njit(**WORKER)
def _attend(address: int) -> None:
    """
    The worker of a table, see `threads`.

    It has B, H, G, D, E, K; of keys the addresses of codes, steps and minima, groups that there is room for, tokens of
    a group, bytes of a token, address of the planes and how many, address of the runs and how many; of values the
    address of the pages' addresses, pages, tokens of a page, bytes of a row, address of the planes and how many,
    channels of a group and those that are rotated together; addresses of slots and counts; of sink tokens the
    addresses of first slots, keys and values, and S; of the window its dtype as of `_read_row`, W, its first column of
    the mask, the address of its keys and their strides over B and H, and the same of its values; of the mask what
    `rows.mask_numbers` says, or zeros; addresses of queries and output, float32; the factor of the scores, float64.
    """
    n = longs_at(address, (FIRST + 46,))[FIRST:]
    scale = doubles_at(address, (FIRST + 46,))[FIRST + 45]
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _attend_task(task, n, scale)
        task = take_task(address)


@torch.compiler.disable
def attend_chosen(
    query: torch.Tensor,
    keys: "KeyGroups",
    values: ValuePages,
    sinks: SinkStates,
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
        keys (`KeyGroups`): keys of the tokens in all slots.
        values (`ValuePages`): their values.
        sinks (`SinkStates`): those of the tokens that are exact all the same, in the window's dtype.
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
    batch_size, num_heads, groups, key_dim = query.shape
    window_length, value_dim = window_values.shape[2:]
    # Names keep alive what is handed over by address
    queries, slots, count = query.float().contiguous(), slots.contiguous(), count.contiguous()
    codes, steps, minima = keys.codes.contiguous(), keys.scale.contiguous(), keys.zero.contiguous()
    pages = [page.contiguous() for page in values.pages]
    addresses = np.array([page.data_ptr() for page in pages], dtype=np.int64)
    runs = np.array(keys.runs, dtype=np.int64)
    key_planes, value_planes = _planes(key_dim, keys.nbits), _planes(value_dim, values.nbits)
    first, sink_keys, sink_values = (states.contiguous() for states in sinks)
    window_keys, window_values = with_whole_rows(window_keys), with_whole_rows(window_values)
    mask = None if mask is None else readable_mask(mask)
    output = torch.empty((batch_size, num_heads, groups, value_dim), dtype=torch.float32)
    numbers = (
        *(batch_size, num_heads, groups, key_dim, value_dim, slots.shape[2]),
        *(codes.data_ptr(), steps.data_ptr(), minima.data_ptr(), *codes.shape[2:]),
        *(key_planes.ctypes.data, len(key_planes), runs.ctypes.data, len(runs)),
        *(addresses.ctypes.data, len(pages), *pages[0].shape[2:], value_planes.ctypes.data, len(value_planes)),
        *(values.group_size, rotation_size(value_dim), slots.data_ptr(), count.data_ptr()),
        *(first.data_ptr(), sink_keys.data_ptr(), sink_values.data_ptr(), sink_keys.shape[2]),
        *(len(DTYPES[window_keys.dtype]), window_length, window_start),
        *(window_keys.data_ptr(), *window_keys.stride()[:2], window_values.data_ptr(), *window_values.stride()[:2]),
        *((0, 0, 0, 0) if mask is None else mask_numbers(mask)),
        *(queries.data_ptr(), output.data_ptr(), bits_of(scale)),
    )
    run(_attend, batch_size * num_heads * -(-groups // ROWS), numbers)
    return output.to(query.dtype)


@cache
def _planes(dim: int, nbits: int) -> np.ndarray:
    return np.array(packed_planes(dim, nbits), dtype=np.int64)
