"""The compiled attention over exact tokens, and the merging of partial results: what is left once the compressed parts
are attended to, without the cost of a dozen small operations of PyTorch a layer.

Legend: S partial results, B batch, H key/value heads, R rows (queries of a group times new tokens), D head dim, T
tokens.
"""

from typing import Any

import numpy as np
from numba import njit

from kvcache_plugins.ops.outliers import OUTLIER_TILE

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
def attend_exact(
    query: Any, scale: float, keys: Any, values: Any, length: int, bias: Any, output: Any, total: Any, maximum: Any
) -> None:
    """
    Attention over exact tokens, as a partial result of an online softmax.

    Args:
        query: `[B, H * G, Q, D]`, float32, contiguous.
        scale: factor of the scores.
        keys, values: `[B, H, at least T, D]`, float32.
        length: tokens in use, T; few.
        bias: added to the scores, `[B or 1, H * G or 1, Q or 1, T]`, or with no columns.
        output, total, maximum: `[B, H, R, D]` and `[B, H, R]`, float32, to be filled.
    """
    num_heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    groups, num_queries, num_rows = query.shape[1] // num_heads, query.shape[2], total.shape[2]
    key_states = np.zeros((OUTLIER_TILE + 1, _padded(key_dim)), dtype=np.float32)
    value_states = np.zeros((OUTLIER_TILE + 1, _padded(value_dim)), dtype=np.float32)
    rows = np.zeros((ROWS, key_states.shape[1]), dtype=np.float32)
    sums = np.zeros((ROWS, value_states.shape[1]), dtype=np.float32)
    scores = np.zeros((1, (OUTLIER_TILE + 2) * ROWS), dtype=np.float32)
    own_total = np.zeros((1, 2 * ROWS), dtype=np.float32)
    own_maximum = np.zeros((1, 2 * ROWS), dtype=np.float32)
    decay = np.zeros((1, 2 * ROWS), dtype=np.float32)
    for b in range(keys.shape[0]):
        for h in range(num_heads):
            group = query[b, h * groups : (h + 1) * groups].reshape(num_rows, key_dim)
            for row in range(0, num_rows, ROWS):
                last_row = min(row + ROWS, num_rows)
                rows[:] = 0
                rows[: last_row - row, :key_dim] = group[row:last_row] * np.float32(scale)
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
def merge(output: Any, total: Any, maximum: Any, result: Any) -> None:
    """
    The attention output of partial results; zero where a query may attend to nothing.

    Args:
        output, total, maximum: `[S, B, H, R, D]` and `[S, B, H, R]`, float32.
        result: `[B, H, R, D]`, float32, to be filled.
    """
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
