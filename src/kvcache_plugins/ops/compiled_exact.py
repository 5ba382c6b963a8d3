"""The compiled attention over exact tokens, and the merging of partial results: what is left once the compressed parts
are attended to, without the cost of a dozen small operations of PyTorch a layer.

Legend: S partial results, B batch, H key/value heads, R rows (queries of a group times new tokens; 1 or a multiple of
4), D head dim, T tokens.
"""

from typing import Any

import numpy as np
from numba import njit

from .compiled_attention import Accumulator, add_bias, softmax_tile
from .compiled_primitives import OPTIONS, accumulate_rows, dot_rows, exp
from .outliers import OUTLIER_TILE


@njit(**OPTIONS)
def attend_exact(
    query: Any,
    keys: Any,
    values: Any,
    bias: Any,
    groups: int,
    num_queries: int,
    output: Any,
    total: Any,
    maximum: Any,
) -> None:
    """
    Attention over exact tokens, as a partial result of an online softmax.

    Args:
        query: `[B, H, R, D]`, float32, scaled.
        keys, values: `[B, H, T, D]`, float32, few tokens.
        bias: added to the scores, `[B or 1, H * groups or 1, num_queries or 1, T]`, or with no columns.
        groups, num_queries: what the rows are, as in `compiled_attention.attend_block`.
        output, total, maximum: `[B, H, R, D]` and `[B, H, R]`, float32, to be filled.
    """
    num_rows, num_tokens = query.shape[2], keys.shape[2]
    key_dim, value_dim = keys.shape[3], values.shape[3]
    states = np.empty((OUTLIER_TILE, max(key_dim, value_dim)), dtype=np.float32)
    scores = np.empty((num_rows, OUTLIER_TILE), dtype=np.float32)
    nothing = np.empty((num_rows, 0), dtype=np.float32)
    output[:], total[:], maximum[:] = 0, 0, -np.inf
    for b in range(keys.shape[0]):
        for h in range(keys.shape[1]):
            sums = Accumulator(output[b, h], nothing, total[b, h], maximum[b, h])
            for start in range(0, num_tokens, OUTLIER_TILE):
                tokens = min(OUTLIER_TILE, num_tokens - start)
                states[:tokens, :key_dim] = keys[b, h, start : start + tokens]
                scores[:] = 0
                dot_rows(query[b, h], states, scores, tokens)
                if bias.shape[3] > 0:
                    add_bias(bias, b, h, groups, num_queries, start, tokens, scores)
                softmax_tile(scores, tokens, sums)
                states[:tokens, :value_dim] = values[b, h, start : start + tokens]
                accumulate_rows(scores, states, output[b, h], tokens)


@njit(**OPTIONS)
def merge(output: Any, total: Any, maximum: Any, result: Any) -> None:
    """
    The attention output of partial results; zero where a query may attend to nothing.

    Args:
        output, total, maximum: `[S, B, H, R, D]` and `[S, B, H, R]`, float32.
        result: `[B, H, rows in use, D]`, float32, to be filled.
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
                    decay = exp(maximum[s, b, h, r] - highest)
                    weights += decay * total[s, b, h, r]
                    for d in range(result.shape[3]):
                        result[b, h, r, d] += decay * output[s, b, h, r, d]
                for d in range(result.shape[3]):
                    result[b, h, r, d] /= weights
