"""Power iteration, one matrix per program, for the small chunks that decoding compresses.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, R rank. A library's QR is a launch (or a
dozen) a step; here all steps are one launch. Both factors live in their outputs, and for each product the matrix is
read in tiles from the GPU's cache; held in registers as a whole, matrices from 100 x 80 on spilled. Rounded copies of
the factors are made in the same launch.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from .factors import load_factor, multiply, orthonormalize, replace_factor, store_rounded


MAX_RANK = 16
MAX_SIDE = 256
# Rank is padded to what a tensor core takes at least.
_BLOCK_R = 16
_BLOCK = 64
_CHUNK_LENGTH = 64
_EPSILON = tl.constexpr(1e-30)


# What differs from prompt to prompt: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = ["num_chunks", "num_tokens", "num_iterations"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _power_iteration_kernel(
    residual_ptr,
    keep_ptr,
    start_ptr,
    a_ptr,
    b_ptr,
    rounded_a_ptr,
    rounded_b_ptr,
    exceeded_ptr,
    num_chunks,
    num_tokens,
    num_iterations,
    residual_stride_b,
    residual_stride_h,
    residual_stride_m,
    residual_stride_l,
    residual_stride_d,
    keep_stride_b,
    keep_stride_h,
    keep_stride_m,
    keep_stride_l,
    keep_stride_d,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    ROUNDS: tl.constexpr,
    REPORTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALL_TOKENS: tl.constexpr,
    ALL_CHANNELS: tl.constexpr,
):
    """One matrix. The start and all factors are contiguous."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    matrix_index = (batch * tl.num_programs(1) + head) * num_chunks + chunk
    residual_ptr += batch * residual_stride_b + head * residual_stride_h + chunk * residual_stride_m
    a_ptr += matrix_index * num_tokens * RANK
    b_ptr += matrix_index * HEAD_DIM * RANK
    if HAS_KEEP:
        keep_ptr += batch * keep_stride_b + head * keep_stride_h + chunk * keep_stride_m
    stride_l, stride_d = residual_stride_l, residual_stride_d
    tokens = tl.arange(0, ALL_TOKENS)
    channels = tl.arange(0, ALL_CHANNELS)
    ranks = tl.arange(0, BLOCK_R)
    start = load_factor(start_ptr, channels, ranks, HEAD_DIM, RANK)
    replace_factor(b_ptr, channels, ranks, HEAD_DIM, RANK, start)
    for iteration in range(num_iterations):
        is_last = iteration == num_iterations - 1
        if is_last:
            b = load_factor(b_ptr, channels, ranks, HEAD_DIM, RANK)
            replace_factor(b_ptr, channels, ranks, HEAD_DIM, RANK, orthonormalize(b, ranks, RANK))
        # fmt: off
        multiply(residual_ptr, keep_ptr, b_ptr, a_ptr, num_tokens, HEAD_DIM, stride_l, stride_d,
                  keep_stride_l, keep_stride_d, HAS_KEEP, RANK, BLOCK, BLOCK_C, BLOCK_R)
        # fmt: on
        a = load_factor(a_ptr, tokens, ranks, num_tokens, RANK)
        if is_last:
            a = orthonormalize(a, ranks, RANK)
        else:
            # Scaled so that repeated products of a large residual stay in range; directions are unchanged
            a = a / tl.maximum(tl.sqrt(tl.sum(tl.sum(a * a, axis=1), axis=0)), _EPSILON)
        replace_factor(a_ptr, tokens, ranks, num_tokens, RANK, a)
        # fmt: off
        multiply(residual_ptr, keep_ptr, a_ptr, b_ptr, HEAD_DIM, num_tokens, stride_d, stride_l,
                  keep_stride_d, keep_stride_l, HAS_KEEP, RANK, BLOCK, BLOCK_C, BLOCK_R)
        # fmt: on
    if ROUNDS:
        a = load_factor(a_ptr, tokens, ranks, num_tokens, RANK)
        b = load_factor(b_ptr, channels, ranks, HEAD_DIM, RANK)
        rounded_a_ptr += matrix_index * num_tokens * RANK
        rounded_b_ptr += matrix_index * HEAD_DIM * RANK
        exceeds = store_rounded(rounded_a_ptr, tokens, ranks, num_tokens, RANK, a)
        exceeds |= store_rounded(rounded_b_ptr, channels, ranks, HEAD_DIM, RANK, b)
        if REPORTS:
            tl.store(exceeded_ptr, 1, mask=exceeds > 0)


def power_iteration(
    residual: torch.Tensor,
    rank: int,
    num_iterations: int,
    start: torch.Tensor,
    keep: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    exceeded: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Approximates every matrix of `residual` by `a @ b.transpose(-1, -2)` of the given rank.

    Args:
        residual (`torch.Tensor` of shape `[L, D]` to `[B, H, M, L, D]`, floating point, any strides):
            What to approximate. L and D are at most `MAX_SIDE`.
        rank (`int`):
            Rank of the approximation, at most `MAX_RANK` and `min(L, D)`.
        num_iterations (`int`):
            Number of power iterations, at least 1. The factors are orthonormalized in the last one only.
        start (`torch.Tensor` of shape `[D, R]`, float32, contiguous):
            The `b` to begin with, the same for every matrix.
        keep (`torch.Tensor` broadcastable to the residual, bool, *optional*):
            Where the residual is not taken for zero.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            What the factors are returned in; they are computed in float32.
        exceeded (`torch.Tensor` of shape `[1]`, int32, *optional*):
            Set to 1 if a factor rounded to another dtype than float32 is not finite.

    Returns:
        `a` (`[..., L, R]`) with orthonormal columns, and `b` (`[..., D, R]`), both contiguous.
    """
    leading, (num_tokens, head_dim) = residual.shape[:-2], residual.shape[-2:]
    assert rank <= MAX_RANK and max(num_tokens, head_dim) <= MAX_SIDE and num_iterations >= 1 and len(leading) <= 3
    a = residual.new_empty(*leading, num_tokens, rank, dtype=torch.float32)
    b = residual.new_empty(*leading, head_dim, rank, dtype=torch.float32)
    rounds = dtype != torch.float32
    rounded_a, rounded_b = (torch.empty_like(factor, dtype=dtype) if rounds else factor for factor in (a, b))
    if a.numel() == 0:
        return rounded_a, rounded_b
    padding = (None,) * (3 - len(leading))
    keep_strides: tuple[int, ...] = (0,) * 5
    if keep is not None:
        keep = keep.expand_as(residual)[padding]
        keep_strides = keep.stride()
    matrices = residual[padding]
    batch_size, num_heads, num_chunks = matrices.shape[:3]
    # Chunks of all usual lengths share a kernel
    all_tokens = _CHUNK_LENGTH if num_tokens <= _CHUNK_LENGTH else MAX_SIDE
    all_channels = triton.next_power_of_2(head_dim)
    _power_iteration_kernel[(num_chunks, num_heads, batch_size)](
        matrices,
        keep,
        start,
        a,
        b,
        rounded_a,
        rounded_b,
        exceeded,
        num_chunks,
        num_tokens,
        num_iterations,
        *matrices.stride(),
        *keep_strides,
        HEAD_DIM=head_dim,
        RANK=rank,
        HAS_KEEP=keep is not None,
        ROUNDS=rounds,
        REPORTS=exceeded is not None,
        BLOCK=_BLOCK,
        # The compiler spills a few registers of small matrices with wide tiles, and of large ones with narrow ones
        BLOCK_C=_BLOCK // 2 if max(all_tokens, all_channels) <= 128 else _BLOCK,
        BLOCK_R=_BLOCK_R,
        ALL_TOKENS=all_tokens,
        ALL_CHANNELS=all_channels,
        # No loads ahead of their turn: the factors that a product reads are what the one before it has written
        num_stages=1,
    )
    return rounded_a, rounded_b
