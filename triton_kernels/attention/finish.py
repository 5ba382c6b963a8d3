"""Partial results of coded values as those of states: sums are multiplied by a matrix, and a mean is added.

Values may be coded in a basis of each head, rotated, or less a mean. Attention sums what their codes stand for, and
this launch makes sums of states of that. A program takes some rows and channels of one head.

Legend: B batch, H key/value heads, N splits times rows, K numbers of a coded token, E channels of a value.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..arithmetic import block_size, dot_exact
from ..launch import OPTIONS, Launch
from .partials import Partials


_BLOCK_ROWS, _BLOCK_NUMBERS, _MOST_BLOCK_CHANNELS = 16, 32, 64
# Halves that a product of float32 sums is made of
_NUM_PARTS = 2


class Finish(NamedTuple):
    """
    The way from sums of coded numbers `[K]` to sums of states `[E]`: `(sums * steps) @ matrix * scale / factors`, and
    the mean times the sum of weights.

    Args:
        matrix (`torch.Tensor` of shape `[H or 1, at least K, at least E]`, int8, *optional*): by default the sums are
            used as they are.
        steps, factors (`torch.Tensor` of shape `[H, at least K]` and `[H, E]`, float32, *optional*): 1 by default.
        scale (`float`, *optional*, defaults to 1).
        mean (`torch.Tensor` of shape `[B or 1, H, E]`, *optional*): 0 by default.
    """

    matrix: torch.Tensor | None = None
    steps: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    scale: float = 1.0
    mean: torch.Tensor | None = None


@triton.jit(do_not_specialize=["num_heads", "num_rows", "mean_stride_b"])
def finish_kernel(
    sums_ptr, total_ptr, result_ptr, matrix_ptr, matrix_stride_h, matrix_stride_k, step_ptr, step_stride_h, factor_ptr,
    mean_ptr, mean_stride_b, num_heads, num_rows, scale, SUMMED: tl.constexpr, DIM: tl.constexpr,
    MATRIX: tl.constexpr, SCALED: tl.constexpr, MEAN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Finish some rows and channels of one head."""
    state = tl.program_id(0).to(tl.int64)
    head = state % num_heads
    rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    channels = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    row_in_use, channel_in_use = rows < num_rows, channels < DIM
    places = state * num_rows + rows
    in_use = row_in_use[:, None] & channel_in_use[None, :]
    if MATRIX:
        result = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for first in range(0, SUMMED, BLOCK_K):
            numbers = first + tl.arange(0, BLOCK_K)
            is_number = numbers < SUMMED
            sums = tl.load(
                sums_ptr + places[:, None] * SUMMED + numbers[None, :],
                mask=row_in_use[:, None] & is_number[None, :],
                other=0.0,
            )
            if SCALED:
                sums *= tl.load(step_ptr + head * step_stride_h + numbers, mask=is_number, other=0.0)[None, :]
            coefficients = tl.load(
                matrix_ptr + head * matrix_stride_h + numbers[:, None] * matrix_stride_k + channels[None, :],
                mask=is_number[:, None] & channel_in_use[None, :],
                other=0,
            )
            result += dot_exact(sums, coefficients.to(tl.float16), PARTS)
        result *= scale
        if SCALED:
            result /= tl.load(factor_ptr + head * DIM + channels, mask=channel_in_use, other=1.0)[None, :]
    else:
        result = tl.load(sums_ptr + places[:, None] * SUMMED + channels[None, :], mask=in_use, other=0.0)
    if MEAN:
        mean_ptr += state // num_heads * mean_stride_b + head * DIM
        mean = tl.load(mean_ptr + channels, mask=channel_in_use, other=0.0).to(tl.float32)
        result += tl.load(total_ptr + places, mask=row_in_use, other=0.0)[:, None] * mean[None, :]
    tl.store(result_ptr + places[:, None] * DIM + channels[None, :], result, mask=in_use)


def prepare_finish(partials: Partials, finish: Finish, value_dim: int) -> Launch:
    """
    Prepare the launch that makes partial results of states, `[B, H, splits, rows, value_dim]`, of those of coded
    numbers, `[B, H, splits, rows, K]`.
    """
    batch_size, num_heads, num_splits, num_queries, num_summed = partials.output.shape
    matrix, steps, factors, scale, mean = finish
    num_rows = num_splits * num_queries
    result = partials.output.new_empty(*partials.output.shape[:4], value_dim)
    block_channels = min(_MOST_BLOCK_CHANNELS, block_size(value_dim))
    is_shared = matrix is not None and len(matrix) == 1
    assert (steps is None) == (factors is None), "both or none scale"
    arguments: dict[str, Any] = {
        "sums_ptr": partials.output,
        "total_ptr": partials.total,
        "result_ptr": result,
        "matrix_ptr": matrix,
        "matrix_stride_h": 0 if matrix is None or is_shared else matrix.stride(0),
        "matrix_stride_k": 0 if matrix is None else matrix.stride(1),
        "step_ptr": steps,
        "step_stride_h": 0 if steps is None else steps.stride(0),
        "factor_ptr": None if factors is None else factors.contiguous(),
        "mean_ptr": None if mean is None else mean.contiguous(),
        "mean_stride_b": 0 if mean is None or len(mean) == 1 else num_heads * value_dim,
        "num_heads": num_heads,
        "num_rows": num_rows,
        "scale": scale,
        "SUMMED": num_summed,
        "DIM": value_dim,
        "MATRIX": matrix is not None,
        "SCALED": steps is not None,
        "MEAN": mean is not None,
        "BLOCK_R": _BLOCK_ROWS,
        "BLOCK_K": _BLOCK_NUMBERS,
        "BLOCK_D": block_channels,
        "PARTS": _NUM_PARTS,
    }
    grid = (batch_size * num_heads, triton.cdiv(num_rows, _BLOCK_ROWS), triton.cdiv(value_dim, block_channels))
    options = {**OPTIONS, "num_warps": 4, "num_stages": 1}
    return Launch(finish_kernel, grid, arguments, options, partials._replace(output=result))
