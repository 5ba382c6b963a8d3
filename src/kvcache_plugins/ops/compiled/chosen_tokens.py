"""Where the tokens of a head are that were chosen: what `chosen_attention` goes through.

Legend: D head dim of keys, K slots, S sink tokens, W tokens of the window.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import int64, njit

from .arrays import halves_at, longs_at
from .primitives import OPTIONS
from .row_copies import order_by_share
from .vectors import prefetch


class Keys(NamedTuple):
    """Keys of a head: address of its codes, bytes of a token, steps and minima `[groups, D]`, tokens of a group."""

    codes: Any
    row_bytes: Any
    scale: Any
    zero: Any
    group_size: Any


class Values(NamedTuple):
    """Values of a head: addresses of the pages, where the head's begin in each, tokens of a page, bytes of a row, and
    bytes of its codes."""

    pages: Any
    offset: Any
    page_tokens: Any
    row_bytes: Any
    code_bytes: Any


@njit(**OPTIONS)
def keys_of(matrix: int, num_matrices: int, dim: int, n: Any) -> Keys:
    """
    The keys of a head, of numbers of a table: addresses of codes, steps and minima, groups that there is room for,
    tokens of a group, bytes of a token.
    """
    return Keys(
        n[0] + matrix * n[3] * n[4] * n[5],
        n[5],
        halves_at(n[1], (num_matrices, n[3], dim))[matrix],
        halves_at(n[2], (num_matrices, n[3], dim))[matrix],
        n[4],
    )


@njit(**OPTIONS)
def values_of(matrix: int, n: Any) -> Values:
    """
    The values of a head, of numbers of a table: address of the pages' addresses, pages, tokens of a page, bytes of a
    row, bytes of its codes.
    """
    return Values(longs_at(n[0], (n[1],)), matrix * n[2] * n[3], n[2], n[3], n[4])


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
def locate(slots: Any, count: int, runs: Any, keys: Any, values: Any, sinks: Any, window: Any) -> Any:
    """
    Where a head's tokens are.

    Args:
        slots, count: the slots `[K]` of those that were chosen, and how many of them count.
        runs: `[any, 3]`, see `KeyGroups`.
        sinks: slot of the first sink token, S, addresses of their keys and of their values.
        window: W, column of the mask of its first token, addresses of its keys and of its values, bytes of a key and
            of a value.

    Returns:
        Of exact tokens, addresses of key and value `[2, any]`; of those in codes, addresses of the key's codes and of
        the value's row, and the group of the key, `[3, any]`, by groups; the columns of the mask of all, the exact
        ones first.
    """
    first_slot, num_sinks, sink_keys, sink_values = sinks
    length, window_start, window_keys, window_values, key_size, value_size = window
    places = _places_of(slots, count, runs)
    ends = np.zeros(keys.scale.shape[0] + 1, dtype=np.int64)
    order = order_by_share(places, keys.group_size, ends)
    exact = np.empty((2, min(num_sinks, count) + length), dtype=np.int64)
    coded, columns = np.empty((3, count), dtype=np.int64), np.empty(count + length, dtype=np.int64)
    num_exact, num_coded, group = 0, 0, 0
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
        slot = slots[order[k]]
        # Dividing takes longer
        while k >= ends[group]:
            group += 1
        if not 0 <= slot - first_slot < num_sinks:
            page = slot // values.page_tokens
            row = slot - page * values.page_tokens
            coded[0, num_coded] = keys.codes + places[order[k]] * keys.row_bytes
            coded[1, num_coded] = values.pages[page] + values.offset + row * values.row_bytes
            coded[2, num_coded] = group
            columns[num_exact + num_coded] = slot
            num_coded += 1
    return exact[:, :num_exact], coded[:, :num_coded], columns[: num_exact + num_coded]


@njit(**OPTIONS)
def prefetch_tile(tokens: Any, start: int, stop: int, key_bytes: int, row_bytes: int) -> None:
    """Calls for the rows of a tile, which lie in a line of memory or two."""
    for t in range(start, min(stop, tokens.shape[1])):
        prefetch(int64(tokens[0, t]))
        prefetch(int64(tokens[0, t] + key_bytes - 1))
        prefetch(int64(tokens[1, t]))
        prefetch(int64(tokens[1, t] + row_bytes - 1))
