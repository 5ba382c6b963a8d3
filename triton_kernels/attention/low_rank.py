"""The low-rank part of a tile: `A (B^T q)` for keys with `B^T q` once a chunk, `B (A^T p)` for values likewise.

Legend as in `attend.py`; all pointers are those of one chunk and head. `SIDE` is a `SideLayout`, factors have their
ranks beside each other.
"""

import triton
import triton.language as tl

from ..arithmetic import dot_parts, inverse_power, power_below, same_halves
from .codes import channel_mask, field_number
from .values import field_unit


@triton.jit
def _load_basis(b_ptr, RANK: tl.constexpr, SIDE: tl.constexpr, PIECE: tl.constexpr, FIELD: tl.constexpr):
    """The factor `B` `[words, ranks]` of a field's channels."""
    ranks = tl.arange(0, SIDE.block_rank)
    words = SIDE.pieces[PIECE].unit * tl.arange(0, SIDE.pieces[PIECE].block)
    pointers = b_ptr + (words[:, None] * RANK + ranks[None, :])
    return tl.load(
        pointers + SIDE.pieces[PIECE].fields[FIELD].first_channel * RANK,
        mask=channel_mask(SIDE, PIECE, FIELD)[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )


@triton.jit
def to_basis(
    queries,
    b_ptr,
    b_start,
    rank,
    SIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """`B^T q` `[ranks, rows]` of the factor `B` that begins at `b_start`, and its powers of two; zeros without one."""
    product = tl.zeros([tl.constexpr(SIDE.block_rank), BLOCK_R], tl.float32)
    # Addresses that differ by constants share registers, so there is code for each rank
    if len(SIDE.ranks) == 1:
        product = _to_basis(queries, b_ptr + b_start, product, SIDE.ranks[0], SIDE, QUERIES, PARTS)
    elif len(SIDE.ranks) == 2:
        if rank == SIDE.ranks[0]:
            product = _to_basis(queries, b_ptr + b_start, product, SIDE.ranks[0], SIDE, QUERIES, PARTS)
        else:
            product = _to_basis(queries, b_ptr + b_start, product, SIDE.ranks[1], SIDE, QUERIES, PARTS)
    return normalize(product)


@triton.jit
def _to_basis(
    queries, b_ptr, product, RANK: tl.constexpr, SIDE: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr
):
    for p in tl.static_range(len(SIDE.pieces)):
        for f in tl.static_range(len(SIDE.pieces[p].fields)):
            if SIDE.pieces[p].plane == 0:
                basis = _load_basis(b_ptr, RANK, SIDE, p, f)
                query = queries[field_number(SIDE, p, f)]
                if QUERIES == "rotated":
                    query = same_halves(query)
                product = dot_parts(tl.trans(basis), query, product, PARTS)
    return product


@triton.jit
def normalize(product):
    """Columns with the power of two below their largest value taken out, and that power."""
    power = power_below(tl.max(tl.abs(product), axis=0))
    return product * inverse_power(power)[None, :], power


@triton.jit
def add_from_basis(
    outputs, output_in_basis, reference, b_ptr, b_start, rank, SIDE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """Outputs with `B (A^T p)` added, as they are if there is no such factor."""
    if len(SIDE.ranks) > 0:
        coefficients, power = normalize(output_in_basis)
        power *= inverse_power(reference)
        if len(SIDE.ranks) == 1 or rank == SIDE.ranks[0]:
            outputs = _add_from_basis(outputs, coefficients, power, b_ptr + b_start, SIDE.ranks[0], SIDE, PARTS)
        else:
            outputs = _add_from_basis(outputs, coefficients, power, b_ptr + b_start, SIDE.ranks[1], SIDE, PARTS)
    return outputs


@triton.jit
def _add_from_basis(
    outputs, coefficients, power, b_ptr, RANK: tl.constexpr, SIDE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    result = ()
    for p in tl.static_range(len(SIDE.pieces)):
        for f in tl.static_range(len(SIDE.pieces[p].fields)):
            output = outputs[field_number(SIDE, p, f)]
            if SIDE.pieces[p].plane == 0:
                basis = _load_basis(b_ptr, RANK, SIDE, p, f)
                product = dot_parts(basis, coefficients, tl.zeros(output.shape, tl.float32), PARTS)
                output += product * (power * (1.0 / field_unit(SIDE, p, f)))[None, :]
            result = result + (output,)
    return result


@triton.jit
def load_coefficients(a_ptr, rank, first_token, token_in_use, SIDE: tl.constexpr, BLOCK_T: tl.constexpr):
    """The factor `A` `[tokens, ranks]` of a tile."""
    # Of one rank the other branch is not compiled, which a `return` would leave to be
    if len(SIDE.ranks) == 1 or rank == SIDE.ranks[0]:
        rows = _load_rows(a_ptr, first_token, token_in_use, SIDE.ranks[0], SIDE.block_rank, BLOCK_T)
    else:
        rows = _load_rows(a_ptr, first_token, token_in_use, SIDE.ranks[1], SIDE.block_rank, BLOCK_T)
    return rows


@triton.jit
def _load_rows(
    a_ptr, first_token, token_in_use, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_T: tl.constexpr
):  # fmt: skip
    tokens = tl.arange(0, BLOCK_T)
    ranks = tl.arange(0, BLOCK_RANK)
    return tl.load(
        a_ptr + tl.cast(first_token, tl.int64) * RANK + (tokens[:, None] * RANK + ranks[None, :]),
        mask=token_in_use[:, None] & (ranks < RANK)[None, :],
        other=0.0,
    )
