"""The low-rank part of a tile: `(q B) A^T` for keys with `q B` once a chunk, `(p A) B^T` for values likewise.

Legend as in `attend.py`; all pointers are those of one chunk and head.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_exact


@triton.jit
def _load_basis(
    factor_ptr, STRIDE: tl.constexpr, channels, channel_in_use, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    """The factor `B` `[channels, ranks]` of a chunk."""
    ranks = tl.arange(0, BLOCK_RANK)
    return tl.load(
        factor_ptr + channels[:, None] * STRIDE + ranks[None, :],
        mask=channel_in_use[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def to_basis(
    query,
    b_ptr,
    b_start,
    STRIDE: tl.constexpr,
    channels,
    channel_in_use,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """`q B` `[rows, ranks]`, of the factor `B` that begins at `b_start`; zeros if there is none."""
    if RANK > 0:
        basis = _load_basis(b_ptr + b_start, STRIDE, channels, channel_in_use, RANK, BLOCK_RANK)
        product = dot_exact(query, basis, PARTS)
    else:
        product = tl.zeros([BLOCK_R, BLOCK_RANK], tl.float32)
    return product


@triton.jit
def add_from_basis(
    output,
    output_in_basis,
    b_ptr,
    b_start,
    STRIDE: tl.constexpr,
    channels,
    channel_in_use,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Output with `(p A) B^T` `[rows, channels]` added, as it is if there is no such factor."""
    if RANK > 0:
        basis = _load_basis(b_ptr + b_start, STRIDE, channels, channel_in_use, RANK, BLOCK_RANK)
        output += dot_exact(output_in_basis, tl.trans(basis), PARTS)
    return output


@triton.jit
def load_coefficients(
    factor_ptr,
    STRIDE: tl.constexpr,
    first_token,
    token_in_use,
    RANK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """The factor `A` `[tokens, ranks]` of a tile; zero for tokens before 0, where the low-rank part begins."""
    tokens = tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, BLOCK_RANK)
    return tl.load(
        factor_ptr + tl.cast(first_token, tl.int64) * STRIDE + (tokens[:, None] * STRIDE + ranks[None, :]),
        mask=(token_in_use & (first_token + tokens >= 0))[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
