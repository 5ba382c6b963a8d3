"""Products of queries and codes in integers, for scores of tokens.

Codes are small integers, and so queries are made integers for them, of 16 bits: machines multiply sixteen such numbers
and add neighbours in one instruction, which takes half the time that floats take. Rounding a query changes its scores
by some 1e-5 of their size, codes of 8 bits by 100 times that.

How many codes a byte holds and how many rows share what is unpacked is told by the lengths of two tuples, which Numba
knows when it compiles: only what is used is compiled.

Legend: R queries that share the unpacked codes, D head dim, P bytes of a token, 16 at least, F fields of a byte, M
numbers of a query in the order of the codes: 16 for every field of every 16 bytes, the last of which may not reach
beyond the token and so repeat some.
"""

from typing import Any

import numpy as np
from numba import float32, int16, int32, njit

from .new_arrays import zeros
from .primitives import OPTIONS
from .row_vectors import ROWS
from .vectors import (
    LANES,
    WORDS,
    broadcast,
    broadcast_int,
    broadcast_words,
    field_of_words,
    floats_of_ints,
    larger,
    load_byte_words,
    load_floats,
    load_words,
    multiply,
    multiply_add_words,
    store_floats,
    store_words,
    sums_of_eight,
    words_of_floats,
)


_TINY = np.float32(1e-30)


@njit(**OPTIONS)
def first_channels(fields: Any, field_size: int, width: int) -> Any:
    """The channel of the first of every 16 numbers in the order of the codes, `[M / 16]`."""
    channels = np.empty(-(-width // WORDS) * len(fields), dtype=np.int64)
    for number in range(channels.shape[0]):
        offset = min(number // len(fields) * WORDS, width - WORDS)
        channels[number] = number % len(fields) * field_size + offset
    return channels


@njit(**OPTIONS)
def in_order_of_codes(query: Any, fields: Any, field_size: int, width: int) -> Any:
    """Queries `[R, D]` in the order of the codes, `[4, M]`: zero in what is no channel, and in what is repeated."""
    channels = first_channels(fields, field_size, width)
    ordered = zeros(ROWS, channels.shape[0] * WORDS)
    for number in range(channels.shape[0]):
        offset = number // len(fields) * WORDS
        first = min(offset, width - WORDS)
        for lane in range(offset - first, WORDS):
            channel = channels[number] + lane
            if first + lane < field_size and channel < query.shape[1]:
                for r in range(query.shape[0]):
                    ordered[r, number * WORDS + lane] = query[r, channel]
    return ordered


@njit(**OPTIONS)
def sum_lanes(lanes: Any) -> None:
    """The sum of each row of `[4, 8]`, in the first row."""
    a, b, c, d = load_floats(lanes, 0, 0), load_floats(lanes, 1, 0), load_floats(lanes, 2, 0), load_floats(lanes, 3, 0)
    store_floats(lanes, 0, 0, sums_of_eight(a, b, c, d, a, b, c, d))


@njit(**OPTIONS)
def round_queries(
    ordered: Any, rows: Any, fields: Any, head_dim: int, lanes: Any, words: Any, factors: Any, bases: Any
) -> None:
    """
    Queries in the order of the codes to `words`, integers `[4, M]`. By `factors` `[R]` a product of those with codes
    has to be multiplied, and `bases` `[R]` be added, to be the product of the queries with codes less half of the
    largest there can be: where what codes begin at is taken off, less is lost by rounding. `lanes` `[4, 8]` is room
    to work in.
    """
    top = 2 ** (8 // len(fields)) - 1
    # Of codes in 8 bits some 256 are as many as 32 bits hold the sum of
    largest = float32(min(32767, (2**31 - 1) // (top * head_dim)))
    for r in range(len(rows)):
        highest = broadcast(float32(0))
        for place in range(0, ordered.shape[1], LANES):
            numbers = load_floats(ordered, r, place)
            highest = larger(larger(numbers, multiply(numbers, broadcast(float32(-1)))), highest)
        store_floats(lanes, r, 0, highest)
    for r in range(len(rows)):
        size = lanes[r, 0]
        for lane in range(1, LANES):
            size = max(size, lanes[r, lane])
        # What is below that counts as nothing: one could not divide by it
        steps = broadcast(largest / size if size > _TINY else float32(0))
        factors[r] = size / largest
        total = broadcast_int(int32(0))
        for place in range(0, ordered.shape[1], WORDS):
            low, high = load_floats(ordered, r, place), load_floats(ordered, r, place + LANES)
            rounded = words_of_floats(multiply(low, steps), multiply(high, steps))
            store_words(words, r, place, rounded)
            total = multiply_add_words(rounded, broadcast_words(int16(1)), total)
        store_floats(lanes, r, 0, floats_of_ints(total))
    sum_lanes(lanes)
    for r in range(len(rows)):
        bases[r] = -factors[r] * lanes[0, r] * float32(top) / float32(2)


@njit(**OPTIONS)
def dot_words(query: Any, codes: Any, rows: Any, fields: Any, start: int, tokens: int, products: Any) -> None:
    """Products of queries in integers `[4, M]` with the codes `[any, P]` of a tile, four numbers a token."""
    bits, mask = 8 // len(fields), int16(2 ** (8 // len(fields)) - 1)
    width = codes.shape[1]
    for t in range(0, tokens, 2):
        first, second = start + t, start + min(t + 1, tokens - 1)
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = broadcast_int(int32(0))
        place = 0
        for offset in range(0, width, WORDS):
            packed_a = load_byte_words(codes, first, min(offset, width - WORDS))
            packed_b = load_byte_words(codes, second, min(offset, width - WORDS))
            for field in range(len(fields)):
                a = field_of_words(packed_a, int16(bits * field), mask)
                b = field_of_words(packed_b, int16(bits * field), mask)
                q = load_words(query, 0, place)
                a0, b0 = multiply_add_words(a, q, a0), multiply_add_words(b, q, b0)
                if len(rows) > 1:
                    q = load_words(query, 1, place)
                    a1, b1 = multiply_add_words(a, q, a1), multiply_add_words(b, q, b1)
                if len(rows) > 2:
                    q = load_words(query, 2, place)
                    a2, b2 = multiply_add_words(a, q, a2), multiply_add_words(b, q, b2)
                if len(rows) > 3:
                    q = load_words(query, 3, place)
                    a3, b3 = multiply_add_words(a, q, a3), multiply_add_words(b, q, b3)
                place += WORDS
        sums = sums_of_eight(a0, a1, a2, a3, b0, b1, b2, b3)
        store_floats(products, 0, t * ROWS, floats_of_ints(sums))
