"""Building blocks of the compiled attention: a tile of tokens meets up to four queries.

Compiled by Numba, which brings its own code generator: no compiler has to be on the machine. Codes become floats in
registers and go straight into the products with queries and weights, whose sums stay in registers too; scales are
part of the queries (keys by channel) or of the weights (values). Up to four rows share every code that is unpacked,
so what belongs to a token is four numbers side by side, one a row, used or not.

Legend: T tokens of a tile, V vectors of codes (`layout`), D head dim.
"""

from typing import Any

import numpy as np
from numba import float32, njit

from .row_vectors import ROWS, add_row_products, add_to_rows, add_weighted, no_sums, sums_of_two
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
# What neither makes arrays nor returns any: it counts no references, which else takes as long to compile again
BORROWING: dict[str, Any] = OPTIONS | {"_nrt": False}
# What is called by address, see `threads`
WORKER: dict[str, Any] = OPTIONS | {"no_cfunc_wrapper": False}
# What takes more arrays than a call should hand over, each of them nine numbers on the stack
INLINED: dict[str, Any] = OPTIONS | {"inline": "always"}
_ALL = (0,) * ROWS
_ZERO = np.float32(0)


@njit(**BORROWING)
def dot_codes(
    rows: Any,
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
        rows: queries in use, 1 to 4, as the length of a tuple.
        query: `[4, 8 V]`, in the order of the vectors and with their weights.
        codes: `[tokens of the chunk, bytes]`.
        places, masks: of a `CodeLayout`.
        vectors: from which vector up to which.
        tokens: the tile's first token; from which token up to which.
        base: `[1, 8]`, added to the scores of two tokens.
        scores: `[1, 4 T + 4]`, filled for these tokens, four numbers each, and for one more if they are odd.
    """
    origin, first, last = tokens
    for t in range(first, last, 2):
        u = min(t + 1, last - 1)
        sums_a = sums_b = no_sums(rows)
        for v in range(vectors[0], vectors[1]):
            a = masked_to_floats(load_bytes(codes, t, places[v]), masks[v])
            b = masked_to_floats(load_bytes(codes, u, places[v]), masks[v])
            sums_a = add_row_products(sums_a, a, query, v * LANES)
            sums_b = add_row_products(sums_b, b, query, v * LANES)
        sums = add(sums_of_two(sums_a, sums_b), load_floats(base, 0, 0))
        store_floats(scores, 0, (t - origin) * ROWS, sums)


@njit(**BORROWING)
def accumulate_codes(
    rows: Any,
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
    first, last = tokens
    for v in range(vectors[0], vectors[1], 2):
        place_a, place_b, mask_a, mask_b = places[v], places[v + 1], masks[v], masks[v + 1]
        sums_a = sums_b = no_sums(rows)
        for t in range(first, last):
            a = masked_to_floats(load_bytes(codes, t, place_a), mask_a)
            b = masked_to_floats(load_bytes(codes, t, place_b), mask_b)
            place = (t - first) * ROWS
            sums_a = add_weighted(sums_a, a, weights, place)
            sums_b = add_weighted(sums_b, b, weights, place)
        add_to_rows(sums, v * LANES, sums_a)
        add_to_rows(sums, (v + 1) * LANES, sums_b)


@njit(**BORROWING)
def dot_states(query: Any, states: Any, tokens: int, scores: Any) -> None:
    """
    Products of four queries `[4, padded D]` with exact states `[T, padded D]`; `scores` as in `dot_codes`.

    `D` is padded with zeros to whole vectors.
    """
    for t in range(0, tokens, 2):
        u = min(t + 1, tokens - 1)
        sums_a = sums_b = no_sums(_ALL)
        for d in range(0, query.shape[1], LANES):
            sums_a = add_row_products(sums_a, load_floats(states, t, d), query, d)
            sums_b = add_row_products(sums_b, load_floats(states, u, d), query, d)
        store_floats(scores, 0, t * ROWS, sums_of_two(sums_a, sums_b))


@njit(**BORROWING)
def accumulate_states(weights: Any, states: Any, tokens: int, sums: Any) -> None:
    """Adds exact states `[T, padded D]`, times weights `[1, 4 T + 4]`, to `sums` `[4, padded D]`."""
    for d in range(0, sums.shape[1], LANES):
        own = no_sums(_ALL)
        for t in range(tokens):
            own = add_weighted(own, load_floats(states, t, d), weights, t * ROWS)
        add_to_rows(sums, d, own)


@njit(**BORROWING)
def add_products(factors: Any, columns: Any, tokens: int, scores: Any) -> None:
    """Adds `factors[t] columns` to the scores of token `t`; `factors` `[1, T rank]`, `columns` `[rank, 4]`."""
    rank = columns.shape[0]
    for t in range(tokens):
        score = load_four(scores, 0, t * ROWS)
        for k in range(rank):
            score = multiply_add(broadcast_four(factors[0, t * rank + k]), load_four(columns, k, 0), score)
        store_four(scores, 0, t * ROWS, score)


@njit(**BORROWING)
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


@njit(**BORROWING)
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


@njit(**BORROWING)
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


@njit(**BORROWING)
def scale_rows(factors: Any, sums: Any) -> None:
    """Multiplies row `r` of `sums` `[4, whole vectors]` by `factors[0, r]`."""
    for r in range(ROWS):
        factor = broadcast(factors[0, r])
        for d in range(0, sums.shape[1], LANES):
            store_floats(sums, r, d, multiply(load_floats(sums, r, d), factor))


@njit(**BORROWING)
def scale_columns(factors: Any, columns: Any) -> None:
    """Multiplies column `r` of `columns` `[any, 4]` by `factors[0, r]`."""
    factor = load_four(factors, 0, 0)
    for i in range(columns.shape[0]):
        store_four(columns, i, 0, multiply(load_four(columns, i, 0), factor))


@njit(**BORROWING)
def to_floats(halves: Any, row: int, first: int, count: int, floats: Any) -> None:
    """Values `first` to `first + count` of a row of float16, given as uint16, to the start of `floats` `[1, any]`."""
    whole = count - count % LANES
    for i in range(0, whole, LANES):
        store_floats(floats, 0, i, load_halves(halves, row, first + i))
    for i in range(whole, count):
        floats[0, i] = float_of_half(halves[row, first + i])
