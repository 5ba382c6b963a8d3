"""The low-rank part of a tile: `A (B^T q)` for keys with `B^T q` once a chunk, `B (A^T p)` for values likewise.

Legend as in `attend.py`; all pointers are those of one chunk and head, pieces and fields those of `packing.py`.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_parts
from kvcache_plugins.triton_kernels.powers import inverse_power, power_below

from .codes import channel_mask
from .queries import field_number
from .values import field_unit


@triton.jit
def _load_basis(
    b_ptr,
    STRIDE: tl.constexpr,
    PIECE: tl.constexpr,
    FIELD: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """The factor `B` `[words, ranks]` of a field's channels."""
    BLOCK_W: tl.constexpr = PIECE[2]
    ranks = tl.arange(0, BLOCK_RANK)
    pointers = b_ptr + (UNIT * tl.arange(0, BLOCK_W)[:, None] * STRIDE + ranks[None, :])
    return tl.load(
        pointers + FIELD[4] * STRIDE,
        mask=channel_mask(PIECE, FIELD, UNIT, DIM)[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def to_basis(
    queries,
    b_ptr,
    b_start,
    STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """`B^T q` `[ranks, rows]` of the factor `B` that begins at `b_start`, and its powers of two; zeros without one."""
    product = tl.zeros([BLOCK_RANK, BLOCK_R], tl.float32)
    if RANK > 0:
        for p in tl.static_range(len(PIECES)):
            for f in tl.static_range(len(PIECES[p][4])):
                if PIECES[p][3] == 0:
                    # fmt: off
                    basis = _load_basis(
                        b_ptr + b_start, STRIDE, PIECES[p], PIECES[p][4][f], UNIT, DIM, RANK, BLOCK_RANK)
                    # fmt: on
                    product = dot_parts(tl.trans(basis), queries[field_number(PIECES, p, f)], product, PARTS)
    return normalize(product)


@triton.jit
def normalize(product):
    """Columns with the power of two below their largest value taken out, and that power."""
    power = power_below(tl.max(tl.abs(product), axis=0))
    return product * inverse_power(power)[None, :], power


@triton.jit
def add_from_basis(
    outputs,
    output_in_basis,
    reference,
    b_ptr,
    b_start,
    STRIDE: tl.constexpr,
    PIECES: tl.constexpr,
    UNIT: tl.constexpr,
    DIM: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Outputs with `B (A^T p)` added, as they are if there is no such factor."""
    if RANK > 0:
        coefficients, power = normalize(output_in_basis)
        power *= inverse_power(reference)
        result = ()
        for p in tl.static_range(len(PIECES)):
            for f in tl.static_range(len(PIECES[p][4])):
                output = outputs[field_number(PIECES, p, f)]
                if PIECES[p][3] == 0:
                    # fmt: off
                    basis = _load_basis(
                        b_ptr + b_start, STRIDE, PIECES[p], PIECES[p][4][f], UNIT, DIM, RANK, BLOCK_RANK)
                    # fmt: on
                    product = dot_parts(basis, coefficients, tl.zeros(output.shape, tl.float32), PARTS)
                    output += product * (power * (1.0 / field_unit(PIECES[p][4][f], BY_CHANNEL)))[None, :]
                result = result + (output,)
        outputs = result
    return outputs


@triton.jit
def load_coefficients(
    a_ptr,
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
        a_ptr + tl.cast(first_token, tl.int64) * STRIDE + (tokens[:, None] * STRIDE + ranks[None, :]),
        mask=(token_in_use & (first_token + tokens >= 0))[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
