"""Scores of keys in groups of tokens: `ops.grouped_scores` on a CPU.

A group's steps go into the queries, which then are rounded to integers for it, and its minima into what is added to
all of its scores. Scores are written where the slots of the tokens are.

Products are those of `integer_products`.

Legend: M key/value heads of all items, G queries a head, R of them that share the unpacked codes, D head dim, T tokens
of a group, P bytes of a token, N slots.
"""

from array import array
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from numba import float32, njit

from .arrays import bytes_at, floats_at, halves_at, longs_at
from .integer_products import dot_words, first_channels, in_order_of_codes, round_queries, sum_lanes
from .new_arrays import zeros
from .primitives import OPTIONS, WORKER, to_floats
from .row_vectors import ROWS
from .threads import FIRST, NEXT, entry_of, num_tasks, num_threads, run_table, take_task
from .vectors import (
    LANES,
    WORDS,
    add,
    broadcast,
    columns_of_four,
    load_floats,
    multiply,
    multiply_add,
    store_floats,
)


if TYPE_CHECKING:
    from kvcache_plugins.ops.coded_tokens import KeyGroups

# Tokens whose products wait to become scores, and tokens of a task, about
_TILE = 64
_TOKENS_PER_TASK = 2048
# Where in a table addresses begin, and what belongs to a call
_CODES, _CALL = 8, 13
_column_0, _column_1, _column_2, _column_3 = columns_of_four


@njit(**OPTIONS)
def _fold_steps(
    ordered: Any, query: Any, channels: Any, steps: Any, minima: Any, rows: Any, top: int, folded: Any, lanes: Any
) -> None:
    """
    Queries in the order of the codes times a group's steps `[1, D and more]`, in `folded` `[4, M]`. In the first row
    of `lanes` `[4, 8]`, what all scores of the group begin at, if codes are counted from half of `top` on.
    """
    for r in range(len(rows)):
        sums = broadcast(float32(0))
        for number in range(channels.shape[0]):
            for half in range(0, WORDS, LANES):
                place = number * WORDS + half
                product = multiply(load_floats(ordered, r, place), load_floats(steps, 0, channels[number] + half))
                store_floats(folded, r, place, product)
                sums = add(sums, product)
        sums = multiply(sums, broadcast(float32(top) / float32(2)))
        for d in range(0, query.shape[1], LANES):
            sums = multiply_add(load_floats(query, r, d), load_floats(minima, 0, d), sums)
        store_floats(lanes, r, 0, sums)
    sum_lanes(lanes)


@njit(**OPTIONS)
def _write_row(column: Any, factor: Any, base: Any, scores: Any, row: int, slot: int) -> None:
    store_floats(scores, row, slot, multiply_add(column, broadcast(factor), broadcast(base)))


@njit(**OPTIONS)
def _write_scores(products: Any, factors: Any, bases: Any, rows: Any, slot: int, tokens: int, scores: Any) -> None:
    """Products of a tile to scores `[R, N]`, from a slot on."""
    whole = tokens - tokens % LANES
    for t in range(0, whole, LANES):
        a, b = load_floats(products, 0, t * ROWS), load_floats(products, 0, t * ROWS + LANES)
        c, d = load_floats(products, 0, t * ROWS + 2 * LANES), load_floats(products, 0, t * ROWS + 3 * LANES)
        _write_row(_column_0(a, b, c, d), factors[0], bases[0], scores, 0, slot + t)
        if len(rows) > 1:
            _write_row(_column_1(a, b, c, d), factors[1], bases[1], scores, 1, slot + t)
        if len(rows) > 2:
            _write_row(_column_2(a, b, c, d), factors[2], bases[2], scores, 2, slot + t)
        if len(rows) > 3:
            _write_row(_column_3(a, b, c, d), factors[3], bases[3], scores, 3, slot + t)
    for t in range(whole, tokens):
        for r in range(len(rows)):
            scores[r, slot + t] = products[0, t * ROWS + r] * factors[r] + bases[r]


@njit(**OPTIONS)
def _score_groups(
    query: Any, keys: Any, rows: Any, fields: Any, sizes: Any, span: Any, runs: Any, scores: Any
) -> None:
    """
    The scores of up to four queries `[R, D]` for the groups from `span[0]` up to `span[1]`.

    Args:
        keys: codes `[groups T, P]`, steps and minima `[groups, D]`.
        sizes: T, and channels of a field.
        runs: `[any, 3]`, see `KeyGroups.runs`.
        scores: `[R, N]`.
    """
    (codes, scale, zero), (group_size, field_size) = keys, sizes
    head_dim, width, top = query.shape[1], codes.shape[1], 2 ** (8 // len(fields)) - 1
    channels = first_channels(fields, field_size, width)
    ordered = in_order_of_codes(query, fields, field_size, width)
    folded, words = zeros(ROWS, ordered.shape[1]), np.empty(ordered.shape, dtype=np.int16)
    # Sixteen at a time, of which the last may be no channels
    padded = len(fields) * field_size + 2 * WORDS
    steps, minima, plain = zeros(1, padded), zeros(1, padded), zeros(ROWS, -(-head_dim // LANES) * LANES)
    for r in range(len(rows)):
        for d in range(head_dim):
            plain[r, d] = query[r, d]
    lanes, bases, factors = zeros(ROWS, LANES), np.empty(ROWS, dtype=np.float32), np.empty(ROWS, dtype=np.float32)
    offsets, products = np.empty(ROWS, dtype=np.float32), np.empty((1, _TILE * ROWS), dtype=np.float32)
    for number in range(runs.shape[0]):
        first, stop, shift = runs[number, 0], runs[number, 1], runs[number, 2]
        start = max(span[0], (first + shift) // group_size)
        for group in range(start, min(span[1], -(-(stop + shift) // group_size))):
            to_floats(scale, group, 0, head_dim, steps)
            to_floats(zero, group, 0, head_dim, minima)
            _fold_steps(ordered, plain, channels, steps, minima, rows, top, folded, lanes)
            for r in range(len(rows)):
                offsets[r] = lanes[0, r]
            round_queries(folded, rows, fields, head_dim, lanes, words, factors, bases)
            for r in range(len(rows)):
                bases[r] += offsets[r]
            last = min((group + 1) * group_size, stop + shift)
            for place in range(max(group * group_size, first + shift), last, _TILE):
                tokens = min(_TILE, last - place)
                dot_words(words, codes, rows, fields, place, tokens, products)
                _write_scores(products, factors, bases, rows, place - shift, tokens, scores)


@njit(**OPTIONS)
def _score_task(task: int, n: Any, rows: Any, fields: Any) -> None:
    """The scores of all queries of one head for some of its groups; `n` is the table of a worker."""
    num_heads, head_dim, field_size, num_groups, group_size, width, num_slots, num_parts = n[:_CODES]
    groups, query_address, score_address = n[_CALL:]
    head, part = task // num_parts, task % num_parts
    codes = bytes_at(n[_CODES], (num_heads, num_groups * group_size, width))[head]
    scale = halves_at(n[_CODES + 1], (num_heads, num_groups, head_dim))[head]
    zero = halves_at(n[_CODES + 2], (num_heads, num_groups, head_dim))[head]
    runs = longs_at(n[_CODES + 3], (n[_CODES + 4], 3))
    queries = floats_at(query_address, (num_heads, groups, head_dim))[head]
    scores = floats_at(score_address, (num_heads, groups, num_slots))[head]
    at_once = -(-_TOKENS_PER_TASK // group_size)
    span, sizes = (part * at_once, (part + 1) * at_once), (group_size, field_size)
    for row in range(0, groups, len(rows)):
        # The last ones again, where they are no multiple
        row = min(row, groups - len(rows))
        query, own = queries[row : row + len(rows)], scores[row : row + len(rows)]
        _score_groups(query, (codes, scale, zero), rows, fields, sizes, span, runs, own)


def _make_worker(rows: tuple[int, ...], fields: tuple[int, ...]) -> Any:
    """
    The worker of a table, see `threads`, for tuples whose lengths count: M, D, channels of a field, groups that there
    is room for, T, P, N and tasks of a head; addresses of codes, steps, minima and runs, and how many those are; G,
    addresses of queries and scores.
    """

    @njit(**WORKER)
    def score(address: int) -> None:
        n = longs_at(address, (FIRST + _CALL + 3,))[FIRST:]
        task, count = take_task(address), num_tasks(address)
        while task < count:
            _score_task(task, n, rows, fields)
            task = take_task(address)

    return score


# By rows that share the unpacked codes, and codes of a byte
_WORKERS = {
    (rows, fields): _make_worker((0,) * rows, (0,) * fields) for rows in range(1, ROWS + 1) for fields in (1, 2, 4)
}


class _Table:
    """The table of keys, and what it has addresses of: in a model's step all that is touched comes from memory."""

    def __init__(self, keys: "KeyGroups"):
        batch_size, num_heads, num_groups, group_size, field_size = keys.codes.shape
        # Less than is read at once, of heads smaller than models have them
        filling = max(WORDS - field_size, 0)
        self.codes = F.pad(keys.codes, (0, filling)) if filling else keys.codes.contiguous()
        self.scale, self.zero = keys.scale.contiguous(), keys.zero.contiguous()
        self.runs = np.array(keys.runs, dtype=np.int64)
        self.num_slots = keys.runs[-1][1]
        num_parts = -(-num_groups // -(-_TOKENS_PER_TASK // group_size))
        self.num_tasks = batch_size * num_heads * num_parts
        numbers = (
            *(batch_size * num_heads, keys.scale.shape[3], field_size, num_groups, group_size),
            *(self.codes.shape[4], self.num_slots, num_parts),
            *(each.data_ptr() for each in (self.codes, self.scale, self.zero)),
            *(self.runs.ctypes.data, len(self.runs)),
        )
        self.numbers = array("q", (0, self.num_tasks, *numbers, 0, 0, 0))


# Of keys that live
_TABLES: "WeakKeyDictionary[KeyGroups, _Table]" = WeakKeyDictionary()


@torch.compiler.disable
def grouped_scores(query: torch.Tensor, keys: "KeyGroups") -> torch.Tensor:
    """See `ops.grouped_scores`."""
    table = _TABLES.get(keys)
    if table is None:
        table = _TABLES[keys] = _Table(keys)
    # A name keeps alive what is handed over by address
    queries, groups = query.float().contiguous(), query.shape[2]
    scores = torch.empty((*query.shape[:3], table.num_slots), dtype=torch.float32)
    numbers = table.numbers
    numbers[NEXT] = 0
    numbers[FIRST + _CALL :] = array("q", (groups, queries.data_ptr(), scores.data_ptr()))
    run_table(entry_of(_WORKERS[min(groups, ROWS), 8 // keys.nbits]), numbers, num_threads())
    return scores
