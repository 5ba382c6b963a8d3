"""Keys and values of tokens coded as rows: one launch a side.

A program takes a tile of tokens of one head, makes numbers of its channels, and codes these in registers
(`coding_tiles`). By the tables of a prompt values are rotated by a product with a matrix of signs; of keys the rotary
embedding is undone, channels being loaded in the order of their rows. In calibrated bases (`BASIS`) channels become
components by a product with the inverse of the basis, which stands in eight bits, and what that lost when it was
rounded is made good by a second look, at what the first components leave. Codes of eight bits are halves, so tensor
cores take them as they are; the units of rows and columns are put in outside of the products.

Legend: B batch, H key/value heads, T tokens, D head dim, K components that any head has bits for, R bytes of a row.
"""

from collections.abc import Sequence

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
# Exact tokens that are moved at once
_MOVED_TOKENS = 32
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
    # fmt: off
    _code_tile(
        states_ptr, stride_t, tokens, token_in_use, positions, matrix, head, sign_ptr, order_ptr, mean_ptr,
        deviation_ptr, basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr,
        coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr + matrix * length * ROW_SIZE, HEAD_DIM, NUM_CODED,
        NUM_DEVIATIONS, ROW_SIZE, FACTOR, NUM_NEAR, NUM_PARTS, BASIS, ROTARY, ROTATED, WEIGHTED, BY_ENERGY, NUM_REFITS,
        BLOCK_C, BLOCK_K)
    # fmt: on


@triton.jit
def _code_tile(
    states_ptr, stride_t, tokens, token_in_use, positions, matrix, head, sign_ptr, order_ptr, mean_ptr, deviation_ptr,
    basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr, coefficient_ptr,
    cell_code_ptr, cell_bound_ptr, rows_ptr, HEAD_DIM: tl.constexpr, NUM_CODED: tl.constexpr,
    NUM_DEVIATIONS: tl.constexpr, ROW_SIZE: tl.constexpr, FACTOR: tl.constexpr, NUM_NEAR: tl.constexpr,
    NUM_PARTS: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr, ROTATED: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_ENERGY: tl.constexpr, NUM_REFITS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows, from `rows_ptr` on, of tokens `[BLOCK_T]` of one head."""
    BLOCK_T: tl.constexpr = tokens.shape[0]
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
        cell_bound_ptr, rows_ptr, ROW_SIZE, (NUM_CODED + 7) // 8, WEIGHTED, BY_ENERGY, NUM_REFITS)
    # fmt: on


@triton.jit
def _move_on(states_ptr, new_ptr, num_tokens, HEAD_DIM: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    """Moves a head's tokens to the place of the one before them, the first one aside, and puts a new one behind."""
    channels = tl.arange(0, BLOCK_C)
    new = tl.load(new_ptr + channels, mask=channels < HEAD_DIM, other=0.0)
    for first in range(0, num_tokens, BLOCK_T):
        tokens = first + tl.arange(0, BLOCK_T)[:, None]
        places = states_ptr + tokens * HEAD_DIM + channels[None, :]
        in_use = (channels < HEAD_DIM)[None, :]
        moved = tl.load(places + HEAD_DIM, mask=in_use & (tokens < num_tokens - 1), other=0.0)
        # All threads have read what they code or move before any writes there
        tl.debug_barrier()
        tl.store(places, tl.where(tokens < num_tokens - 1, moved, new[None, :]), mask=in_use & (tokens < num_tokens))


@triton.jit(
    do_not_specialize=["num_heads", "num_exact", "capacity", "position"],
    do_not_specialize_on_alignment=["new_keys_ptr", "new_values_ptr"],
)
def push_kernel(
    new_keys_ptr, new_values_ptr, keys_ptr, values_ptr, key_rows_ptr, value_rows_ptr, number_ptr, padding_ptr,
    key_order_ptr, key_mean_ptr, key_deviation_ptr, key_basis_ptr, key_inverse_ptr, key_step_ptr, key_factor_ptr,
    key_width_ptr, key_partner_ptr, key_near_ptr, key_far_ptr, key_coefficient_ptr, key_cell_code_ptr,
    key_cell_bound_ptr, value_sign_ptr, value_order_ptr, value_mean_ptr, value_deviation_ptr, value_basis_ptr,
    value_inverse_ptr, value_step_ptr, value_factor_ptr, value_width_ptr, value_coefficient_ptr, value_cell_code_ptr,
    value_cell_bound_ptr, num_heads, num_exact, capacity, position, BASIS: tl.constexpr, PADDED: tl.constexpr,
    KEY_HEAD_DIM: tl.constexpr, KEY_NUM_CODED: tl.constexpr, KEY_NUM_DEVIATIONS: tl.constexpr,
    KEY_ROW_SIZE: tl.constexpr, KEY_FACTOR: tl.constexpr, KEY_NUM_NEAR: tl.constexpr, KEY_NUM_PARTS: tl.constexpr,
    KEY_ROTARY: tl.constexpr, KEY_WEIGHTED: tl.constexpr, KEY_BY_ENERGY: tl.constexpr, KEY_NUM_REFITS: tl.constexpr,
    KEY_BLOCK_C: tl.constexpr, KEY_BLOCK_K: tl.constexpr, KEY_BLOCK_T: tl.constexpr, KEY_BLOCK_D: tl.constexpr,
    VALUE_HEAD_DIM: tl.constexpr, VALUE_NUM_CODED: tl.constexpr, VALUE_NUM_DEVIATIONS: tl.constexpr,
    VALUE_ROW_SIZE: tl.constexpr, VALUE_FACTOR: tl.constexpr, VALUE_NUM_PARTS: tl.constexpr,
    VALUE_ROTATED: tl.constexpr, VALUE_WEIGHTED: tl.constexpr, VALUE_BY_ENERGY: tl.constexpr,
    VALUE_NUM_REFITS: tl.constexpr, VALUE_BLOCK_C: tl.constexpr, VALUE_BLOCK_K: tl.constexpr,
    VALUE_BLOCK_T: tl.constexpr, VALUE_BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Codes the oldest exact token of one head, keys or values, to the end of its rows, and moves the others on."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    # A program counts for itself: what no other one reads may be written here
    number_ptr += 2 * (tl.program_id(1) * tl.num_programs(0) + matrix)
    stored, total = tl.load(number_ptr), tl.load(number_ptr + 1)
    if tl.program_id(1) == 0:
        keys_ptr += matrix * num_exact * KEY_HEAD_DIM
        tokens, token_in_use = tile_tokens(0, 1, KEY_BLOCK_T)
        positions = tokens + (position + stored).to(tl.int32)
        if PADDED:
            positions -= tl.load(padding_ptr + batch).to(tl.int32)
        # fmt: off
        _code_tile(
            keys_ptr, KEY_HEAD_DIM, tokens, token_in_use, positions, matrix, head, None, key_order_ptr, key_mean_ptr,
            key_deviation_ptr, key_basis_ptr, key_inverse_ptr, key_step_ptr, key_factor_ptr, key_width_ptr,
            key_partner_ptr, key_near_ptr, key_far_ptr, key_coefficient_ptr, key_cell_code_ptr, key_cell_bound_ptr,
            key_rows_ptr + (matrix * capacity + stored) * KEY_ROW_SIZE, KEY_HEAD_DIM, KEY_NUM_CODED,
            KEY_NUM_DEVIATIONS, KEY_ROW_SIZE, KEY_FACTOR, KEY_NUM_NEAR, KEY_NUM_PARTS, BASIS, KEY_ROTARY, False,
            KEY_WEIGHTED, KEY_BY_ENERGY, KEY_NUM_REFITS, KEY_BLOCK_C, KEY_BLOCK_K)
        # fmt: on
        _move_on(keys_ptr, new_keys_ptr + matrix * KEY_HEAD_DIM, num_exact, KEY_HEAD_DIM, KEY_BLOCK_D, BLOCK_M)
    else:
        values_ptr += matrix * num_exact * VALUE_HEAD_DIM
        # Of another size, so by another name
        ones, one_in_use = tile_tokens(0, 1, VALUE_BLOCK_T)
        # fmt: off
        _code_tile(
            values_ptr, VALUE_HEAD_DIM, ones, one_in_use, ones, matrix, head, value_sign_ptr, value_order_ptr,
            value_mean_ptr, value_deviation_ptr, value_basis_ptr, value_inverse_ptr, value_step_ptr, value_factor_ptr,
            value_width_ptr, None, None, None, value_coefficient_ptr, value_cell_code_ptr, value_cell_bound_ptr,
            value_rows_ptr + (matrix * capacity + stored) * VALUE_ROW_SIZE, VALUE_HEAD_DIM, VALUE_NUM_CODED,
            VALUE_NUM_DEVIATIONS, VALUE_ROW_SIZE, VALUE_FACTOR, 1, VALUE_NUM_PARTS, BASIS, False, VALUE_ROTATED,
            VALUE_WEIGHTED, VALUE_BY_ENERGY, VALUE_NUM_REFITS, VALUE_BLOCK_C, VALUE_BLOCK_K)
        # fmt: on
        _move_on(
            values_ptr, new_values_ptr + matrix * VALUE_HEAD_DIM, num_exact, VALUE_HEAD_DIM, VALUE_BLOCK_D, BLOCK_M
        )
    tl.store(number_ptr, stored + 1)
    tl.store(number_ptr + 1, total + 1)


@triton.jit
def _load_rotated(
    states_ptr, stride_t, tokens, positions, sign_ptr, mean_ptr, partner_ptr, near_ptr, far_ptr,
    HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Loads tokens, less their mean if there is one, times a matrix of signs, `[BLOCK_T, BLOCK_K]`."""
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
        layout (`RowLayout`): how they are coded.
        codebook (`Codebook`): codes of all widths.
        signs (`torch.Tensor` of shape `[D, channels of a tile]`, *optional*): what states are multiplied with before:
            a Hadamard matrix of ones, of their dtype or else of float16, its columns at their places of a tile. The
            mean has then been taken off.
        angles (`RotaryAngles`, *optional*): of the rotary embedding that is undone.
        start (`int`, *optional*, defaults to 0): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
    """
    rows = states.new_empty(*states.shape[:3], layout.row_size, dtype=torch.uint8)
    states = states if states.stride(3) == 1 else states.contiguous()
    batch_size, num_heads, length, _ = states.shape
    # In units that are loaded together
    is_aligned = states.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in states.stride()[:3])
    block_tokens, num_warps = _tile_shape(layout, is_rotated=signs is not None)
    arguments = {
        **tensor_arguments("states", states, "bht"),
        **_table_arguments(layout, codebook, signs, angles, states.dtype),
        "mean_ptr": None if signs is not None else contiguous(layout.mean),
        "padding_ptr": padding,
        "rows_ptr": rows,
        "num_heads": num_heads,
        "num_matrices": batch_size * num_heads,
        "position": start,
        "length": length,
        "BASIS": layout.basis is not None,
        "PADDED": padding is not None,
        "ALIGNED": is_aligned,
        "BLOCK_T": block_tokens,
    }
    grid = (triton.cdiv(length, block_tokens) * batch_size * num_heads,)
    return Launch(code_rows_kernel, grid, arguments, {**OPTIONS, "num_warps": num_warps, "num_stages": 1}, rows)


def prepare_push(
    exact: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    numbers: torch.Tensor,
    layouts: Sequence[RowLayout],
    codebooks: Sequence[Codebook],
    signs: torch.Tensor | None,
    angles: RotaryAngles | None,
    start: int,
    padding: torch.Tensor | None,
) -> Launch:
    """
    Prepares the launch that takes in a new token, `new_keys_ptr` and `new_values_ptr` `[B, H, 1, D]`, for which the
    oldest exact one becomes a row. Of all that is given in twos the first is of keys, and tensors are contiguous.

    Args:
        exact (two `torch.Tensor` of shape `[B, H, exact tokens, D]`): the newest tokens, oldest first.
        rows (two `torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows, with capacity for one more.
        numbers (`torch.Tensor` of shape `[2, B, H, 2]`, int64): rows in use, and tokens of the sequence; the same
            for every program, which counts its own on.
        layouts, codebooks, signs, angles, padding: see `prepare_coding`. Signs are of values, angles of keys.
        start (`int`): index of the first row's token.
    """
    (batch_size, num_heads, num_exact, _), dtype = exact[0].shape, exact[0].dtype
    arguments: dict[str, object] = {"new_keys_ptr": exact[0], "new_values_ptr": exact[1]}
    most_warps = 1
    # Arguments that only the other side has
    others = {"key": {"sign_ptr", "ROTATED"}, "value": {"partner_ptr", "near_ptr", "far_ptr", "NUM_NEAR", "ROTARY"}}
    tables = (
        _table_arguments(layouts[0], codebooks[0], None, angles, dtype),
        _table_arguments(layouts[1], codebooks[1], signs, None, dtype),
    )
    for (name, without), table, layout in zip(others.items(), tables, layouts, strict=True):
        block_tokens, num_warps = _tile_shape(layout, is_rotated=bool(table["ROTATED"]))
        most_warps = max(most_warps, num_warps)
        own = {**table, "BLOCK_T": block_tokens, "BLOCK_D": triton.next_power_of_2(layout.head_dim)}
        for argument in own.keys() - without:
            arguments[f"{name.upper() if argument.isupper() else name}_{argument}"] = own[argument]
    arguments |= {
        **dict(zip(("keys_ptr", "values_ptr", "key_rows_ptr", "value_rows_ptr"), (*exact, *rows), strict=True)),
        "number_ptr": numbers,
        "padding_ptr": padding,
        "num_heads": num_heads,
        "num_exact": num_exact,
        "capacity": rows[0].shape[2],
        "position": start,
        "BASIS": layouts[0].basis is not None,
        "PADDED": padding is not None,
        "BLOCK_M": _MOVED_TOKENS,
    }
    # A tile is small for its warps: lanes that hold the same sum are to have the same one, see `combine`
    options = {"enable_fp_fusion": False, "num_warps": most_warps, "num_stages": 1}
    return Launch(push_kernel, (batch_size * num_heads, 2), arguments, options, None)


def _table_arguments(
    layout: RowLayout,
    codebook: Codebook,
    signs: torch.Tensor | None,
    angles: RotaryAngles | None,
    dtype: torch.dtype,
) -> dict[str, object]:
    """The kernel arguments that say how states of a dtype are coded."""
    basis, is_rotated = layout.basis, signs is not None
    size = layout.head_dim & -layout.head_dim
    is_precise = basis is None or dtype == torch.float32
    return {
        "sign_ptr": signs,
        "order_ptr": contiguous(layout.order),
        "mean_ptr": contiguous(layout.mean),
        "deviation_ptr": contiguous(layout.deviation),
        "basis_ptr": None if basis is None else basis.vectors,
        "inverse_ptr": None if basis is None else basis.inverse,
        "step_ptr": None if basis is None else basis.steps,
        "factor_ptr": None if basis is None else basis.factors,
        "width_ptr": contiguous(layout.widths),
        **angle_arguments(angles),
        "coefficient_ptr": codebook.coefficients,
        "cell_code_ptr": codebook.cell_codes,
        "cell_bound_ptr": codebook.cell_bounds,
        "HEAD_DIM": layout.head_dim,
        "NUM_CODED": layout.num_coefficients,
        "NUM_DEVIATIONS": 0 if layout.deviation is None else layout.deviation.shape[2],
        "ROW_SIZE": layout.row_size,
        "FACTOR": size**-0.5 if is_rotated else 1.0,
        "NUM_PARTS": _NUM_PARTS if is_precise else _NUM_PARTS_OF_HALVES,
        "ROTATED": is_rotated,
        "WEIGHTED": layout.is_weighted,
        "BY_ENERGY": basis is not None and not layout.is_weighted,
        "NUM_REFITS": layout.num_refits,
        "BLOCK_C": min(_PRODUCT_CHANNELS, block_channels(layout.head_dim)),
        "BLOCK_K": block_channels(layout.num_coefficients),
    }


def _tile_shape(layout: RowLayout, *, is_rotated: bool) -> tuple[int, int]:
    """Tokens of a tile, and warps that share it: one where nothing else asks for more, which sums within itself."""
    num_channels = block_channels(layout.num_coefficients)
    if layout.basis is not None:
        return _BASIS_TOKENS, 4 if num_channels <= _MANY_CHANNELS else 8
    if is_rotated:
        return _PRODUCT_TOKENS, 4 if num_channels <= _FEW_CHANNELS else 8
    return max(_NUMBERS_OF_WARP // num_channels, 1), 1
