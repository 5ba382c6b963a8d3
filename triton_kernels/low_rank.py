"""Power iteration, one matrix per program, for the small chunks that decoding compresses.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, R rank. A library's QR is a launch (or a
dozen) a step; here all steps are one launch. Both factors live in their outputs, and for each product the matrix is
read in tiles from the GPU's cache; held in registers as a whole, matrices from 100 x 80 on spilled. Products are of
three TF32 terms each, which keeps nearly float32's precision. Rounded copies of the factors are made in the same
launch.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl


MAX_RANK = 16
MAX_SIDE = 256
# Rank is padded to what a tensor core takes at least.
_BLOCK_R = 16
_BLOCK = 64
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
def _load_factor(factor_ptr, rows, ranks, num_rows, RANK: tl.constexpr):
    """Rows of a contiguous `[num_rows, R]`, zeros past its end."""
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    return tl.load(factor_ptr + rows[:, None] * RANK + ranks[None, :], mask=in_factor, other=0.0)


@triton.jit
def _replace_factor(factor_ptr, rows, ranks, num_rows, RANK: tl.constexpr, factor):
    """Stores all rows, after every thread has read the old ones and before any reads the new ones."""
    tl.debug_barrier()
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    tl.store(factor_ptr + rows[:, None] * RANK + ranks[None, :], factor, mask=in_factor)
    tl.debug_barrier()


@triton.jit
def _multiply(
    matrix_ptr,
    keep_ptr,
    factor_ptr,
    product_ptr,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    keep_row_stride,
    keep_column_stride,
    HAS_KEEP: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Stores `matrix @ factor`; a barrier before what reads it is the caller's."""
    ranks = tl.arange(0, BLOCK_R)
    for first_row in range(0, num_rows, BLOCK):
        rows = first_row + tl.arange(0, BLOCK)
        product = tl.zeros([BLOCK, BLOCK_R], dtype=tl.float32)
        for first_column in range(0, num_columns, BLOCK_C):
            columns = first_column + tl.arange(0, BLOCK_C)
            in_matrix = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
            if HAS_KEEP:
                keep_offsets = rows[:, None] * keep_row_stride + columns[None, :] * keep_column_stride
                in_matrix = tl.load(keep_ptr + keep_offsets, mask=in_matrix, other=0) != 0
            offsets = rows[:, None] * row_stride + columns[None, :] * column_stride
            tile = tl.load(matrix_ptr + offsets, mask=in_matrix, other=0.0).to(tl.float32)
            factor = _load_factor(factor_ptr, columns, ranks, num_columns, RANK)
            product = tl.dot(tile, factor, product, input_precision="tf32x3")
        in_product = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
        tl.store(product_ptr + rows[:, None] * RANK + ranks[None, :], product, mask=in_product)
    tl.debug_barrier()


@triton.jit
def _store_rounded(rounded_ptr, rows, ranks, num_rows, RANK: tl.constexpr, factor):
    """Stores a factor in the type of the pointer, and returns 1 if something of it does not fit that."""
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    rounded = factor.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + rows[:, None] * RANK + ranks[None, :], rounded, mask=in_factor)
    poison = rounded.to(tl.float32) * 0.0
    return tl.max(tl.max((poison != poison).to(tl.int32), axis=1), axis=0)


@triton.jit
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
    start = _load_factor(start_ptr, channels, ranks, HEAD_DIM, RANK)
    _replace_factor(b_ptr, channels, ranks, HEAD_DIM, RANK, start)
    for iteration in range(num_iterations):
        is_last = iteration == num_iterations - 1
        if is_last:
            b = _load_factor(b_ptr, channels, ranks, HEAD_DIM, RANK)
            _replace_factor(b_ptr, channels, ranks, HEAD_DIM, RANK, _orthonormalize(b, ranks, RANK))
        # fmt: off
        _multiply(residual_ptr, keep_ptr, b_ptr, a_ptr, num_tokens, HEAD_DIM, stride_l, stride_d,
                  keep_stride_l, keep_stride_d, HAS_KEEP, RANK, BLOCK, BLOCK_C, BLOCK_R)
        # fmt: on
        a = _load_factor(a_ptr, tokens, ranks, num_tokens, RANK)
        if is_last:
            a = _orthonormalize(a, ranks, RANK)
        else:
            # Scaled so that repeated products of a large residual stay in range; directions are unchanged
            a = a / tl.maximum(tl.sqrt(tl.sum(tl.sum(a * a, axis=1), axis=0)), _EPSILON)
        _replace_factor(a_ptr, tokens, ranks, num_tokens, RANK, a)
        # fmt: off
        _multiply(residual_ptr, keep_ptr, a_ptr, b_ptr, HEAD_DIM, num_tokens, stride_d, stride_l,
                  keep_stride_d, keep_stride_l, HAS_KEEP, RANK, BLOCK, BLOCK_C, BLOCK_R)
        # fmt: on
    if ROUNDS:
        a = _load_factor(a_ptr, tokens, ranks, num_tokens, RANK)
        b = _load_factor(b_ptr, channels, ranks, HEAD_DIM, RANK)
        rounded_a_ptr += matrix_index * num_tokens * RANK
        rounded_b_ptr += matrix_index * HEAD_DIM * RANK
        exceeds = _store_rounded(rounded_a_ptr, tokens, ranks, num_tokens, RANK, a)
        exceeds |= _store_rounded(rounded_b_ptr, channels, ranks, HEAD_DIM, RANK, b)
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
    all_tokens, all_channels = triton.next_power_of_2(num_tokens), triton.next_power_of_2(head_dim)
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
