"""Building blocks of the compiled attention: a tile of packed codes becomes floats, meets queries and weights.

Compiled by Numba, which brings its own code generator: no compiler has to be on the machine. Loops are written so that
LLVM vectorizes them along the bytes or channels of a token; four rows share every state that is loaded, or eight
tokens every accumulator. Sums may be reordered; infinities stay what they are.

Legend: T tokens of a tile, R rows (queries of a group times new tokens), D head dim.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, njit
from numba.extending import intrinsic


# Without "nnan" and "ninf": masks are infinite
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "arcp", "nsz", "afn"},
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
}

_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
# A half's exponent is biased by 15, a float's by 127
_HALF_TO_FLOAT = np.float32(2.0**112)


@intrinsic
def _float_of_bits_intrinsic(typing_context: Any, bits: Any) -> Any:
    """The float32 that an int32's bits mean."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return float32(int32), generate


# What Numba makes of it takes the bits alone
_float_of_bits: Any = _float_of_bits_intrinsic


@njit(inline="always")
def half_to_float(bits: int) -> Any:
    """The value of a finite float16, given as uint16."""
    magnitude = _float_of_bits(int32((bits & 0x7FFF) << 13)) * _HALF_TO_FLOAT
    return -magnitude if bits & 0x8000 else magnitude


@njit(inline="always")
def exp(x: float) -> Any:
    """`e**x` for `x <= 0`, to a relative 5e-7; 0 below -87."""
    clamped = max(x, float32(-87.5))
    n = np.floor(clamped * _LOG2_E + float32(0.5))
    r = clamped - n * _LN_2
    polynomial = float32(1 / 720) * r + float32(1 / 120)
    for coefficient in (1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        polynomial = polynomial * r + float32(coefficient)
    return polynomial * _float_of_bits(int32((int32(n) + 127) << 23)) if x > float32(-87.0) else float32(0)


def _make_dequantize(width: int, shift: int) -> tuple[Any, Any]:
    """Functions that dequantize one plane of packed codes (legend: `ops.quantization`) of `width` bits a code."""
    per_byte, ones, weight = 8 // width, 2**width - 1, np.float32(2**shift)
    is_lowest = shift == 0

    @njit(**OPTIONS)
    def by_channel(codes: Any, first_byte: int, size: int, scale: Any, zero: Any, states: Any) -> None:
        """`scale`, `zero` `[padded D]`."""
        for i in range(per_byte):
            low, first, last = i * width, i * size, (i + 1) * size
            steps, lows = scale[first:last], zero[first:last]
            for t in range(codes.shape[0]):
                packed, row = codes[t, first_byte : first_byte + size], states[t, first:last]
                for j in range(size):
                    code = float32(int32((packed[j] >> low) & ones)) * weight
                    if is_lowest:
                        row[j] = code * steps[j] + lows[j]
                    else:
                        row[j] += code * steps[j]

    @njit(**OPTIONS)
    def by_token(codes: Any, first_byte: int, size: int, scale: Any, zero: Any, group_size: int, states: Any) -> None:
        """`scale`, `zero` `[T, groups]`."""
        for group in range(scale.shape[1]):
            start, stop = group * group_size, (group + 1) * group_size
            for i in range(per_byte):
                low = i * width
                first, last = max(start, i * size), min(stop, (i + 1) * size)
                if first >= last:
                    continue
                begin = first_byte + first - i * size
                for t in range(codes.shape[0]):
                    packed, row = codes[t, begin : begin + last - first], states[t, first:last]
                    step = half_to_float(scale[t, group]) * weight
                    base = half_to_float(zero[t, group])
                    for j in range(last - first):
                        code = float32(int32((packed[j] >> low) & ones))
                        if is_lowest:
                            row[j] = code * step + base
                        else:
                            row[j] += code * step

    return by_channel, by_token


(
    (_by_channel_2, _by_token_2),
    (_by_channel_4, _by_token_4),
    (_by_channel_8, _by_token_8),
    (_by_channel_high_bit, _by_token_high_bit),
) = (_make_dequantize(*plane) for plane in ((2, 0), (4, 0), (8, 0), (1, 2)))


@njit(**OPTIONS)
def dequantize_by_channel(codes: Any, nbits: int, head_dim: int, scale: Any, zero: Any, states: Any) -> None:
    """Dequantizes codes `[T, bytes]` into `states` `[T, padded D]`; `scale`, `zero` `[padded D]`, float32."""
    size = codes.shape[1]
    if nbits == 2:
        _by_channel_2(codes, 0, size, scale, zero, states)
    elif nbits == 3:
        low = -(-head_dim // 4)
        _by_channel_2(codes, 0, low, scale, zero, states)
        _by_channel_high_bit(codes, low, size - low, scale, zero, states)
    elif nbits == 4:
        _by_channel_4(codes, 0, size, scale, zero, states)
    else:
        _by_channel_8(codes, 0, size, scale, zero, states)


@njit(**OPTIONS)
def dequantize_by_token(codes: Any, nbits: int, head_dim: int, scale: Any, zero: Any, states: Any) -> None:
    """Dequantizes codes `[T, bytes]` into `states` `[T, padded D]`; `scale`, `zero` `[T, groups]`, float16."""
    size, group_size = codes.shape[1], head_dim // scale.shape[1]
    if nbits == 2:
        _by_token_2(codes, 0, size, scale, zero, group_size, states)
    elif nbits == 3:
        low = -(-head_dim // 4)
        _by_token_2(codes, 0, low, scale, zero, group_size, states)
        _by_token_high_bit(codes, low, size - low, scale, zero, group_size, states)
    elif nbits == 4:
        _by_token_4(codes, 0, size, scale, zero, group_size, states)
    else:
        _by_token_8(codes, 0, size, scale, zero, group_size, states)


@njit(**OPTIONS)
def dot_rows(query: Any, states: Any, scores: Any, num_tokens: int) -> None:
    """
    Adds `query states^T` to `scores`.

    Args:
        query: `[R, D]`, R being 1 or a multiple of 4.
        states: `[T, at least D]`.
        scores: `[R, T]`.
        num_tokens: tokens in use, from the first.
    """
    head_dim = query.shape[1]
    if query.shape[0] == 1:
        for t in range(num_tokens):
            total = float32(0)
            for d in range(head_dim):
                total += states[t, d] * query[0, d]
            scores[0, t] += total
        return
    for r in range(0, query.shape[0], 4):
        for t in range(num_tokens):
            total_0 = total_1 = total_2 = total_3 = float32(0)
            for d in range(head_dim):
                state = states[t, d]
                total_0 += state * query[r, d]
                total_1 += state * query[r + 1, d]
                total_2 += state * query[r + 2, d]
                total_3 += state * query[r + 3, d]
            scores[r, t] += total_0
            scores[r + 1, t] += total_1
            scores[r + 2, t] += total_2
            scores[r + 3, t] += total_3


@njit(**OPTIONS)
def accumulate_rows(weights: Any, states: Any, output: Any, num_tokens: int) -> None:
    """
    Adds `weights states` to `output`.

    Args:
        weights: `[R, T]`.
        states: `[T, at least D]`.
        output: `[R, D]`.
        num_tokens: tokens in use, from the first.
    """
    whole = num_tokens - num_tokens % 8
    for r in range(output.shape[0]):
        for t in range(0, whole, 8):
            w0, w1, w2, w3 = weights[r, t], weights[r, t + 1], weights[r, t + 2], weights[r, t + 3]
            w4, w5, w6, w7 = weights[r, t + 4], weights[r, t + 5], weights[r, t + 6], weights[r, t + 7]
            for d in range(output.shape[1]):
                early = w0 * states[t, d] + w1 * states[t + 1, d] + w2 * states[t + 2, d] + w3 * states[t + 3, d]
                late = w4 * states[t + 4, d] + w5 * states[t + 5, d] + w6 * states[t + 6, d] + w7 * states[t + 7, d]
                output[r, d] += early + late
        for t in range(whole, num_tokens):
            for d in range(output.shape[1]):
                output[r, d] += weights[r, t] * states[t, d]
