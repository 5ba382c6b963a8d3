"""Keys and values of tokens coded as rows: one launch a side.

A program takes a tile of tokens of one head, makes numbers of its channels, and codes these in registers
(`coding_tiles`). By the tables of a prompt values are rotated by a product with a matrix of signs; of keys the rotary
embedding is undone, channels being loaded in the order of their rows. In calibrated bases (`BASIS`) channels become
components by a product with the inverse of the basis, which stands in eight bits, and what that lost when it was
rounded is made good by a second look, at what the first components leave. Codes of eight bits are halves, so tensor
cores take them as they are; the units of rows and columns are put in outside of the products.

Legend: B batch, H key/value heads, T tokens, D head dim, K components that any head has bits for, R bytes of a row.
"""

import torch
import triton
import triton.language as tl

from ..arithmetic import dot_exact
from ..launch import ALIGNMENT, OPTIONS, Launch, tensor_arguments
from ..stored_format import RowLayout
from .attend import angle_arguments, block_channels, contiguous
from .coding_tiles import head_states, load_states, row_places, store_rows, tile_tokens
from .launches import Codebook, RotaryAngles


# Channels that a product adds up at a time, and tokens of its tile
_PRODUCT_CHANNELS = 32
_PRODUCT_TOKENS = 32
# Channels up to which four warps have registers enough for a product
_FEW_CHANNELS = 64
# The same of a product with a basis, whose tile has fewer tokens
_MANY_CHANNELS = 128
# Tokens of a tile whose products are with a basis
_BASIS_TOKENS = 16
# Numbers of the tile of a single warp
_NUMBERS_OF_WARP = 512
# Parts of float32 in a product, of states in float32 and in halves: 33 and 22 bits
_NUM_PARTS, _NUM_PARTS_OF_HALVES = 3, 2
# Changes from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    *(f"states_stride_{dimension}" for dimension in "bht"),
    "num_heads",
    "num_matrices",
    "position",
    "length",
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["states_ptr"])
def code_rows_kernel(
    states_ptr, states_stride_b, states_stride_h, states_stride_t, sign_ptr, order_ptr, mean_ptr, deviation_ptr,
    basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr, padding_ptr,
    coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr, num_heads, num_matrices, position, length,
    HEAD_DIM: tl.constexpr, NUM_CODED: tl.constexpr, NUM_DEVIATIONS: tl.constexpr, ROW_SIZE: tl.constexpr,
    FACTOR: tl.constexpr, NUM_NEAR: tl.constexpr, NUM_PARTS: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr,
    PADDED: tl.constexpr, ROTATED: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_ENERGY: tl.constexpr, NUM_REFITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
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
    places = row_places(BLOCK_K)
    in_use = places < NUM_CODED
    # fmt: off
    if BASIS:
        table = head
        normal = _load_components(
            states_ptr, stride_t, tokens, positions, basis_ptr + head * (HEAD_DIM * HEAD_DIM),
            inverse_ptr + head * (NUM_CODED * HEAD_DIM), step_ptr + head * HEAD_DIM, factor_ptr + head * HEAD_DIM,
            mean_ptr + head * HEAD_DIM, places, in_use, partner_ptr, near_ptr, far_ptr, HEAD_DIM, NUM_NEAR, NUM_PARTS,
            ROTARY, BLOCK_T, BLOCK_C, BLOCK_K)
    else:
        table = matrix
        channels = places
        if order_ptr is not None:
            channels = tl.load(order_ptr + matrix * HEAD_DIM + places, mask=in_use, other=0).to(tl.int32)
        if ROTATED:
            normal = _load_rotated(
                states_ptr, stride_t, tokens, positions, sign_ptr, partner_ptr, near_ptr, far_ptr, HEAD_DIM, NUM_NEAR,
                NUM_PARTS, BLOCK_T, BLOCK_C, BLOCK_K)
        else:
            normal = load_states(
                states_ptr, stride_t, tokens, channels, in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
                NUM_NEAR, ROTARY)
        if mean_ptr is not None:
            normal -= tl.load(mean_ptr + matrix * HEAD_DIM + channels, mask=in_use, other=0.0).to(tl.float32)[None, :]
        if NUM_DEVIATIONS > 1:
            deviation = tl.load(deviation_ptr + matrix * HEAD_DIM + channels, mask=in_use, other=0.0)
        else:
            deviation = tl.load(deviation_ptr + matrix + 0 * places)
        deviation = deviation.to(tl.float32)
        # A channel that does not vary is its mean
        inverse = tl.where(deviation > 0, tl.div_rn(1.0, tl.where(deviation > 0, deviation, 1.0)), 0.0) * FACTOR
        normal *= inverse[None, :]
    store_rows(
        normal, tokens, token_in_use, width_ptr + table * ((NUM_CODED + 7) // 8), coefficient_ptr, cell_code_ptr,
        cell_bound_ptr, rows_ptr + matrix * length * ROW_SIZE, ROW_SIZE, (NUM_CODED + 7) // 8, WEIGHTED, BY_ENERGY,
        NUM_REFITS)
    # fmt: on


@triton.jit
def _load_rotated(
    states_ptr, stride_t, tokens, positions, sign_ptr, partner_ptr, near_ptr, far_ptr, HEAD_DIM: tl.constexpr,
    NUM_NEAR: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Loads tokens times a matrix of signs, `[BLOCK_T, BLOCK_K]`."""
    rotated = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for first in range(0, HEAD_DIM, BLOCK_C):
        own = first + tl.arange(0, BLOCK_C)
        own_in_use = own < HEAD_DIM
        # fmt: off
        states = load_states(
            states_ptr, stride_t, tokens, own, own_in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
            NUM_NEAR, False)
        # fmt: on
        sign_ptrs = sign_ptr + own[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        signs = tl.load(sign_ptrs, mask=own_in_use[:, None], other=0.0)
        if states_ptr.dtype.element_ty == sign_ptr.dtype.element_ty:
            rotated = tl.dot(states.to(signs.dtype), signs, rotated)
        else:
            rotated += dot_exact(states, signs, NUM_PARTS)
    return rotated


@triton.jit
def _load_components(
    states_ptr, stride_t, tokens, positions, basis_ptr, inverse_ptr, step_ptr, factor_ptr, mean_ptr, components,
    in_use, partner_ptr, near_ptr, far_ptr, HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, NUM_PARTS: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Loads tokens as components of a head's basis over their steps, `[BLOCK_T, BLOCK_K]`."""
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
    steps = tl.load(step_ptr + components, mask=in_use, other=1.0)
    return coded * (units / steps)[None, :]


@triton.jit
def _load_scaled(
    states_ptr, stride_t, tokens, first, positions, factor_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
    HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, ROTARY: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
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


def prepare_coding(
    states: torch.Tensor,
    layout: RowLayout,
    codebook: Codebook,
    signs: torch.Tensor | None = None,
    angles: RotaryAngles | None = None,
    *,
    start: int = 0,
    padding: torch.Tensor | None = None,
) -> Launch:
    """
    Prepares the launch that codes keys or values as rows `[B, H, T, R]`, uint8.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`): float32, float16 or bfloat16.
        layout (`RowLayout`): how they are coded; a trellis is for plain PyTorch.
        codebook (`Codebook`): codes of all widths.
        signs (`torch.Tensor` of shape `[D, channels of a tile]`, *optional*): what states are multiplied with before:
            a Hadamard matrix of ones, of their dtype or else of float16, its columns at their places of a tile. The
            mean has then been taken off.
        angles (`RotaryAngles`, *optional*): of the rotary embedding that is undone.
        start (`int`, *optional*, defaults to 0): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
    """
    basis, is_rotated, num_channels = layout.basis, signs is not None, block_channels(layout.num_coded)
    rows = states.new_empty(*states.shape[:3], layout.row_size, dtype=torch.uint8)
    states = states if states.stride(3) == 1 else states.contiguous()
    batch_size, num_heads, length, _ = states.shape
    # In units that are loaded together
    is_aligned = states.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in states.stride()[:3])
    block_tokens, num_warps = _tile_shape(num_channels, is_rotated=is_rotated, has_basis=basis is not None)
    size = layout.head_dim & -layout.head_dim
    is_precise = basis is None or states.dtype == torch.float32
    arguments = {
        **tensor_arguments("states", states, "bht"),
        "sign_ptr": signs,
        "order_ptr": contiguous(layout.order),
        "mean_ptr": None if is_rotated else contiguous(layout.mean),
        "deviation_ptr": contiguous(layout.deviation),
        "basis_ptr": None if basis is None else basis.vectors,
        "inverse_ptr": None if basis is None else basis.inverse,
        "step_ptr": None if basis is None else basis.steps,
        "factor_ptr": None if basis is None else basis.factors,
        "width_ptr": contiguous(layout.widths),
        **angle_arguments(angles),
        "padding_ptr": padding,
        "coefficient_ptr": codebook.coefficients,
        "cell_code_ptr": codebook.cell_codes,
        "cell_bound_ptr": codebook.cell_bounds,
        "rows_ptr": rows,
        "num_heads": num_heads,
        "num_matrices": batch_size * num_heads,
        "position": start,
        "length": length,
        "HEAD_DIM": layout.head_dim,
        "NUM_CODED": layout.num_coded,
        "NUM_DEVIATIONS": 0 if layout.deviation is None else layout.deviation.shape[2],
        "ROW_SIZE": layout.row_size,
        "FACTOR": size**-0.5 if is_rotated else 1.0,
        "NUM_PARTS": _NUM_PARTS if is_precise else _NUM_PARTS_OF_HALVES,
        "BASIS": basis is not None,
        "PADDED": padding is not None,
        "ROTATED": is_rotated,
        "ALIGNED": is_aligned,
        "WEIGHTED": layout.is_weighted,
        "BY_ENERGY": basis is not None and not layout.is_weighted,
        "NUM_REFITS": layout.num_refits,
        "BLOCK_T": block_tokens,
        "BLOCK_C": min(_PRODUCT_CHANNELS, block_channels(layout.head_dim)),
        "BLOCK_K": num_channels,
    }
    grid = (triton.cdiv(length, block_tokens) * batch_size * num_heads,)
    return Launch(code_rows_kernel, grid, arguments, {**OPTIONS, "num_warps": num_warps, "num_stages": 1}, rows)


def _tile_shape(num_channels: int, *, is_rotated: bool, has_basis: bool) -> tuple[int, int]:
    """Tokens of a tile, and warps that share it: one where nothing else asks for more, which sums within itself."""
    if has_basis:
        return _BASIS_TOKENS, 4 if num_channels <= _MANY_CHANNELS else 8
    if is_rotated:
        return _PRODUCT_TOKENS, 4 if num_channels <= _FEW_CHANNELS else 8
    return max(_NUMBERS_OF_WARP // num_channels, 1), 1
