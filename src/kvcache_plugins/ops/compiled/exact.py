"""The compiled attention over exact tokens, and the merging of partial results: what is left once the compressed parts
are attended to, without the cost of a dozen small operations of PyTorch a layer.

Legend: S partial results, B batch, H key/value heads, R rows (queries of a group times new tokens), D head dim, T
tokens.
"""

from typing import Any

import numpy as np
from numba import njit

from kvcache_plugins.ops.outliers import OUTLIER_TILE

from .arrays import floats_at
from .primitives import (
    OPTIONS,
    ROWS,
    accumulate_states,
    add_bias,
    dot_states,
    scale_rows,
    softmax_tile,
)
from .vectors import LANES


@njit(**OPTIONS)
def _padded(size: int) -> int:
    return -(-size // LANES) * LANES


@njit(**OPTIONS)
def partial_results(scratch: int, shape: Any, first: int, count: int) -> Any:
    """
    Some of the partial results that are kept at an address.

    Args:
        scratch: address of `B H G Q (head dim of values + 2)` float32 for every partial result.
        shape: B, H, G, Q, D, head dim of values, and partial results in all.
        first, count: which ones.

    Returns:
        The weighted sum of the values `[count, B, H, R, head dim of values]`, the sum of the weights and the maximum
        score `[count, B, H, R]`.
    """
    batch_size, num_heads, groups, num_queries, _, value_dim, num_results = shape
    dims = (count, batch_size, num_heads, groups * num_queries)
    size = 4 * batch_size * num_heads * groups * num_queries
    total = floats_at(scratch + first * size, dims)
    maximum = floats_at(scratch + (num_results + first) * size, dims)
    output = floats_at(scratch + (2 * num_results + first * value_dim) * size, (*dims, value_dim))
    return output, total, maximum


@njit(**OPTIONS)
def attend_exact(
    shape: Any,
    scale: float,
    query: int,
    key_address: int,
    value_address: int,
    mask: Any,
    capacity: int,
    length: int,
    first: int,
    scratch: int,
) -> None:
    """
    Attention over exact tokens, as a partial result of an online softmax.

    Everything comes by address, see `arrays`.

    Args:
        shape, scale, query, mask, first, scratch: as in `attention.attend_block`.
        key_address, value_address: `[B, H, capacity, D]`, float32.
        length: tokens in use; few.
    """
    batch_size, num_heads, groups, num_queries, key_dim, value_dim, _ = shape
    num_rows = groups * num_queries
    queries = floats_at(query, (batch_size, num_heads, num_rows, key_dim))
    keys = floats_at(key_address, (batch_size, num_heads, capacity, key_dim))
    values = floats_at(value_address, (batch_size, num_heads, capacity, value_dim))
    bias = floats_at(mask[0], mask[1:])
    outputs, totals, maxima = partial_results(scratch, shape, first, 1)
    output, total, maximum = outputs[0], totals[0], maxima[0]
    key_states = np.zeros((OUTLIER_TILE + 1, _padded(key_dim)), dtype=np.float32)
    value_states = np.zeros((OUTLIER_TILE + 1, _padded(value_dim)), dtype=np.float32)
    rows = np.zeros((ROWS, key_states.shape[1]), dtype=np.float32)
    sums = np.zeros((ROWS, value_states.shape[1]), dtype=np.float32)
    scores = np.zeros((1, (OUTLIER_TILE + 2) * ROWS), dtype=np.float32)
    own_total = np.zeros((1, 2 * ROWS), dtype=np.float32)
    own_maximum = np.zeros((1, 2 * ROWS), dtype=np.float32)
    decay = np.zeros((1, 2 * ROWS), dtype=np.float32)
    for b in range(batch_size):
        for h in range(num_heads):
            for row in range(0, num_rows, ROWS):
                last_row = min(row + ROWS, num_rows)
                rows[:] = 0
                rows[: last_row - row, :key_dim] = queries[b, h, row:last_row] * np.float32(scale)
                sums[:], own_total[:], own_maximum[:] = 0, 0, -np.inf
                for start in range(0, length, OUTLIER_TILE):
                    tokens = min(OUTLIER_TILE, length - start)
                    key_states[:tokens, :key_dim] = keys[b, h, start : start + tokens]
                    value_states[:tokens, :value_dim] = values[b, h, start : start + tokens]
                    dot_states(rows, key_states, tokens, scores)
                    if bias.shape[3] > 0:
                        add_bias(bias, b, h, groups, num_queries, row, start, tokens, scores)
                    if softmax_tile(tokens, scores, own_maximum, own_total, decay):
                        scale_rows(decay, sums)
                    accumulate_states(scores, value_states, tokens, sums)
                for r in range(last_row - row):
                    output[b, h, row + r] = sums[r, :value_dim]
                    total[b, h, row + r] = own_total[0, r] + own_total[0, r + ROWS]
                    maximum[b, h, row + r] = own_maximum[0, r]


@njit(**OPTIONS)
def merge(shape: Any, scratch: int, result_address: int) -> None:
    """
    The attention output of partial results; zero where a query may attend to nothing.

    Args:
        shape, scratch: as in `partial_results`.
        result_address: `[B, H * G, Q, head dim of values]`, float32, to be filled.
    """
    batch_size, num_heads, groups, num_queries, _, value_dim, num_results = shape
    output, total, maximum = partial_results(scratch, shape, 0, num_results)
    result = floats_at(result_address, (batch_size, num_heads, groups * num_queries, value_dim))
    for b in range(result.shape[0]):
        for h in range(result.shape[1]):
            for r in range(result.shape[2]):
                highest = maximum[:, b, h, r].max()
                result[b, h, r] = 0
                if highest == -np.inf:
                    continue
                weights = np.float32(0)
                for s in range(output.shape[0]):
                    decay = np.float32(np.exp(maximum[s, b, h, r] - highest))
                    weights += decay * total[s, b, h, r]
                    for d in range(result.shape[3]):
                        result[b, h, r, d] += decay * output[s, b, h, r, d]
                for d in range(result.shape[3]):
                    result[b, h, r, d] /= weights
