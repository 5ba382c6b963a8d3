"""Queries from a layer's input: its norm before their projection, their own norm and the rotary embedding behind it.

Both compute in float32 and round once; a model may round in between.

Legend: B batch, H query heads, D head dim, R channels that are rotated, C hidden size.
"""

import torch
import triton
import triton.language as tl

from ..launch import Launch


# Numbers of the norm's tile
_BLOCK_NUMBERS = 1024


@triton.jit
def rms_norm_kernel(
    states_ptr, weight_ptr, result_ptr, epsilon, SIZE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Norm the states of one sequence."""
    states_ptr += tl.program_id(0).to(tl.int64) * SIZE
    result_ptr += tl.program_id(0).to(tl.int64) * SIZE
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        places = first + tl.arange(0, BLOCK)
        states = tl.load(states_ptr + places, mask=places < SIZE, other=0.0).to(tl.float32)
        squares += states * states
    factor = tl.rsqrt(tl.sum(squares, axis=0) / SIZE + epsilon)
    for first in range(0, SIZE, BLOCK):
        places = first + tl.arange(0, BLOCK)
        states = tl.load(states_ptr + places, mask=places < SIZE, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + places, mask=places < SIZE, other=0.0).to(tl.float32) + OFFSET
        normed = states * factor * weight
        tl.store(result_ptr + places, normed.to(result_ptr.dtype.element_ty), mask=places < SIZE)


@triton.jit(do_not_specialize=["stride_b", "cosine_stride_b", "sine_stride_b"])
def rotate_kernel(
    states_ptr, stride_b, weight_ptr, epsilon, cosine_ptr, cosine_stride_b, sine_ptr, sine_stride_b, result_ptr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """
    Norm one head if there is a weight, rotate its first `ROTATED` channels, as halves that are paired, and copy the
    others.
    """
    batch, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, BLOCK)
    in_use = channels < HEAD_DIM
    is_rotated = channels < ROTATED
    is_first = channels < ROTATED // 2
    partners = tl.where(is_first, channels + ROTATED // 2, channels - ROTATED // 2)
    states_ptr += batch * stride_b + head * HEAD_DIM
    states = tl.load(states_ptr + channels, mask=in_use, other=0.0).to(tl.float32)
    others = tl.load(states_ptr + partners, mask=is_rotated, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        factor = tl.rsqrt(tl.sum(states * states, axis=0) / HEAD_DIM + epsilon)
        states *= factor * (tl.load(weight_ptr + channels, mask=in_use, other=0.0).to(tl.float32) + OFFSET)
        others *= factor * (tl.load(weight_ptr + partners, mask=is_rotated, other=0.0).to(tl.float32) + OFFSET)
    cosines = tl.load(cosine_ptr + batch * cosine_stride_b + channels, mask=is_rotated, other=1.0).to(tl.float32)
    sines = tl.load(sine_ptr + batch * sine_stride_b + channels, mask=is_rotated, other=0.0).to(tl.float32)
    rotated = states * cosines + tl.where(is_first, -others, others) * sines
    result_ptr += (batch * NUM_HEADS + head) * HEAD_DIM
    tl.store(result_ptr + channels, rotated.to(result_ptr.dtype.element_ty), mask=in_use)


def prepare_rms_norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float) -> Launch:
    """
    Prepare the launch that norms states `[B, 1, C]`, contiguous: over the root of their mean square and `epsilon`,
    times `weight` `[C]` plus `offset`.
    """
    size = weight.shape[0]
    result = torch.empty_like(states)
    block = min(triton.next_power_of_2(size), _BLOCK_NUMBERS)
    arguments = {
        "states_ptr": states,
        "weight_ptr": weight,
        "result_ptr": result,
        "epsilon": epsilon,
        "SIZE": size,
        "OFFSET": offset,
        "BLOCK": block,
    }
    return Launch(rms_norm_kernel, (states.shape[0],), arguments, {}, result)


def prepare_rotation(
    states: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    head_dim: int,
    weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    offset: float = 0.0,
) -> Launch:
    """
    Prepare the launch that rotates states `[B, 1, H * D]`, whose last dimension is contiguous, by cosines and sines
    `[B or 1, 1, R]`. The result is `[B, H, 1, D]`. With a weight `[D]` it first norms every head, see
    `prepare_rms_norm`.
    """
    batch_size, _, width = states.shape
    num_heads = width // head_dim
    result = states.new_empty(batch_size, num_heads, 1, head_dim)
    arguments = {
        "states_ptr": states,
        "stride_b": states.stride(0),
        "weight_ptr": weight,
        "epsilon": epsilon,
        "cosine_ptr": cosines,
        "cosine_stride_b": 0 if len(cosines) == 1 else cosines.stride(0),
        "sine_ptr": sines,
        "sine_stride_b": 0 if len(sines) == 1 else sines.stride(0),
        "result_ptr": result,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "ROTATED": cosines.shape[-1],
        "OFFSET": offset,
        "BLOCK": triton.next_power_of_2(head_dim),
    }
    return Launch(rotate_kernel, (batch_size, num_heads), arguments, {"num_warps": 1}, result)
