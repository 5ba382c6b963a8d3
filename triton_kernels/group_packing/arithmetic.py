"""Arithmetic of chunks, operation by operation that of the plain PyTorch in `kvcache_plugins.codecs`.

Kernels that use it are compiled without fused products, which would round otherwise.
"""

import triton
import triton.language as tl

from ..arithmetic import ROUNDING


# Numbers that `ROUNDING` rounds
_LARGEST = tl.constexpr(2.0**22)
# Least divisor: a vector that is shorter has no direction
_EPSILON = tl.constexpr(1e-30)
# Steps of thresholds from token to token and from channel to channel, and share of an error that tokens share
_TOKEN_TURN, _CHANNEL_TURN = tl.constexpr(0.6180339887498949), tl.constexpr(0.7548776662466927)
_SHARED = tl.constexpr(0.25)


@triton.jit
def scale_of(low, high, poison, LEVELS: tl.constexpr):
    """Return step and minimum of groups between `low` and `high` in float16, both 0 of groups without a value."""
    low = tl.where(low == float("inf"), 0.0, low)
    high = tl.where(high == float("-inf"), 0.0, high)
    zero = (low + poison).to(tl.float16)
    extent = tl.maximum(high - zero.to(tl.float32), 0.0)
    return tl.div_rn(extent, 1.0 * LEVELS).to(tl.float16), zero


@triton.jit
def inverse_of(step):
    """Return inverses of steps, 0 of 0."""
    return tl.where(step > 0, tl.div_rn(1.0, tl.where(step > 0, step, 1.0)), 0.0)


@triton.jit
def round_even(numbers):
    """Round numbers to integers, ties to even."""
    numbers = tl.minimum(tl.maximum(numbers, -_LARGEST), _LARGEST)
    return (numbers + ROUNDING) - ROUNDING


@triton.jit
def round_by_thresholds(numbers, tokens, channels, LENGTH: tl.constexpr):
    """Round numbers up or down by thresholds of their tokens and channels."""
    turn = (LENGTH - 1 - tokens).to(tl.float32) * _TOKEN_TURN + channels.to(tl.float32) * _CHANNEL_TURN
    numbers = tl.minimum(tl.maximum(numbers, -_LARGEST), _LARGEST)
    return tl.floor(numbers + (turn - tl.floor(turn)))


@triton.jit
def share_errors(numbers, keep, SIDE: tl.constexpr):
    """Return True if tokens of a head share a large part of the errors of rounding `numbers` `[tokens, channels]`."""
    errors = tl.where(keep, round_even(numbers) - numbers, 0.0)
    count = tl.maximum(tl.sum(keep.to(tl.float32), axis=0), 1.0)
    shared = tl.div_rn(tl.sum(errors, axis=0), count)
    each = tl.div_rn(tl.sum(errors * errors, axis=0), count)
    return tl.sum(shared * shared, axis=0) > _SHARED * tl.sum(each, axis=0)


@triton.jit
def multiply_columns(matrix, columns, AXIS: tl.constexpr):
    """Multiply a matrix with vectors over its dimension `AXIS`, one by one."""
    result = ()
    for i in tl.static_range(len(columns)):
        result = result + (tl.sum(matrix * tl.expand_dims(columns[i], 1 - AXIS), axis=AXIS),)
    return result


@triton.jit
def scale_columns(columns):
    """Divide vectors by the norm of all together."""
    total = tl.sum(columns[0] * columns[0], axis=0)
    for i in tl.static_range(1, len(columns)):
        total += tl.sum(columns[i] * columns[i], axis=0)
    norm = tl.maximum(tl.sqrt_rn(total), _EPSILON)
    result = ()
    for i in tl.static_range(len(columns)):
        result = result + (tl.div_rn(columns[i], norm),)
    return result


@triton.jit
def orthonormalize(columns):
    """Make vectors orthonormal, by Gram-Schmidt done twice; one that depends on those before becomes zero."""
    basis = ()
    for i in tl.static_range(len(columns)):
        column = columns[i]
        norm_before = tl.sqrt_rn(tl.sum(column * column, axis=0))
        for _ in tl.static_range(2 if i > 0 else 0):
            projection = column * 0.0
            for j in tl.static_range(i):
                projection += basis[j] * tl.sum(basis[j] * column, axis=0)
            column = column - projection
        norm = tl.sqrt_rn(tl.sum(column * column, axis=0))
        divided = tl.div_rn(column, tl.maximum(norm, _EPSILON))
        basis = basis + (tl.where(norm > 1e-6 * norm_before, divided, 0.0),)
    return basis
