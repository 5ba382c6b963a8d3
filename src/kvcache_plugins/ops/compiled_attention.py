"""Decode attention over compressed storage on a CPU: packed bytes go in, nothing dense is ever in memory.

One task is a run of tiles of one key/value head. A tile of 64 tokens is dequantized into a scratch of a few kilobytes,
outliers and all, which stays in the processor's first caches while scores, the online softmax and the weighted sum of
all queries of the group follow. Low-rank factors go their own path: `q B` first, then `A^T`; weights times `A` first,
then `B^T`.

Float16 comes as the uint16 of its bits, which Numba can read. Legend: B batch, H key/value heads, R rows (queries of a
group times new tokens; 1 or a multiple of 4), D head dim, S tasks a head, T tokens of a tile.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64, njit, prange

from .compiled_primitives import (
    OPTIONS,
    accumulate_rows,
    dequantize_by_channel,
    dequantize_by_token,
    dot_rows,
    exp,
    half_to_float,
)
from .outliers import OUTLIER_TILE


class Side(NamedTuple):
    """Keys or values as arrays: the tensors of `CompressedStates`, empty where it has none, and three numbers."""

    codes: Any
    scale: Any
    zero: Any
    low_rank_a: Any
    low_rank_b: Any
    outlier_indices: Any
    outlier_values: Any
    outlier_offsets: Any
    nbits: int
    head_dim: int
    channel_bits: int


class Accumulator(NamedTuple):
    """
    The online softmax of one task, to be rescaled together: output `[R, D]`, weighted rows of A `[R, rank]`, the sum
    of the weights and the maximum score `[R]`.
    """

    output: Any
    weighted_a: Any
    total: Any
    maximum: Any


@njit(**OPTIONS)
def _project(query: Any, factor: Any, projected: Any) -> None:
    """`projected = query factor`; `factor` `[D, rank]`."""
    projected[:] = 0
    for r in range(query.shape[0]):
        for d in range(query.shape[1]):
            for k in range(factor.shape[1]):
                projected[r, k] += query[r, d] * half_to_float(factor[d, k])


@njit(**OPTIONS)
def _to_float(halves: Any, floats: Any) -> None:
    for i in range(halves.shape[0]):
        floats[i] = half_to_float(halves[i])


@njit(**OPTIONS)
def _dequantize_keys(
    side: Side, codes: Any, scale: Any, zero: Any, start: int, group_size: int, states: Any, channel_scale: Any
) -> None:
    """
    A tile of keys whose channels share scales `[groups, D]`, a group of tokens after the other.

    `channel_scale` `[3, padded D]` keeps the scales of the last group, its number in the last row.
    """
    first, tokens = 0, codes.shape[0]
    while first < tokens:
        group = (start + first) // group_size
        last = min(tokens, (group + 1) * group_size - start)
        if channel_scale[2, 0] != group:
            _to_float(scale[group], channel_scale[0])
            _to_float(zero[group], channel_scale[1])
            channel_scale[2, 0] = group
        part = codes[first:last]
        dequantize_by_channel(part, side.nbits, side.head_dim, channel_scale[0], channel_scale[1], states[first:last])
        first = last


@njit(**OPTIONS)
def _add_outliers(side: Side, batch: int, chunk: int, slot: int, states: Any) -> None:
    """Adds the outliers of one tile and head."""
    offsets = side.outlier_offsets[batch, 0, chunk]
    indices, values = side.outlier_indices[batch, 0, chunk], side.outlier_values[batch, 0, chunk]
    ones = (1 << side.channel_bits) - 1
    for entry in range(offsets[slot], offsets[slot + 1]):
        index = indices[entry]
        states[index >> side.channel_bits, index & ones] += half_to_float(values[entry])


@njit(**OPTIONS)
def _load_factor(factor: Any, first: int, tokens: int, scratch: Any, columns: Any) -> None:
    """
    A tile's rows of A as floats `columns` `[rank, T]`; A `[rows, rank]` begins at token `-first` if that is negative.
    """
    rank = factor.shape[1]
    missing = min(max(0, -first), tokens)
    columns[:, :missing] = 0
    _to_float(factor[first + missing : first + tokens].reshape(-1), scratch)
    for k in range(rank):
        for t in range(tokens - missing):
            columns[k, missing + t] = scratch[t * rank + k]


@njit(**OPTIONS)
def _add_key_factor(projected: Any, columns: Any, tokens: int, scores: Any) -> None:
    for r in range(projected.shape[0]):
        for k in range(projected.shape[1]):
            weight = projected[r, k]
            for t in range(tokens):
                scores[r, t] += weight * columns[k, t]


@njit(**OPTIONS)
def _add_value_factor(weights: Any, columns: Any, tokens: int, weighted: Any) -> None:
    for r in range(weighted.shape[0]):
        for k in range(weighted.shape[1]):
            total = float32(0)
            for t in range(tokens):
                total += weights[r, t] * columns[k, t]
            weighted[r, k] += total


@njit(**OPTIONS)
def add_bias(
    bias: Any, batch: int, head: int, groups: int, num_queries: int, start: int, tokens: int, scores: Any
) -> None:
    """Adds the mask's columns from `start` on to the rows that are in use."""
    for r in range(groups * num_queries):
        query_head, query = head * groups + r // num_queries, r % num_queries
        row = bias[min(batch, bias.shape[0] - 1), min(query_head, bias.shape[1] - 1), min(query, bias.shape[2] - 1)]
        for t in range(tokens):
            scores[r, t] += row[start + t]


@njit(**OPTIONS)
def softmax_tile(scores: Any, tokens: int, sums: Accumulator) -> None:
    """Turns scores into weights against the running maximum, and rescales what was accumulated if that has grown."""
    for r in range(scores.shape[0]):
        highest = sums.maximum[r]
        for t in range(tokens):
            highest = max(highest, scores[r, t])
        if highest > sums.maximum[r]:
            decay = exp(sums.maximum[r] - highest)
            sums.output[r] *= decay
            sums.weighted_a[r] *= decay
            sums.total[r] *= decay
            sums.maximum[r] = highest
        # A row that may attend to nothing so far has no maximum to subtract
        reference = highest if highest > -np.inf else float32(0)
        total = float32(0)
        for t in range(tokens):
            weight = exp(scores[r, t] - reference)
            scores[r, t] = weight
            total += weight
        sums.total[r] += total
        scores[r, tokens:] = 0


@njit(**OPTIONS)
def _finish_chunk(factor: Any, sums: Accumulator) -> None:
    """Adds `weighted_a B^T` to the output, `factor` being B `[D, rank]`, and starts anew."""
    for r in range(sums.output.shape[0]):
        for d in range(sums.output.shape[1]):
            for k in range(factor.shape[1]):
                sums.output[r, d] += sums.weighted_a[r, k] * half_to_float(factor[d, k])
    sums.weighted_a[:] = 0


@njit(**OPTIONS)
def _run_task(
    query: Any,
    keys: Side,
    values: Side,
    keys_by_channel: bool,
    bias: Any,
    groups: int,
    num_queries: int,
    length: int,
    batch: int,
    head: int,
    tiles: Any,
    sums: Accumulator,
) -> None:
    """Attention of `query` `[R, D]` over the tiles from `tiles[0]` to `tiles[1]` of one head."""
    num_heads, chunk_length = keys.codes.shape[1], keys.codes.shape[3]
    num_rows, key_dim = query.shape
    key_rank, value_rank = keys.low_rank_a.shape[4], values.low_rank_a.shape[4]
    tiles_per_chunk = -(-chunk_length // OUTLIER_TILE)
    key_head = head if keys.scale.shape[1] > 1 else 0
    value_head = head if values.scale.shape[1] > 1 else 0
    # Codes are padded to whole bytes
    padded = max(keys.head_dim, values.head_dim) + 8
    states = np.empty((OUTLIER_TILE, padded), dtype=np.float32)
    channel_scale = np.full((3, padded), -1, dtype=np.float32)
    projected = np.empty((num_rows, key_rank), dtype=np.float32)
    columns = np.empty((max(key_rank, value_rank), OUTLIER_TILE), dtype=np.float32)
    flat = np.empty(columns.size, dtype=np.float32)
    scores = np.empty((num_rows, OUTLIER_TILE), dtype=np.float32)
    last_chunk = -1
    for tile in range(tiles[0], tiles[1]):
        chunk = tile // tiles_per_chunk
        start = (tile - chunk * tiles_per_chunk) * OUTLIER_TILE
        tokens = min(OUTLIER_TILE, chunk_length - start, length - chunk * chunk_length - start)
        if tokens <= 0:
            continue
        if chunk != last_chunk:
            if last_chunk >= 0 and value_rank > 0:
                _finish_chunk(values.low_rank_b[batch, head, last_chunk], sums)
            if key_rank > 0:
                _project(query, keys.low_rank_b[batch, head, chunk], projected)
            last_chunk = chunk
            channel_scale[2, 0] = -1
        slot = start // OUTLIER_TILE * num_heads + head

        codes = keys.codes[batch, head, chunk, start : start + tokens]
        scale, zero = keys.scale[batch, key_head, chunk], keys.zero[batch, key_head, chunk]
        if keys_by_channel:
            _dequantize_keys(keys, codes, scale, zero, start, chunk_length // scale.shape[0], states, channel_scale)
        else:
            dequantize_by_token(codes, keys.nbits, key_dim, scale[start:], zero[start:], states)
        if keys.outlier_offsets.shape[3] > 0:
            _add_outliers(keys, batch, chunk, slot, states)
        scores[:] = 0
        dot_rows(query, states, scores, tokens)
        if key_rank > 0:
            factor = keys.low_rank_a[batch, head, chunk]
            _load_factor(factor, start - (chunk_length - factor.shape[0]), tokens, flat, columns)
            _add_key_factor(projected, columns, tokens, scores)
        if bias.shape[3] > 0:
            add_bias(bias, batch, head, groups, num_queries, chunk * chunk_length + start, tokens, scores)

        softmax_tile(scores, tokens, sums)

        codes = values.codes[batch, head, chunk, start : start + tokens]
        scale, zero = values.scale[batch, value_head, chunk, start:], values.zero[batch, value_head, chunk, start:]
        dequantize_by_token(codes, values.nbits, values.head_dim, scale, zero, states)
        if values.outlier_offsets.shape[3] > 0:
            _add_outliers(values, batch, chunk, slot, states)
        accumulate_rows(scores, states, sums.output, tokens)
        if value_rank > 0:
            factor = values.low_rank_a[batch, head, chunk]
            _load_factor(factor, start - (chunk_length - factor.shape[0]), tokens, flat, columns)
            _add_value_factor(scores, columns, tokens, sums.weighted_a)
    if last_chunk >= 0 and value_rank > 0:
        _finish_chunk(values.low_rank_b[batch, head, last_chunk], sums)


@njit(parallel=True, **OPTIONS)
def attend_block(
    query: Any,
    keys: Side,
    values: Side,
    keys_by_channel: bool,
    bias: Any,
    groups: int,
    num_queries: int,
    length: int,
    tiles_per_task: int,
    output: Any,
    total: Any,
    maximum: Any,
) -> None:
    """
    Attention over one block of compressed keys and values, as partial results of an online softmax.

    Args:
        query: `[B, H, R, D]`, float32, scaled.
        keys, values: the block; scales of values have to be of tokens.
        keys_by_channel: whether scales of keys are of channels.
        bias: added to the scores, `[B or 1, H * groups or 1, num_queries or 1, length]`, or with no columns.
        groups, num_queries: what the rows are: row `g * num_queries + q`; rows beyond are padding.
        length: tokens in use.
        tiles_per_task: tiles of one task.
        output: `[S, B, H, R, D]`, float32, to be filled: the weighted sum of the values of each task.
        total, maximum: `[S, B, H, R]`, float32, to be filled: sum of the weights and maximum score.
    """
    num_tasks, batch_size, num_heads = output.shape[0], output.shape[1], output.shape[2]
    for task in prange(batch_size * num_heads * num_tasks):
        item, part = task // num_tasks, task % num_tasks
        b, h = item // num_heads, item % num_heads
        num_rows = query.shape[2]
        output[part, b, h] = 0
        total[part, b, h] = 0
        maximum[part, b, h] = -np.inf
        sums = Accumulator(
            output[part, b, h],
            np.zeros((num_rows, values.low_rank_a.shape[4]), dtype=np.float32),
            total[part, b, h],
            maximum[part, b, h],
        )
        tiles = (int64(part * tiles_per_task), int64((part + 1) * tiles_per_task))
        _run_task(query[b, h], keys, values, keys_by_channel, bias, groups, num_queries, length, b, h, tiles, sums)
