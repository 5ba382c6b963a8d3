"""Building blocks of the compiled attention: a tile of tokens meets up to four queries.

Compiled by Numba, which brings its own code generator: no compiler has to be on the machine. Codes become floats in
registers and go straight into the products with queries and weights, whose sums stay in registers too; scales are
part of the queries (keys by channel) or of the weights (values). Up to four rows share every code that is unpacked,
so what belongs to a token is four numbers side by side, one a row, used or not.

Legend: T tokens of a tile, V vectors of codes (`layout`), D head dim.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import float32, njit

from .vectors import (
    LANES,
    add,
    broadcast,
    broadcast_four,
    exp_of_difference,
    float_of_half,
    larger,
    load_bytes,
    load_floats,
    load_four,
    load_halves,
    masked_to_floats,
    multiply,
    multiply_add,
    store_floats,
    store_four,
    sums_of_eight,
)


# Without "nnan" and "ninf": masks are infinite. What Python calls takes as long to compile as what is done
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}
# What is called by address, see `threads`
WORKER: dict[str, Any] = OPTIONS | {"no_cfunc_wrapper": False}
# What takes more arrays than a call should hand over, each of them nine numbers on the stack
INLINED: dict[str, Any] = OPTIONS | {"inline": "always"}
# Rows that share the codes that are unpacked
ROWS = 4
_ZERO = np.float32(0)


def _make_dot_codes(rows: int) -> Callable[..., None]:
    @njit(**OPTIONS)
    def dot_codes(
        query: Any, codes: Any, places: Any, masks: Any, vectors: Any, tokens: Any, base: Any, scores: Any
    ) -> None:
        origin, first, last = tokens
        for t in range(first, last, 2):
            u = min(t + 1, last - 1)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
            for v in range(vectors[0], vectors[1]):
                a = masked_to_floats(load_bytes(codes, t, places[v]), masks[v])
                b = masked_to_floats(load_bytes(codes, u, places[v]), masks[v])
                q = load_floats(query, 0, v * LANES)
                a0, b0 = multiply_add(a, q, a0), multiply_add(b, q, b0)
                if rows > 1:
                    q = load_floats(query, 1, v * LANES)
                    a1, b1 = multiply_add(a, q, a1), multiply_add(b, q, b1)
                if rows > 2:
                    q = load_floats(query, 2, v * LANES)
                    a2, b2 = multiply_add(a, q, a2), multiply_add(b, q, b2)
                if rows > 3:
                    q = load_floats(query, 3, v * LANES)
                    a3, b3 = multiply_add(a, q, a3), multiply_add(b, q, b3)
            sums = add(sums_of_eight(a0, a1, a2, a3, b0, b1, b2, b3), load_floats(base, 0, 0))
            store_floats(scores, 0, (t - origin) * ROWS, sums)

    return dot_codes  # type: ignore[no-any-return]


def _make_accumulate_codes(rows: int) -> Callable[..., None]:
    @njit(**OPTIONS)
    def accumulate_codes(
        weights: Any, codes: Any, places: Any, masks: Any, vectors: Any, tokens: Any, sums: Any
    ) -> None:
        first, last = tokens
        for v in range(vectors[0], vectors[1], 2):
            place_a, place_b, mask_a, mask_b = places[v], places[v + 1], masks[v], masks[v + 1]
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
            for t in range(first, last):
                a = masked_to_floats(load_bytes(codes, t, place_a), mask_a)
                b = masked_to_floats(load_bytes(codes, t, place_b), mask_b)
                place = (t - first) * ROWS
                w = broadcast(weights[0, place])
                a0, b0 = multiply_add(a, w, a0), multiply_add(b, w, b0)
                if rows > 1:
                    w = broadcast(weights[0, place + 1])
                    a1, b1 = multiply_add(a, w, a1), multiply_add(b, w, b1)
                if rows > 2:
                    w = broadcast(weights[0, place + 2])
                    a2, b2 = multiply_add(a, w, a2), multiply_add(b, w, b2)
                if rows > 3:
                    w = broadcast(weights[0, place + 3])
                    a3, b3 = multiply_add(a, w, a3), multiply_add(b, w, b3)
            _add_to(sums, 0, v * LANES, a0, b0)
            if rows > 1:
                _add_to(sums, 1, v * LANES, a1, b1)
            if rows > 2:
                _add_to(sums, 2, v * LANES, a2, b2)
            if rows > 3:
                _add_to(sums, 3, v * LANES, a3, b3)

    return accumulate_codes  # type: ignore[no-any-return]


@njit(**OPTIONS)
def _add_to(sums: Any, row: int, column: int, a: Any, b: Any) -> None:
    store_floats(sums, row, column, add(load_floats(sums, row, column), a))
    store_floats(sums, row, column + LANES, add(load_floats(sums, row, column + LANES), b))


_dot_1, _dot_2, _dot_3, _dot_4 = (_make_dot_codes(rows) for rows in range(1, ROWS + 1))
_accumulate_1, _accumulate_2, _accumulate_3, _accumulate_4 = (_make_accumulate_codes(r) for r in range(1, ROWS + 1))


@njit(**OPTIONS)
def dot_codes(
    rows: int,
    query: Any,
    codes: Any,
    places: Any,
    masks: Any,
    vectors: tuple[int, int],
    tokens: tuple[int, int, int],
    base: Any,
    scores: Any,
) -> None:
    """
    Products of queries with the codes of a tile's tokens.

    Args:
        rows: queries in use, 1 to 4.
        query: `[4, 8 V]`, in the order of the vectors and with their weights.
        codes: `[tokens of the chunk, bytes]`.
        places, masks: of a `CodeLayout`.
        vectors: from which vector up to which.
        tokens: the tile's first token; from which token up to which.
        base: `[1, 8]`, added to the scores of two tokens.
        scores: `[1, 4 T + 4]`, filled for these tokens, four numbers each, and for one more if they are odd.
    """
    if rows == 1:
        _dot_1(query, codes, places, masks, vectors, tokens, base, scores)
    elif rows == 2:
        _dot_2(query, codes, places, masks, vectors, tokens, base, scores)
    elif rows == 3:
        _dot_3(query, codes, places, masks, vectors, tokens, base, scores)
    else:
        _dot_4(query, codes, places, masks, vectors, tokens, base, scores)


@njit(**OPTIONS)
def accumulate_codes(
    rows: int,
    weights: Any,
    codes: Any,
    places: Any,
    masks: Any,
    vectors: tuple[int, int],
    tokens: tuple[int, int],
    sums: Any,
) -> None:
    """
    Adds the codes of a tile's tokens, times weights, to `sums` `[4, 8 V]`.

    Args:
        weights: `[1, 4 T + 4]`, four a token.
        tokens: from which token up to which.
        rows, codes, places, masks, vectors: as in `dot_codes`; an even number of vectors.
    """
    if rows == 1:
        _accumulate_1(weights, codes, places, masks, vectors, tokens, sums)
    elif rows == 2:
        _accumulate_2(weights, codes, places, masks, vectors, tokens, sums)
    elif rows == 3:
        _accumulate_3(weights, codes, places, masks, vectors, tokens, sums)
    else:
        _accumulate_4(weights, codes, places, masks, vectors, tokens, sums)


@njit(**OPTIONS)
def dot_states(query: Any, states: Any, tokens: int, scores: Any) -> None:
    """
    Products of four queries `[4, padded D]` with exact states `[T, padded D]`; `scores` as in `dot_codes`.

    `D` is padded with zeros to whole vectors.
    """
    for t in range(0, tokens, 2):
        u = min(t + 1, tokens - 1)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast(_ZERO)
        for d in range(0, query.shape[1], LANES):
            a, b = load_floats(states, t, d), load_floats(states, u, d)
            q = load_floats(query, 0, d)
            a0, b0 = multiply_add(a, q, a0), multiply_add(b, q, b0)
            q = load_floats(query, 1, d)
            a1, b1 = multiply_add(a, q, a1), multiply_add(b, q, b1)
            q = load_floats(query, 2, d)
            a2, b2 = multiply_add(a, q, a2), multiply_add(b, q, b2)
            q = load_floats(query, 3, d)
            a3, b3 = multiply_add(a, q, a3), multiply_add(b, q, b3)
        store_floats(scores, 0, t * ROWS, sums_of_eight(a0, a1, a2, a3, b0, b1, b2, b3))


@njit(**OPTIONS)
def accumulate_states(weights: Any, states: Any, tokens: int, sums: Any) -> None:
    """Adds exact states `[T, padded D]`, times weights `[1, 4 T + 4]`, to `sums` `[4, padded D]`."""
    for d in range(0, sums.shape[1], LANES):
        a0 = a1 = a2 = a3 = broadcast(_ZERO)
        for t in range(tokens):
            a, place = load_floats(states, t, d), t * ROWS
            a0 = multiply_add(a, broadcast(weights[0, place]), a0)
            a1 = multiply_add(a, broadcast(weights[0, place + 1]), a1)
            a2 = multiply_add(a, broadcast(weights[0, place + 2]), a2)
            a3 = multiply_add(a, broadcast(weights[0, place + 3]), a3)
        store_floats(sums, 0, d, add(load_floats(sums, 0, d), a0))
        store_floats(sums, 1, d, add(load_floats(sums, 1, d), a1))
        store_floats(sums, 2, d, add(load_floats(sums, 2, d), a2))
        store_floats(sums, 3, d, add(load_floats(sums, 3, d), a3))


@njit(**OPTIONS)
def add_products(factors: Any, columns: Any, tokens: int, scores: Any) -> None:
    """Adds `factors[t] columns` to the scores of token `t`; `factors` `[1, T rank]`, `columns` `[rank, 4]`."""
    rank = columns.shape[0]
    for t in range(tokens):
        score = load_four(scores, 0, t * ROWS)
        for k in range(rank):
            score = multiply_add(broadcast_four(factors[0, t * rank + k]), load_four(columns, k, 0), score)
        store_four(scores, 0, t * ROWS, score)


@njit(**OPTIONS)
def sum_products(factors: Any, weights: Any, tokens: int, columns: Any) -> None:
    """Adds the sum over tokens of `factors[t] weights[t]` to `columns` `[rank, 4]`; `factors` `[1, T rank]`."""
    rank = columns.shape[0]
    for k in range(rank):
        even = odd = broadcast_four(_ZERO)
        for t in range(0, tokens - 1, 2):
            even = multiply_add(broadcast_four(factors[0, t * rank + k]), load_four(weights, 0, t * ROWS), even)
            odd = multiply_add(
                broadcast_four(factors[0, (t + 1) * rank + k]), load_four(weights, 0, (t + 1) * ROWS), odd
            )
        if tokens % 2:
            t = tokens - 1
            even = multiply_add(broadcast_four(factors[0, t * rank + k]), load_four(weights, 0, t * ROWS), even)
        store_four(columns, k, 0, add(load_four(columns, k, 0), add(even, odd)))


@njit(**OPTIONS)
def add_bias(
    bias: Any, batch: int, head: int, groups: int, num_queries: int, row: int, start: int, tokens: int, scores: Any
) -> None:
    """
    Adds the mask's columns from `start` on, as far as there are any, to the scores of up to four rows, from `row` on,
    that are in use.
    """
    for r in range(row, min(row + ROWS, groups * num_queries)):
        query_head, query = head * groups + r // num_queries, r % num_queries
        line = bias[min(batch, bias.shape[0] - 1), min(query_head, bias.shape[1] - 1), min(query, bias.shape[2] - 1)]
        for t in range(min(tokens, line.shape[0] - start)):
            scores[0, t * ROWS + r - row] += line[start + t]


@njit(**OPTIONS)
def softmax_tile(tokens: int, scores: Any, maximum: Any, total: Any, decay: Any) -> bool:
    """
    Turns the scores of a tile into weights against the running maximum.

    Args:
        tokens: tokens in use.
        scores: `[1, 4 T + 4]`; in place.
        maximum, total: `[1, 8]`, the running maximum and sum of the weights of every row, twice; the two halves of
            `total` are to be added in the end.
        decay: `[1, 8]`, filled with what all that was accumulated has to be multiplied by.

    Returns:
        Whether any factor is not 1.
    """
    if tokens % 2:
        store_four(scores, 0, tokens * ROWS, broadcast_four(float32(-np.inf)))
    highest = broadcast(float32(-np.inf))
    for place in range(0, tokens * ROWS, LANES):
        highest = larger(load_floats(scores, 0, place), highest)
    store_floats(decay, 0, 0, highest)
    has_grown = False
    for r in range(ROWS):
        new = max(maximum[0, r], decay[0, r], decay[0, r + ROWS])
        has_grown |= new > maximum[0, r]
        decay[0, r] = decay[0, r + ROWS] = new
    if has_grown:
        highest = load_floats(decay, 0, 0)
        before = load_floats(maximum, 0, 0)
        store_floats(maximum, 0, 0, highest)
        # A row that could attend to nothing so far has accumulated nothing
        store_floats(decay, 0, 0, exp_of_difference(before, highest))
        for r in range(2 * ROWS):
            if not decay[0, r] <= 1:
                decay[0, r] = 1
        store_floats(total, 0, 0, multiply(load_floats(total, 0, 0), load_floats(decay, 0, 0)))
    reference = larger(load_floats(maximum, 0, 0), broadcast(float32(-3e38)))
    sums = broadcast(_ZERO)
    for place in range(0, tokens * ROWS, LANES):
        weights = exp_of_difference(load_floats(scores, 0, place), reference)
        sums = add(sums, weights)
        store_floats(scores, 0, place, weights)
    store_floats(total, 0, 0, add(load_floats(total, 0, 0), sums))
    return has_grown


@njit(**OPTIONS)
def scale_rows(factors: Any, sums: Any) -> None:
    """Multiplies row `r` of `sums` `[4, whole vectors]` by `factors[0, r]`."""
    for r in range(ROWS):
        factor = broadcast(factors[0, r])
        for d in range(0, sums.shape[1], LANES):
            store_floats(sums, r, d, multiply(load_floats(sums, r, d), factor))


@njit(**OPTIONS)
def scale_columns(factors: Any, columns: Any) -> None:
    """Multiplies column `r` of `columns` `[any, 4]` by `factors[0, r]`."""
    factor = load_four(factors, 0, 0)
    for i in range(columns.shape[0]):
        store_four(columns, i, 0, multiply(load_four(columns, i, 0), factor))


@njit(**OPTIONS)
def to_floats(halves: Any, row: int, first: int, count: int, floats: Any) -> None:
    """Values `first` to `first + count` of a row of float16, given as uint16, to the start of `floats` `[1, any]`."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        store_floats(floats, 0, i, load_halves(halves, row, first + i))
    for i in range(whole, count):
        floats[0, i] = float_of_half(halves[row, first + i])
