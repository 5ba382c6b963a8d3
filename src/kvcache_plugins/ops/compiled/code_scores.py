"""Scores of tokens of which only codes and a scale are at hand: `ops.gather.code_scores` on a CPU.

Codes are small integers, and so queries are made integers for them, of 16 bits: machines multiply sixteen such numbers
and add neighbours in one instruction, which takes half the time that floats take. Rounding a query changes its scores
by some 1e-5 of their size, codes of 8 bits by 100 times that.

How many codes a byte holds and how many rows share what is unpacked is told by the lengths of two tuples, which Numba
knows when it compiles: only what is used is compiled.

Legend: B batch, H key/value heads, G queries a head, R of them that share the unpacked codes, D head dim, T tokens, N
bytes of a token.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, int16, int32, njit

from .arrays import bytes_at, floats_at, halves_at, longs_at
from .primitives import OPTIONS, ROWS, WORKER
from .threads import FIRST, num_tasks, run, take_task
from .vectors import (
    LANES,
    WORDS,
    broadcast,
    broadcast_int,
    columns_of_four,
    field_of_words,
    float_of_half,
    floats_of_ints,
    load_byte_words,
    load_floats,
    load_halves,
    load_words,
    multiply,
    multiply_add,
    multiply_add_words,
    store_floats,
    sums_of_eight,
)


# Tokens whose scores wait to be scaled, and tokens of a task
_TILE = 64
_TOKENS_PER_TASK = 2048
_TINY = np.float32(1e-30)
_column_0, _column_1, _column_2, _column_3 = columns_of_four


@njit(**OPTIONS)
def _load_queries(query: Any, fields: Any, field_size: int, width: int) -> Any:
    """
    Queries `[R, D]` as integers in the order of the codes, and what a product with them has to be multiplied by, and
    then added to it, to be the score of a token with scale 1.

    Channels from `field_size` times `field` on are those in that field of the bytes.
    """
    num_fields, head_dim = len(fields), query.shape[1]
    top = 2 ** (8 // num_fields) - 1
    # Of codes in 8 bits some 256 are as many as 32 bits hold the sum of
    largest = float32(min(32767, (2**31 - 1) // (top * head_dim)))
    words = np.zeros((ROWS, -(-width // WORDS) * num_fields * WORDS), dtype=np.int16)
    factors, bases = np.zeros(ROWS, dtype=np.float32), np.zeros(ROWS, dtype=np.float32)
    for r in range(query.shape[0]):
        highest = float32(0)
        for d in range(head_dim):
            highest = max(highest, abs(query[r, d]))
        # What is below that counts as nothing: one could not divide by it
        steps = largest / highest if highest > _TINY else float32(0)
        factors[r] = highest / largest
        total, place = 0, 0
        for offset in range(0, width, WORDS):
            first = min(offset, width - WORDS)
            for field in range(num_fields):
                # The last vector of a token may not reach beyond it: lanes it shares with the one before do not count
                for lane in range(offset - first, WORDS):
                    channel = field * field_size + first + lane
                    if first + lane < field_size and channel < head_dim:
                        number = round(query[r, channel] * steps)
                        words[r, place + lane] = number
                        total += number
                place += WORDS
        bases[r] = -factors[r] * float32(total) * float32(top) / float32(2)
    return words, factors, bases


@njit(**OPTIONS)
def _dot_codes(query: Any, codes: Any, rows: Any, fields: Any, start: int, tokens: int, products: Any) -> None:
    """Products of queries with the codes `[capacity, N]` of a tile, four numbers a token."""
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


@njit(**OPTIONS)
def _scale_products(
    products: Any, factors: Any, bases: Any, scale: Any, rows: Any, start: int, tokens: int, scores: Any
) -> None:
    """Products of a tile to scores `[R, T]`, of tokens whose scales are `[1, capacity]`."""
    whole = tokens - tokens % LANES
    for t in range(0, whole, LANES):
        a, b = load_floats(products, 0, t * ROWS), load_floats(products, 0, t * ROWS + LANES)
        c, d = load_floats(products, 0, t * ROWS + 2 * LANES), load_floats(products, 0, t * ROWS + 3 * LANES)
        steps = load_halves(scale, 0, start + t)
        score = multiply_add(_column_0(a, b, c, d), broadcast(factors[0]), broadcast(bases[0]))
        store_floats(scores, 0, start + t, multiply(score, steps))
        if len(rows) > 1:
            score = multiply_add(_column_1(a, b, c, d), broadcast(factors[1]), broadcast(bases[1]))
            store_floats(scores, 1, start + t, multiply(score, steps))
        if len(rows) > 2:
            score = multiply_add(_column_2(a, b, c, d), broadcast(factors[2]), broadcast(bases[2]))
            store_floats(scores, 2, start + t, multiply(score, steps))
        if len(rows) > 3:
            score = multiply_add(_column_3(a, b, c, d), broadcast(factors[3]), broadcast(bases[3]))
            store_floats(scores, 3, start + t, multiply(score, steps))
    for t in range(whole, tokens):
        step = float_of_half(scale[0, start + t])
        for r in range(len(rows)):
            scores[r, start + t] = (products[0, t * ROWS + r] * factors[r] + bases[r]) * step


@njit(**OPTIONS)
def _score_task(task: int, shape: Any, rows: Any, fields: Any, addresses: Any) -> None:
    """The scores of some tokens of one head for some of its queries."""
    batch_size, num_heads, groups, head_dim, field_size, capacity, width, length, num_runs = shape
    query_address, code_address, scale_address, score_address = addresses
    head, start = task // num_runs, task % num_runs * _TOKENS_PER_TASK
    stop = min(start + _TOKENS_PER_TASK, length)
    queries = floats_at(query_address, (batch_size * num_heads, groups, head_dim))[head]
    scores = floats_at(score_address, (batch_size * num_heads, groups, length))[head]
    codes = bytes_at(code_address, (batch_size * num_heads, capacity, width))[head]
    scale = halves_at(scale_address, (batch_size * num_heads, 1, capacity))[head]
    products = np.empty((1, _TILE * ROWS), dtype=np.float32)
    for row in range(0, groups, len(rows)):
        # The last ones again, where they are no multiple
        row = min(row, groups - len(rows))
        query, factors, bases = _load_queries(queries[row : row + len(rows)], fields, field_size, width)
        own = scores[row : row + len(rows)]
        for first in range(start, stop, _TILE):
            tokens = min(_TILE, stop - first)
            _dot_codes(query, codes, rows, fields, first, tokens, products)
            _scale_products(products, factors, bases, scale, rows, first, tokens, own)


def _make_worker(rows: tuple[int, ...], fields: tuple[int, ...]) -> Any:
    @njit(**WORKER)
    def score(address: int) -> None:
        n = longs_at(address, (FIRST + 13,))[FIRST:]
        shape, addresses = (n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8]), (n[9], n[10], n[11], n[12])
        task, count = take_task(address), num_tasks(address)
        while task < count:
            _score_task(task, shape, rows, fields, addresses)
            task = take_task(address)

    return score


# By rows that share the unpacked codes, and codes of a byte
_WORKERS = {
    (rows, fields): _make_worker((0,) * rows, (0,) * fields) for rows in range(1, ROWS + 1) for fields in (1, 2, 4)
}


@torch.compiler.disable
def code_scores(
    query: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, length: int, nbits: int
) -> torch.Tensor:
    """See `ops.gather.code_scores`."""
    batch_size, num_heads, groups, head_dim = query.shape
    field_size, num_runs = codes.shape[3], -(-length // _TOKENS_PER_TASK)
    if field_size < WORDS:
        # Less than is read at once, of heads smaller than models have them
        codes = F.pad(codes, (0, WORDS - field_size))
    query, codes, scale = query.float().contiguous(), codes.contiguous(), scale.contiguous()
    scores = torch.empty((batch_size, num_heads, groups, length), dtype=torch.float32)
    shape = (batch_size, num_heads, groups, head_dim, field_size, *codes.shape[2:], length, num_runs)
    addresses = (query.data_ptr(), codes.data_ptr(), scale.data_ptr(), scores.data_ptr())
    run(_WORKERS[min(groups, ROWS), 8 // nbits], batch_size * num_heads * num_runs, (*shape, *addresses))
    return scores
