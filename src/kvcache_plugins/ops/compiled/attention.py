"""The course of decode attention on a CPU: packed bytes go in, and nothing dense is ever in memory.

One task is a run of tiles of one key/value head and up to four of its queries; each tile is gone through once for the
scores and once for the weighted sum of the values. Tasks leave partial results of an online softmax, which are merged
with those of the exact tokens.

Float16 comes as the uint16 of its bits, which Numba can read. Legend: B batch, H key/value heads, G query heads a
key/value head, Q query tokens, R rows (`G Q`), D head dim, S partial results.
"""

from typing import Any

import numpy as np
from numba import float32, int64, njit

from kvcache_plugins.ops.outliers import OUTLIER_TILE

from .arrays import Side, floats_at, layout_at, side_at
from .calls import Call, Part, call_at, part_of
from .exact import attend_exact, end_task, partial_results
from .layout import CodeLayout
from .new_arrays import MINUS_INFINITY, filled, zeros
from .primitives import INLINED, WORKER, add_bias, add_products, softmax_tile, sum_products, to_floats
from .row_vectors import ROWS
from .tasks import queries_of, task_of
from .threads import num_tasks, take_task
from .tile import (
    Queries,
    Sums,
    accumulate_outliers,
    accumulate_values,
    load_factor,
    load_queries,
    outliers_of,
    scale_sums,
    score_by_channel,
    score_by_token,
    score_outliers,
    write_result,
)
from .vectors import LANES


@njit(**INLINED)
def _run_task(
    used: Any,
    queries: Queries,
    rows: int,
    first_row: int,
    keys: Side,
    values: Side,
    key_layout: CodeLayout,
    value_layout: CodeLayout,
    bias: Any,
    groups: int,
    num_queries: int,
    length: int,
    batch: int,
    head: int,
    tiles: Any,
    sums: Sums,
) -> None:
    """Attention of `rows` queries over the tiles from `tiles[0]` to `tiles[1]` of one head."""
    num_heads, chunk_length = keys.codes.shape[1], keys.codes.shape[3]
    key_rank, value_rank = keys.low_rank_a.shape[4], values.low_rank_a.shape[4]
    tiles_per_chunk = -(-chunk_length // OUTLIER_TILE)
    key_head = head if keys.scale.shape[1] > 1 else 0
    value_head = head if values.scale.shape[1] > 1 else 0
    width = max(OUTLIER_TILE, keys.head_dim, values.head_dim)
    floats = np.empty(
        (1, width * max(key_rank, value_rank, keys.scale.shape[4], values.scale.shape[4], 1)), np.float32
    )
    scores = zeros(1, (OUTLIER_TILE + 2) * ROWS)
    products = zeros(1, (OUTLIER_TILE + 2) * ROWS)
    decay = zeros(1, 2 * ROWS)
    for chunk in range(tiles[0] // tiles_per_chunk, -(-tiles[1] // tiles_per_chunk)):
        chunk_start, first_tile = chunk * chunk_length, chunk * tiles_per_chunk
        if chunk_start >= length:
            break
        key_codes, value_codes = keys.codes[batch, head, chunk], values.codes[batch, head, chunk]
        key_scale, key_zero = keys.scale[batch, key_head, chunk], keys.zero[batch, key_head, chunk]
        value_scale, value_zero = values.scale[batch, value_head, chunk], values.zero[batch, value_head, chunk]
        key_outliers, value_outliers = outliers_of(keys, batch, chunk), outliers_of(values, batch, chunk)
        key_factor, value_factor = keys.low_rank_a[batch, head, chunk], values.low_rank_a[batch, head, chunk]
        queries.group[0] = -1
        if key_rank > 0:
            to_floats(keys.low_rank_b[batch, head, chunk], 0, 0, keys.head_dim * key_rank, floats)
            queries.projected[:] = 0
            sum_products(floats, queries.by_channel, keys.head_dim, queries.projected)
        for tile in range(max(tiles[0] - first_tile, 0), min(tiles[1] - first_tile, tiles_per_chunk)):
            start, slot = tile * OUTLIER_TILE, tile * num_heads + head
            tokens = min(OUTLIER_TILE, chunk_length - start, length - chunk_start - start)
            if tokens <= 0:
                break
            if keys.by_channel:
                score_by_channel(
                    used, queries, rows, key_layout, key_codes, key_scale, key_zero, start, tokens, scores
                )
            else:
                score_by_token(
                    used, queries, key_layout, key_codes, key_scale, key_zero, start, tokens, products, scores
                )
            score_outliers(key_outliers, slot, keys.channel_bits, queries.by_channel, scores)
            if key_rank > 0:
                load_factor(key_factor, start - (chunk_length - key_factor.shape[0]), tokens, floats)
                add_products(floats, queries.projected, tokens, scores)
            if bias.shape[3] > 0:
                add_bias(bias, batch, head, groups, num_queries, first_row, chunk_start + start, tokens, scores)

            if softmax_tile(tokens, scores, sums.maximum, sums.total, decay):
                scale_sums(decay, sums)
            # Outliers may be those of tokens that were cut off
            scores[0, tokens * ROWS :] = 0

            accumulate_values(
                used, value_layout, value_codes, value_scale, value_zero, start, tokens, floats, products, scores, sums
            )
            accumulate_outliers(value_outliers, slot, values.channel_bits, scores, sums.by_channel)
            if value_rank > 0:
                load_factor(value_factor, start - (chunk_length - value_factor.shape[0]), tokens, floats)
                sum_products(floats, scores, tokens, sums.weighted_a)
        if value_rank > 0:
            to_floats(values.low_rank_b[batch, head, chunk], 0, 0, values.head_dim * value_rank, floats)
            add_products(floats, sums.weighted_a, values.head_dim, sums.by_channel)
            sums.weighted_a[:] = 0


@njit(**INLINED)
def _run(used: Any, number: int, call: Call, part: Part) -> None:
    """
    One task of attention over a block of compressed keys and values, as a partial result of an online softmax.

    `part.own` has the addresses of two tables, see `arrays`; scales of values have to be of tokens.
    """
    shape, key_table, value_table = call.shape, part.own[0], part.own[1]
    length, tiles_per_task, num_parts = part.span
    task = task_of(number, shape, part.span)
    output, total, maximum = partial_results(call.scratch, shape, part.first, num_parts)
    bias = floats_at(part.mask[0], part.mask[1:])
    # Made in each task: to hand a hundred arrays over to threads would take longer
    keys, values = side_at(key_table), side_at(value_table)
    key_layout, value_layout = layout_at(key_table), layout_at(value_table)
    sums = Sums(
        zeros(ROWS, value_layout.places.shape[0] * LANES),
        zeros(1, ROWS * values.head_dim),
        zeros(values.scale.shape[4], ROWS),
        zeros(values.low_rank_a.shape[4], ROWS),
        zeros(1, 2 * ROWS),
        filled(1, 2 * ROWS, MINUS_INFINITY),
    )
    tiles = (int64(task.part * tiles_per_task), int64((task.part + 1) * tiles_per_task))
    query, rank = queries_of(task, shape, call.query), keys.low_rank_a.shape[4]
    own = load_queries(query, float32(call.scale), task.rows, rank, key_layout)
    _run_task(
        used,
        own,
        task.rows,
        task.row,
        keys,
        values,
        key_layout,
        value_layout,
        bias,
        shape[2],
        shape[3],
        length,
        task.batch,
        task.head,
        tiles,
        sums,
    )
    b, h, last_row = task.batch, task.head, task.row + task.rows
    write_result(
        values,
        value_layout,
        task.rows,
        sums,
        output[task.part, b, h, task.row : last_row],
        total[task.part, b, h, task.row : last_row],
        maximum[task.part, b, h, task.row : last_row],
    )


def _make_worker(used: tuple[int, ...]) -> Any:
    """Attention over exact parts and compressed blocks: the worker of a table, see `calls` and `threads`."""

    @njit(**WORKER)
    def attend_parts(address: int) -> None:
        call, count = call_at(address), num_tasks(address)
        task = take_task(address)
        while task < count:
            number, part = part_of(task, call)
            if part.exact > 0:
                attend_exact(number, call, part)
            else:
                _run(used, number, call, part)
            end_task(address, call)
            task = take_task(address)

    return attend_parts


# By the queries that a task has at most
attend_parts = {rows: _make_worker((0,) * rows) for rows in range(1, ROWS + 1)}
