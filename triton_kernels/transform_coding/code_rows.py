"""Encoding of keys and values as rows: one launch a side.

A program takes a tile of tokens of one head, makes numbers of its channels, and encodes these in registers
(`coding_tiles`). In the format of a prompt, values are rotated by a product with a matrix of signs; keys are loaded in
the order of their rows, and their rotary embedding is undone. In calibrated bases (`BASIS`) channels become components
by a product with the inverse of the basis, which is stored in eight bits; a second product, with the channels that the
first components leave, corrects for its rounding. Codes of eight bits are halves, so tensor cores take them as they
are; the units of rows and columns are multiplied outside of the products.

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
# Channels up to which four warps have enough registers for a product
_FEW_CHANNELS = 64
# Channels up to which they do for a product with a basis, and tokens of its tile
_MANY_CHANNELS = 128
_BASIS_TOKENS = 16
# Numbers of the tile of a single warp
_NUMBERS_OF_WARP = 512
# Halves that a float32 is split into for a product, of states in float32 and in halves: 33 and 22 bits
_NUM_PARTS, _NUM_PARTS_OF_HALVES = 3, 2
# Arguments that change from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
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
    """Encode up to `BLOCK_T` tokens of one head."""
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
    # fmt: off
    code_tile(
        states_ptr, stride_t, tokens, token_in_use, positions, matrix, head, sign_ptr, order_ptr, mean_ptr,
        deviation_ptr, basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr,
        coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr + matrix * length * ROW_SIZE, HEAD_DIM, NUM_CODED,
        NUM_DEVIATIONS, ROW_SIZE, FACTOR, NUM_NEAR, NUM_PARTS, BASIS, ROTARY, ROTATED, WEIGHTED, BY_ENERGY, NUM_REFITS,
        BLOCK_C, BLOCK_K)
    # fmt: on


@triton.jit
def code_tile(
    states_ptr, stride_t, tokens, token_in_use, positions, matrix, head, sign_ptr, order_ptr, mean_ptr, deviation_ptr,
    basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr, coefficient_ptr,
    cell_code_ptr, cell_bound_ptr, rows_ptr, HEAD_DIM: tl.constexpr, NUM_CODED: tl.constexpr,
    NUM_DEVIATIONS: tl.constexpr, ROW_SIZE: tl.constexpr, FACTOR: tl.constexpr, NUM_NEAR: tl.constexpr,
    NUM_PARTS: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr, ROTATED: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_ENERGY: tl.constexpr, NUM_REFITS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Encode tokens `[BLOCK_T]` of one head, and store their rows from `rows_ptr` on."""
    BLOCK_T: tl.constexpr = tokens.shape[0]
    places = row_places(BLOCK_K)
    in_use = places < NUM_CODED
    # fmt: off
    if BASIS:
        row_format = head
        normal = _load_components(
            states_ptr, stride_t, tokens, positions, basis_ptr + head * (HEAD_DIM * HEAD_DIM),
            inverse_ptr + head * (NUM_CODED * HEAD_DIM), step_ptr + head * HEAD_DIM, factor_ptr + head * HEAD_DIM,
            mean_ptr + head * HEAD_DIM, places, in_use, partner_ptr, near_ptr, far_ptr, HEAD_DIM, NUM_NEAR, NUM_PARTS,
            ROTARY, BLOCK_T, BLOCK_C, BLOCK_K)
    else:
        row_format = matrix
        channels = row_channels(order_ptr, matrix, places, in_use, HEAD_DIM)
        if mean_ptr is not None:
            mean_ptr += matrix * HEAD_DIM
        if ROTATED:
            normal = _load_rotated(
                states_ptr, stride_t, tokens, positions, sign_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
                NUM_NEAR, NUM_PARTS, BLOCK_T, BLOCK_C, BLOCK_K)
        else:
            normal = load_states(
                states_ptr, stride_t, tokens, channels, in_use, positions, partner_ptr, near_ptr, far_ptr, HEAD_DIM,
                NUM_NEAR, ROTARY)
            if mean_ptr is not None:
                normal -= tl.load(mean_ptr + channels, mask=in_use, other=0.0).to(tl.float32)[None, :]
        _, inverse = load_deviations(deviation_ptr, matrix, channels, in_use, HEAD_DIM, NUM_DEVIATIONS)
        normal *= (inverse * FACTOR)[None, :]
    store_rows(
        normal, tokens, token_in_use, width_ptr + row_format * ((NUM_CODED + 7) // 8), coefficient_ptr, cell_code_ptr,
        cell_bound_ptr, rows_ptr, ROW_SIZE, (NUM_CODED + 7) // 8, WEIGHTED, BY_ENERGY, NUM_REFITS)
    # fmt: on


@triton.jit
def row_channels(order_ptr, matrix, places, in_use, HEAD_DIM: tl.constexpr):
    """Return the channels at the places of a head's rows."""
    channels = places
    if order_ptr is not None:
        channels = tl.load(order_ptr + matrix * HEAD_DIM + places, mask=in_use, other=0).to(tl.int32)
    return channels


@triton.jit
def load_deviations(
    deviation_ptr, matrix, channels, in_use, HEAD_DIM: tl.constexpr, NUM_DEVIATIONS: tl.constexpr
):  # fmt: skip
    """Load deviations of a head's channels; also return their inverses, 0 for a channel that does not vary."""
    if NUM_DEVIATIONS > 1:
        deviation = tl.load(deviation_ptr + matrix * HEAD_DIM + channels, mask=in_use, other=0.0)
    else:
        deviation = tl.load(deviation_ptr + matrix + 0 * channels)
    deviation = deviation.to(tl.float32)
    return deviation, tl.where(deviation > 0, tl.div_rn(1.0, tl.where(deviation > 0, deviation, 1.0)), 0.0)


@triton.jit
def _load_rotated(
    states_ptr, stride_t, tokens, positions, sign_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
    HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load tokens, subtract their mean if there is one, and multiply by a matrix of signs: `[BLOCK_T, BLOCK_K]`."""
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
        if mean_ptr is not None:
            means = tl.load(mean_ptr + own, mask=own_in_use, other=0.0).to(tl.float32)
            rotated += dot_exact(states - means[None, :], signs, NUM_PARTS)
        elif states_ptr.dtype.element_ty == sign_ptr.dtype.element_ty:
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
    """Load tokens as components of a head's basis over their steps, `[BLOCK_T, BLOCK_K]`."""
    # In units of the inverse's codes, which follow from the products of its columns with rows of the basis
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
    components_so_far = coded * units[None, :]
    for first in range(0, HEAD_DIM, BLOCK_C):
        # fmt: off
        remaining = _load_scaled(
            states_ptr, stride_t, tokens, first, positions, factor_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
            HEAD_DIM, NUM_NEAR, ROTARY, BLOCK_C)
        # fmt: on
        basis = _load_codes(basis_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        remaining -= dot_exact(components_so_far, tl.trans(basis), NUM_PARTS)
        inverse = _load_codes(inverse_ptr, first, components, in_use, HEAD_DIM, BLOCK_C)
        coded += dot_exact(remaining, inverse, NUM_PARTS)
    steps = tl.load(step_ptr + components, mask=in_use, other=1.0)
    return coded * (units / steps)[None, :]


@triton.jit
def _load_scaled(
    states_ptr, stride_t, tokens, first, positions, factor_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
    HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, ROTARY: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Load channels of tokens, less their means and times their factors, `[BLOCK_T, BLOCK_C]`."""
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
    """Load channels of rows of a basis, or of columns of its inverse, `[BLOCK_C, BLOCK_K]`, float16."""
    channels = first + tl.arange(0, BLOCK_C)[:, None]
    in_use = component_in_use[None, :] & (channels < HEAD_DIM)
    return tl.load(codes_ptr + components[None, :] * HEAD_DIM + channels, mask=in_use, other=0).to(tl.float16)


def prepare_coding(
    states: torch.Tensor,
    row_format: RowLayout,
    codebook: Codebook,
    signs: torch.Tensor | None = None,
    angles: RotaryAngles | None = None,
    *,
    start: int = 0,
    padding: torch.Tensor | None = None,
) -> Launch:
    """
    Prepare the launch that encodes keys or values as rows `[B, H, T, R]`, uint8.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`): float32, float16 or bfloat16.
        row_format (`RowLayout`): the format of the rows.
        codebook (`Codebook`): codes of all widths.
        signs (`torch.Tensor` of shape `[D, channels of a tile]`, *optional*): Hadamard matrix that states, less their
            mean, are multiplied by: ones and minus ones of their dtype or of float16, columns at their places of a
            tile.
        angles (`RotaryAngles`, *optional*): angles of the rotary embedding that is undone.
        start (`int`, *optional*, defaults to 0): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
    """
    rows = states.new_empty(*states.shape[:3], row_format.row_size, dtype=torch.uint8)
    states = states if states.stride(3) == 1 else states.contiguous()
    batch_size, num_heads, length, _ = states.shape
    # In units of the elements that are loaded together
    is_aligned = states.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in states.stride()[:3])
    block_tokens, num_warps = _tile_shape(row_format, is_rotated=signs is not None)
    arguments = {
        **tensor_arguments("states", states, "bht"),
        **format_arguments(row_format, codebook, signs, angles, states.dtype),
        "mean_ptr": None if signs is not None else contiguous(row_format.mean),
        "padding_ptr": padding,
        "rows_ptr": rows,
        "num_heads": num_heads,
        "num_matrices": batch_size * num_heads,
        "position": start,
        "length": length,
        "BASIS": row_format.basis is not None,
        "PADDED": padding is not None,
        "ALIGNED": is_aligned,
        "BLOCK_T": block_tokens,
    }
    grid = (triton.cdiv(length, block_tokens) * batch_size * num_heads,)
    return Launch(code_rows_kernel, grid, arguments, {**OPTIONS, "num_warps": num_warps, "num_stages": 1}, rows)


def format_arguments(
    row_format: RowLayout,
    codebook: Codebook,
    signs: torch.Tensor | None,
    angles: RotaryAngles | None,
    dtype: torch.dtype,
) -> dict[str, object]:
    """List the kernel arguments of a format, for states of a dtype."""
    basis, is_rotated = row_format.basis, signs is not None
    size = row_format.head_dim & -row_format.head_dim
    is_precise = basis is None or dtype == torch.float32
    return {
        "sign_ptr": signs,
        "order_ptr": contiguous(row_format.order),
        "mean_ptr": contiguous(row_format.mean),
        "deviation_ptr": contiguous(row_format.deviation),
        "basis_ptr": None if basis is None else basis.vectors,
        "inverse_ptr": None if basis is None else basis.inverse,
        "step_ptr": None if basis is None else basis.steps,
        "factor_ptr": None if basis is None else basis.factors,
        "width_ptr": contiguous(row_format.widths),
        **angle_arguments(angles),
        "coefficient_ptr": codebook.coefficients,
        "cell_code_ptr": codebook.cell_codes,
        "cell_bound_ptr": codebook.cell_bounds,
        "HEAD_DIM": row_format.head_dim,
        "NUM_CODED": row_format.num_coefficients,
        "NUM_DEVIATIONS": 0 if row_format.deviation is None else row_format.deviation.shape[2],
        "ROW_SIZE": row_format.row_size,
        "FACTOR": size**-0.5 if is_rotated else 1.0,
        "NUM_PARTS": _NUM_PARTS if is_precise else _NUM_PARTS_OF_HALVES,
        "ROTATED": is_rotated,
        "WEIGHTED": row_format.is_weighted,
        "BY_ENERGY": basis is not None and not row_format.is_weighted,
        "NUM_REFITS": row_format.num_refits,
        "BLOCK_C": min(_PRODUCT_CHANNELS, block_channels(row_format.head_dim)),
        "BLOCK_K": block_channels(row_format.num_coefficients),
    }


def _tile_shape(row_format: RowLayout, *, is_rotated: bool) -> tuple[int, int]:
    """Return the tokens of a tile and the warps that share it: a single one, if registers allow, sums by itself."""
    num_channels = block_channels(row_format.num_coefficients)
    if row_format.basis is not None:
        return _BASIS_TOKENS, 4 if num_channels <= _MANY_CHANNELS else 8
    if is_rotated:
        return _PRODUCT_TOKENS, 4 if num_channels <= _FEW_CHANNELS else 8
    return max(_NUMBERS_OF_WARP // num_channels, 1), 1
