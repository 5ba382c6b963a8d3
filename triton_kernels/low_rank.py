"""Power iteration for one matrix per program, held in registers: for the small chunks that decoding compresses.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, R rank. A library's QR is a launch (or a
dozen) a step, and each step of the iteration reads the matrix again; here a matrix is read once. Products are taken
column by column in float32, since a rank of 2 to 8 would leave most of a tensor core's tile empty, and tensor cores
would round float32 to 10 bits.
"""

import torch
import triton
import triton.language as tl


MAX_RANK = 8
# A matrix padded to powers of two: 64 registers in each of 512 threads.
MAX_MATRIX_SIZE = 128 * 256
_VALUES_PER_WARP = 1024
_MAX_NUM_WARPS = 16
_EPSILON = tl.constexpr(1e-30)


@triton.jit
def _column(matrix, ranks, index):
    """Column `index` of a `[rows, R]` tile."""
    return tl.sum(tl.where(ranks[None, :] == index, matrix, 0.0), axis=1)


@triton.jit
def _orthonormalize(matrix, ranks, RANK: tl.constexpr):
    """
    Orthonormal columns by Gram-Schmidt done twice. A column that depends on those before it becomes zero.
    """
    basis = tl.zeros_like(matrix)
    for index in range(RANK):
        column = _column(matrix, ranks, index)
        norm_before = tl.sqrt(tl.sum(column * column, axis=0))
        # Columns of the basis that are yet to be filled are zero and take nothing away
        for _ in range(2):
            shares = tl.sum(basis * column[:, None], axis=0)
            column -= tl.sum(basis * shares[None, :], axis=1)
        norm = tl.sqrt(tl.sum(column * column, axis=0))
        scale = tl.where(norm > 1e-6 * norm_before, 1.0 / tl.maximum(norm, _EPSILON), 0.0)
        basis = tl.where(ranks[None, :] == index, (column * scale)[:, None], basis)
    return basis


@triton.jit
def _times(residual, b, ranks, RANK: tl.constexpr, BLOCK_L: tl.constexpr):
    """`residual @ b`: [L, R]."""
    product = tl.zeros([BLOCK_L, ranks.shape[0]], dtype=tl.float32)
    for index in range(RANK):
        column = tl.sum(residual * _column(b, ranks, index)[None, :], axis=1)
        product = tl.where(ranks[None, :] == index, column[:, None], product)
    return product


@triton.jit
def _transposed_times(residual, a, ranks, RANK: tl.constexpr, BLOCK_D: tl.constexpr):
    """`residual.T @ a`: [D, R]."""
    product = tl.zeros([BLOCK_D, ranks.shape[0]], dtype=tl.float32)
    for index in range(RANK):
        column = tl.sum(residual * _column(a, ranks, index)[:, None], axis=0)
        product = tl.where(ranks[None, :] == index, column[:, None], product)
    return product


@triton.jit
def _power_iteration_kernel(
    residual_ptr,
    start_ptr,
    a_ptr,
    b_ptr,
    num_chunks,
    num_tokens,
    num_iterations,
    residual_stride_b,
    residual_stride_h,
    residual_stride_m,
    residual_stride_l,
    residual_stride_d,
    start_stride_d,
    start_stride_r,
    HEAD_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One matrix. `a` and `b` are contiguous."""
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    tokens = tl.arange(0, BLOCK_L)
    channels = tl.arange(0, BLOCK_D)
    ranks = tl.arange(0, BLOCK_R)
    is_token = tokens < num_tokens
    is_channel = channels < HEAD_DIM
    is_rank = ranks < RANK
    residual_ptr += batch * residual_stride_b + head * residual_stride_h + chunk * residual_stride_m
    residual_offsets = tokens[:, None] * residual_stride_l + channels[None, :] * residual_stride_d
    in_residual = is_token[:, None] & is_channel[None, :]
    residual = tl.load(residual_ptr + residual_offsets, mask=in_residual, other=0.0).to(tl.float32)
    start_offsets = channels[:, None] * start_stride_d + ranks[None, :] * start_stride_r
    in_b = is_channel[:, None] & is_rank[None, :]
    b = tl.load(start_ptr + start_offsets, mask=in_b, other=0.0).to(tl.float32)
    for _ in range(num_iterations - 1):
        a = _times(residual, b, ranks, RANK, BLOCK_L)
        # Scaled so that repeated products of a large residual stay in range; directions are unchanged
        norm = tl.sqrt(tl.sum(tl.sum(a * a, axis=1), axis=0))
        b = _transposed_times(residual, a / tl.maximum(norm, _EPSILON), ranks, RANK, BLOCK_D)
    b = _orthonormalize(b, ranks, RANK)
    a = _orthonormalize(_times(residual, b, ranks, RANK, BLOCK_L), ranks, RANK)
    b = _transposed_times(residual, a, ranks, RANK, BLOCK_D)
    matrix_index = (batch * tl.num_programs(1) + head) * num_chunks + chunk
    a_offsets = (matrix_index * num_tokens + tokens[:, None]) * RANK + ranks[None, :]
    b_offsets = (matrix_index * HEAD_DIM + channels[:, None]) * RANK + ranks[None, :]
    tl.store(a_ptr + a_offsets, a, mask=is_token[:, None] & is_rank[None, :])
    tl.store(b_ptr + b_offsets, b, mask=in_b)


def power_iteration(
    residual: torch.Tensor, rank: int, num_iterations: int, start: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Approximates every matrix of `residual` by `a @ b.transpose(-1, -2)` of the given rank.

    Args:
        residual (`torch.Tensor` of shape `[L, D]` to `[B, H, M, L, D]`, floating point, any strides):
            What to approximate. L and D rounded up to powers of two multiply to at most `MAX_MATRIX_SIZE`.
        rank (`int`):
            Rank of the approximation, at most `MAX_RANK` and `min(L, D)`.
        num_iterations (`int`):
            Number of power iterations, at least 1. The factors are orthonormalized in the last one only.
        start (`torch.Tensor` of shape `[D, R]`):
            The `b` to begin with, the same for every matrix.

    Returns:
        `a` (float32, `[..., L, R]`) with orthonormal columns, and `b` (float32, `[..., D, R]`), both contiguous.
    """
    leading, (num_tokens, head_dim) = residual.shape[:-2], residual.shape[-2:]
    a = residual.new_empty(*leading, num_tokens, rank, dtype=torch.float32)
    b = residual.new_empty(*leading, head_dim, rank, dtype=torch.float32)
    block_l, block_d = triton.next_power_of_2(num_tokens), triton.next_power_of_2(head_dim)
    assert rank <= MAX_RANK and num_iterations >= 1 and len(leading) <= 3
    assert block_l * block_d <= MAX_MATRIX_SIZE
    if a.numel() == 0:
        return a, b
    matrices = residual[(None,) * (3 - len(leading))]
    batch_size, num_heads, num_chunks = matrices.shape[:3]
    num_warps = min(max(block_l * block_d // _VALUES_PER_WARP, 1), _MAX_NUM_WARPS)
    _power_iteration_kernel[(num_chunks, num_heads, batch_size)](
        matrices,
        start,
        a,
        b,
        num_chunks,
        num_tokens,
        num_iterations,
        *matrices.stride(),
        *start.stride(),
        HEAD_DIM=head_dim,
        RANK=rank,
        BLOCK_L=block_l,
        BLOCK_D=block_d,
        BLOCK_R=triton.next_power_of_2(rank),
        num_warps=num_warps,
    )
    return a, b
