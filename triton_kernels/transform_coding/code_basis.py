"""Keys and values of tokens coded as rows in calibrated bases: one launch a side.

Channels become components by a product with the inverse of the basis, which stands in eight bits, and what that lost
when it was rounded is made good by a second look, at what the first components leave. Codes of eight bits are halves,
so tensor cores take them as they are; the units of rows and columns are put in outside of the products.

Legend: B batch, H key/value heads, T tokens, D head dim, K components that any head has bits for, R bytes of a row.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from kvcache_plugins.codecs.rows import RowTable
from kvcache_plugins.triton_kernels.dot import dot_exact

from .attend import block_channels
from .code_rows import NOT_SPECIALIZED, coding_arguments
from .coding_tiles import head_states, load_states, row_places, store_rows, tile_tokens
from .launches import Codebook, CodingLaunch, RotaryAngles


# Channels that a product adds up, or gives, at a time, and tokens of a tile
_PRODUCT_CHANNELS = 32
_PRODUCT_TOKENS = 16
# Parts of float32 in a product, of states in float32 and in halves
_NUM_PARTS, _NUM_PARTS_OF_HALVES = 3, 2


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=["states_ptr"])
def code_basis_kernel(
    states_ptr,
    states_stride_b,
    states_stride_h,
    states_stride_t,
    basis_ptr,
    inverse_ptr,
    step_ptr,
    factor_ptr,
    mean_ptr,
    width_ptr,
    partner_ptr,
    near_ptr,
    far_ptr,
    padding_ptr,
    coefficient_ptr,
    cell_code_ptr,
    cell_bound_ptr,
    rows_ptr,
    num_heads,
    num_matrices,
    position,
    length,
    HEAD_DIM: tl.constexpr,
    NUM_COMPONENTS: tl.constexpr,
    ROW_SIZE: tl.constexpr,
    NUM_NEAR: tl.constexpr,
    ROTARY: tl.constexpr,
    PADDED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NUM_REFITS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Rows of up to `BLOCK_T` tokens of one head."""
    matrix = (tl.program_id(0) % num_matrices).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    tokens, token_in_use = tile_tokens(tl.program_id(0) // num_matrices, length, BLOCK_T)
    # fmt: off
    states_ptr, stride_t = head_states(
        states_ptr, states_stride_t, batch, head, states_stride_b, states_stride_h, ALIGNED)
    # fmt: on
    positions = position + tokens
    if PADDED:
        positions -= tl.load(padding_ptr + batch).to(tl.int32)
    basis_ptr += head * (HEAD_DIM * HEAD_DIM)
    inverse_ptr += head * (NUM_COMPONENTS * HEAD_DIM)
    factor_ptr += head * HEAD_DIM
    mean_ptr += head * HEAD_DIM
    components = row_places(BLOCK_K)
    in_use = components < NUM_COMPONENTS

    # In units of the inverse's codes: products of its columns with rows of the basis say what these are
    coded = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    products = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_C):
        # fmt: off
        scaled = _load_scaled(
            states_ptr, stride_t, tokens, first, positions, factor_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
            HEAD_DIM, NUM_NEAR, ROTARY, BLOCK_C)
        # fmt: on
        inverse = _load_codes(inverse_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        basis = _load_codes(basis_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        coded += dot_exact(scaled, inverse, NUM_PARTS)
        products += tl.sum(inverse.to(tl.float32) * basis.to(tl.float32), axis=0)
    units = tl.where(in_use, 1.0 / tl.where(in_use, products, 1.0), 0.0)
    first_look = coded * units[None, :]
    for first in range(0, HEAD_DIM, BLOCK_C):
        # fmt: off
        left = _load_scaled(
            states_ptr, stride_t, tokens, first, positions, factor_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
            HEAD_DIM, NUM_NEAR, ROTARY, BLOCK_C)
        # fmt: on
        basis = _load_codes(basis_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        left -= dot_exact(first_look, tl.trans(basis), NUM_PARTS)
        inverse = _load_codes(inverse_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        coded += dot_exact(left, inverse, NUM_PARTS)
    steps = tl.load(step_ptr + head * HEAD_DIM + components, mask=in_use, other=1.0)
    # fmt: off
    store_rows(
        coded * (units / steps)[None, :], tokens, token_in_use, width_ptr + head * ((NUM_COMPONENTS + 7) // 8),
        coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr + matrix * length * ROW_SIZE, ROW_SIZE,
        (NUM_COMPONENTS + 7) // 8, WEIGHTED, not WEIGHTED, NUM_REFITS)
    # fmt: on


@triton.jit
def _load_scaled(
    states_ptr,
    stride_t,
    tokens,
    first,
    positions,
    factor_ptr,
    mean_ptr,
    partner_ptr,
    near_ptr,
    far_ptr,
    HEAD_DIM: tl.constexpr,
    NUM_NEAR: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Some channels of tokens, less their means and times their factors, `[BLOCK_T, BLOCK_C]`."""
    channels = first + tl.arange(0, BLOCK_C)
    in_use = channels < HEAD_DIM
    # fmt: off
    states = load_states(
        states_ptr, stride_t, tokens, channels, in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM, NUM_NEAR,
        ROTARY)
    # fmt: on
    means = tl.load(mean_ptr + channels, mask=in_use, other=0.0).to(tl.float32)
    factors = tl.load(factor_ptr + channels, mask=in_use, other=0.0)
    return (states - means[None, :]) * factors[None, :]


@triton.jit
def _load_codes(codes_ptr, first, components, component_in_use, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr):
    """Some channels of rows of a basis, or of columns of its inverse, `[BLOCK_C, BLOCK_K]`, float16."""
    channels = first + tl.arange(0, BLOCK_C)[:, None]
    in_use = component_in_use[None, :] & (channels < HEAD_DIM)
    return tl.load(codes_ptr + components[None, :] * HEAD_DIM + channels, mask=in_use, other=0).to(tl.float16)


def prepare_basis_coding(
    states: torch.Tensor,
    table: RowTable,
    codebook: Codebook,
    angles: RotaryAngles | None = None,
    *,
    start: int = 0,
    padding: torch.Tensor | None = None,
) -> CodingLaunch:
    """
    The launch that codes keys or values.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`):
            Float32, float16 or bfloat16.
        table (`RowTable`):
            How they are coded.
        codebook, angles, start, padding:
            See `code_rows.prepare_coding`.
    """
    basis = table.basis
    assert basis is not None, "tables of a calibration have a basis"
    rows = states.new_empty(*states.shape[:3], table.row_size, dtype=torch.uint8)
    num_channels = block_channels(table.num_coded)
    arguments = {
        **coding_arguments(states, rows, table, codebook, angles, start, padding),
        "mean_ptr": table.mean,
        "basis_ptr": basis.vectors,
        "inverse_ptr": basis.inverse,
        "step_ptr": basis.steps,
        "factor_ptr": basis.factors,
        "NUM_COMPONENTS": table.num_coded,
        "NUM_REFITS": table.num_refits,
        "NUM_PARTS": _NUM_PARTS if states.dtype == torch.float32 else _NUM_PARTS_OF_HALVES,
        "BLOCK_T": _PRODUCT_TOKENS,
        "BLOCK_C": min(_PRODUCT_CHANNELS, block_channels(table.head_dim)),
        "BLOCK_K": num_channels,
    }
    options = {"num_warps": 4 if num_channels <= 128 else 8, "num_stages": 1}
    return CodingLaunch(code_basis_kernel, arguments, options, rows)
