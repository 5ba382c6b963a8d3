"""What power iteration does with a factor: loads, replaces and orthonormalizes it, multiplies a matrix with it.

A factor is contiguous, `[rows, R]`. Products are of three TF32 terms each, which keeps nearly float32's precision.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


_EPSILON = tl.constexpr(1e-30)


@triton.jit
def _column(matrix, ranks, index):
    """Column `index` of a `[rows, R]` tile."""
    return tl.sum(tl.where(ranks[None, :] == index, matrix, 0.0), axis=1)


@triton.jit
def orthonormalize(matrix, ranks, RANK: tl.constexpr):
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
def load_factor(factor_ptr, rows, ranks, num_rows, RANK: tl.constexpr):
    """Rows of a contiguous `[num_rows, R]`, zeros past its end."""
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    return tl.load(factor_ptr + rows[:, None] * RANK + ranks[None, :], mask=in_factor, other=0.0)


@triton.jit
def replace_factor(factor_ptr, rows, ranks, num_rows, RANK: tl.constexpr, factor):
    """Stores all rows, after every thread has read the old ones and before any reads the new ones."""
    tl.debug_barrier()
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    tl.store(factor_ptr + rows[:, None] * RANK + ranks[None, :], factor, mask=in_factor)
    tl.debug_barrier()


@triton.jit
def multiply(
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
            factor = load_factor(factor_ptr, columns, ranks, num_columns, RANK)
            product = tl.dot(tile, factor, product, input_precision="tf32x3")
        in_product = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
        tl.store(product_ptr + rows[:, None] * RANK + ranks[None, :], product, mask=in_product)
    tl.debug_barrier()


@triton.jit
def store_rounded(rounded_ptr, rows, ranks, num_rows, RANK: tl.constexpr, factor):
    """Stores a factor in the type of the pointer, and returns 1 if something of it does not fit that."""
    in_factor = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
    rounded = factor.to(rounded_ptr.dtype.element_ty)
    tl.store(rounded_ptr + rows[:, None] * RANK + ranks[None, :], rounded, mask=in_factor)
    poison = rounded.to(tl.float32) * 0.0
    return tl.max(tl.max((poison != poison).to(tl.int32), axis=1), axis=0)
