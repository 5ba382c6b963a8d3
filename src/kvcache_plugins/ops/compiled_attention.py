"""Decode attention over compressed storage on a CPU: packed bytes go in, nothing dense is ever in memory.

One task is a run of tiles of one key/value head. A tile of 64 tokens is unpacked into a scratch of a few kilobytes,
which stays in the processor's first caches while scores, the online softmax and the weighted sum follow. Scales of
channels are folded into the query once a group, scales of tokens into the scores or weights; low-rank factors are
applied on their own path (`q B` first, then `A^T`; weights times `A` first, then `B^T`), outliers where they are.

Float16 comes as the uint16 of its bits, which Numba can read. Legend: B batch, H key/value heads, R rows (queries of a
group times new tokens; 1 or a multiple of 4), D head dim, S tasks a head, T tokens of a tile.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int64, njit, prange

from .compiled_primitives import OPTIONS, accumulate_rows, dot_rows, exp, half_to_float, middle_code, unpack_codes
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
    The online softmax of one task, to be rescaled together: output `[R, D]`, weighted rows of A `[R, rank]`, weighted
    zeros `[R, groups]`, the sum of the weights and the maximum score `[R]`.
    """

    output: Any
    weighted_a: Any
    weighted_zero: Any
    total: Any
    maximum: Any


@njit(**OPTIONS)
def _fold_scale(query: Any, scale: Any, zero: Any, middle: float, scaled: Any, constant: Any) -> None:
    """`scaled = query * scale` and `constant = query (zero + middle * scale)^T` for a group; `scale`, `zero` `[D]`."""
    for r in range(query.shape[0]):
        total = float32(0)
        for d in range(query.shape[1]):
            step = half_to_float(scale[d])
            scaled[r, d] = query[r, d] * step
            total += query[r, d] * (half_to_float(zero[d]) + middle * step)
        constant[r] = total


@njit(**OPTIONS)
def _project(query: Any, factor: Any, projected: Any) -> None:
    """`projected = query factor`; `factor` `[D, rank]`."""
    projected[:] = 0
    for r in range(query.shape[0]):
        for d in range(query.shape[1]):
            for k in range(factor.shape[1]):
                projected[r, k] += query[r, d] * half_to_float(factor[d, k])


@njit(**OPTIONS)
def _score_by_channel(
    query: Any,
    states: Any,
    scale: Any,
    zero: Any,
    start: int,
    tokens: int,
    group_size: int,
    last_group: int,
    middle: float,
    work: Any,
) -> int:
    """Scores of keys whose channels share scales `[groups, D]`; returns the group that `work` holds folded in."""
    scaled, constant, scores = work
    first = 0
    while first < tokens:
        group = (start + first) // group_size
        last = min(tokens, (group + 1) * group_size - start)
        if group != last_group:
            _fold_scale(query, scale[group], zero[group], middle, scaled, constant)
            last_group = group
        for r in range(query.shape[0]):
            scores[r, first:last] = constant[r]
        dot_rows(scaled, states, scores, first, last)
        first = last
    return last_group


@njit(**OPTIONS)
def _score_by_token(
    query: Any, states: Any, scale: Any, zero: Any, tokens: int, middle: float, masked: Any, partial: Any, scores: Any
) -> None:
    """Scores of keys whose tokens have scales `[tokens, groups]`; `masked` `[R, D]` and `partial` are scratch."""
    scores[:] = 0
    group_size = query.shape[1] // scale.shape[1]
    for group in range(scale.shape[1]):
        first, last = group * group_size, (group + 1) * group_size
        masked[:], partial[:] = 0, 0
        masked[:, first:last] = query[:, first:last]
        dot_rows(masked, states, partial, 0, tokens)
        for r in range(query.shape[0]):
            constant = masked[r].sum()
            for t in range(tokens):
                step = half_to_float(scale[t, group])
                scores[r, t] += partial[r, t] * step + constant * (half_to_float(zero[t, group]) + middle * step)


@njit(**OPTIONS)
def _load_factor(factor: Any, start: int, tokens: int, rows: Any) -> None:
    """Rows `start ...` of A, of which the first may be negative and are zero, as floats `[rank, T]`."""
    for t in range(tokens):
        for k in range(rows.shape[0]):
            rows[k, t] = half_to_float(factor[start + t, k]) if start + t >= 0 else float32(0)


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
            sums.weighted_zero[r] *= decay
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
def _add_values(
    states: Any,
    scale: Any,
    zero: Any,
    tokens: int,
    middle: float,
    weights: Any,
    scaled_weights: Any,
    sums: Accumulator,
) -> None:
    """Adds the weighted sum of quantized values; `scale`, `zero` `[tokens, groups]`."""
    group_size = sums.output.shape[1] // scale.shape[1]
    steps, lows = np.empty(OUTLIER_TILE, dtype=np.float32), np.empty(OUTLIER_TILE, dtype=np.float32)
    for group in range(scale.shape[1]):
        for t in range(tokens):
            steps[t] = half_to_float(scale[t, group])
            lows[t] = half_to_float(zero[t, group]) + middle * steps[t]
        for r in range(weights.shape[0]):
            total = float32(0)
            for t in range(tokens):
                scaled_weights[r, t] = weights[r, t] * steps[t]
                total += weights[r, t] * lows[t]
            sums.weighted_zero[r, group] += total
        accumulate_rows(scaled_weights, states, sums.output, group * group_size, (group + 1) * group_size, tokens)


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
    num_rows = query.shape[0]
    tiles_per_chunk = -(-chunk_length // OUTLIER_TILE)
    key_head = head if keys.scale.shape[1] > 1 else 0
    value_head = head if values.scale.shape[1] > 1 else 0
    # Unpacked codes are padded to whole bytes
    states = np.empty((OUTLIER_TILE, max(keys.head_dim, values.head_dim) + 8), dtype=np.float32)
    scaled, constant = np.empty_like(query), np.empty(num_rows, dtype=np.float32)
    scores = np.empty((num_rows, OUTLIER_TILE), dtype=np.float32)
    scratch = np.empty((num_rows, OUTLIER_TILE), dtype=np.float32)
    projected = np.empty((num_rows, keys.low_rank_b.shape[4]), dtype=np.float32)
    key_factor = np.empty((keys.low_rank_a.shape[4], OUTLIER_TILE), dtype=np.float32)
    value_factor = np.empty((values.low_rank_a.shape[4], OUTLIER_TILE), dtype=np.float32)
    last_chunk = last_group = -1
    for tile in range(tiles[0], tiles[1]):
        chunk = tile // tiles_per_chunk
        start = (tile - chunk * tiles_per_chunk) * OUTLIER_TILE
        tokens = min(OUTLIER_TILE, chunk_length - start, length - chunk * chunk_length - start)
        if tokens <= 0:
            continue
        if chunk != last_chunk:
            if last_chunk >= 0 and value_factor.shape[0] > 0:
                _finish_chunk(values.low_rank_b[batch, head, last_chunk], sums)
            if key_factor.shape[0] > 0:
                _project(query, keys.low_rank_b[batch, head, chunk], projected)
            last_chunk, last_group = chunk, -1

        unpack_codes(keys.codes[batch, head, chunk, start : start + tokens], keys.nbits, keys.head_dim, states)
        scale, zero = keys.scale[batch, key_head, chunk], keys.zero[batch, key_head, chunk]
        if keys_by_channel:
            group_size = chunk_length // scale.shape[0]
            work = (scaled, constant, scores)
            last_group = _score_by_channel(
                query, states, scale, zero, start, tokens, group_size, last_group, middle_code(keys.nbits), work
            )
        else:
            middle = middle_code(keys.nbits)
            _score_by_token(query, states, scale[start:], zero[start:], tokens, middle, scaled, scratch, scores)
        if key_factor.shape[0] > 0:
            factor = keys.low_rank_a[batch, head, chunk]
            _load_factor(factor, start - (chunk_length - factor.shape[0]), tokens, key_factor)
            for r in range(num_rows):
                for k in range(key_factor.shape[0]):
                    weight = projected[r, k]
                    for t in range(tokens):
                        scores[r, t] += weight * key_factor[k, t]
        slot = start // OUTLIER_TILE * num_heads + head
        if keys.outlier_offsets.shape[3] > 0:
            offsets = keys.outlier_offsets[batch, 0, chunk]
            for entry in range(offsets[slot], offsets[slot + 1]):
                index = keys.outlier_indices[batch, 0, chunk, entry]
                value = half_to_float(keys.outlier_values[batch, 0, chunk, entry])
                t, d = index >> keys.channel_bits, index & ((1 << keys.channel_bits) - 1)
                for r in range(num_rows):
                    scores[r, t] += query[r, d] * value
        if bias.shape[3] > 0:
            add_bias(bias, batch, head, groups, num_queries, chunk * chunk_length + start, tokens, scores)

        softmax_tile(scores, tokens, sums)

        unpack_codes(values.codes[batch, head, chunk, start : start + tokens], values.nbits, values.head_dim, states)
        scale, zero = values.scale[batch, value_head, chunk, start:], values.zero[batch, value_head, chunk, start:]
        _add_values(states, scale, zero, tokens, middle_code(values.nbits), scores, scratch, sums)
        if value_factor.shape[0] > 0:
            factor = values.low_rank_a[batch, head, chunk]
            _load_factor(factor, start - (chunk_length - factor.shape[0]), tokens, value_factor)
            for r in range(num_rows):
                for k in range(value_factor.shape[0]):
                    total = float32(0)
                    for t in range(tokens):
                        total += scores[r, t] * value_factor[k, t]
                    sums.weighted_a[r, k] += total
        if values.outlier_offsets.shape[3] > 0:
            offsets = values.outlier_offsets[batch, 0, chunk]
            for entry in range(offsets[slot], offsets[slot + 1]):
                index = values.outlier_indices[batch, 0, chunk, entry]
                value = half_to_float(values.outlier_values[batch, 0, chunk, entry])
                t, d = index >> values.channel_bits, index & ((1 << values.channel_bits) - 1)
                for r in range(num_rows):
                    sums.output[r, d] += scores[r, t] * value
    if last_chunk >= 0 and value_factor.shape[0] > 0:
        _finish_chunk(values.low_rank_b[batch, head, last_chunk], sums)
    group_size = sums.output.shape[1] // sums.weighted_zero.shape[1]
    for r in range(num_rows):
        for d in range(sums.output.shape[1]):
            sums.output[r, d] += sums.weighted_zero[r, d // group_size]


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
            np.zeros((num_rows, values.scale.shape[4]), dtype=np.float32),
            total[part, b, h],
            maximum[part, b, h],
        )
        tiles = (int64(part * tiles_per_task), int64((part + 1) * tiles_per_task))
        _run_task(query[b, h], keys, values, keys_by_channel, bias, groups, num_queries, length, b, h, tiles, sums)
