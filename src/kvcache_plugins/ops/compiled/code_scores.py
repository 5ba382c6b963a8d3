"""Scores of tokens of which only codes and a scale are at hand: `ops.gather.code_scores` on a CPU.

Products are those of `integer_products`.

Legend: B batch, H key/value heads, G queries a head, R of them that share the unpacked codes, D head dim, T tokens, N
bytes of a token.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit

from .arrays import bytes_at, floats_at, halves_at, longs_at
from .integer_products import dot_words, in_order_of_codes, round_queries
from .new_arrays import zeros
from .primitives import OPTIONS, WORKER
from .row_vectors import ROWS
from .threads import FIRST, num_tasks, run, take_task
from .vectors import (
    LANES,
    WORDS,
    broadcast,
    columns_of_four,
    float_of_half,
    load_floats,
    load_halves,
    multiply,
    multiply_add,
    store_floats,
)


# Tokens whose scores wait to be scaled, and tokens of a task
_TILE = 64
_TOKENS_PER_TASK = 2048
_column_0, _column_1, _column_2, _column_3 = columns_of_four


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
    factors, bases = np.empty(ROWS, dtype=np.float32), np.empty(ROWS, dtype=np.float32)
    lanes = zeros(ROWS, LANES)
    for row in range(0, groups, len(rows)):
        # The last ones again, where they are no multiple
        row = min(row, groups - len(rows))
        ordered = in_order_of_codes(queries[row : row + len(rows)], fields, field_size, width)
        words = np.empty(ordered.shape, dtype=np.int16)
        round_queries(ordered, rows, fields, head_dim, lanes, words, factors, bases)
        own = scores[row : row + len(rows)]
        for first in range(start, stop, _TILE):
            tokens = min(_TILE, stop - first)
            dot_words(words, codes, rows, fields, first, tokens, products)
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
