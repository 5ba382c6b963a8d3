"""Decoding of chosen rows to states: keys from where they are stored, values as they were fetched, by one launch.

A key's rotary embedding needs the other channel of its pair, which may be in any block of the row: both are decoded,
each from its own bytes. Values are rotated back by a product with the matrix of signs that they were rotated with.
The first tokens of a sequence are exact: their states are read from storage of their own.

Legend: B batch, H key/value heads, D and E head dims of keys and values, K slots of a selection, R bytes of a row, S
exact first tokens.
"""

import torch
import triton
import triton.language as tl

from ..arithmetic import dot_exact
from ..launch import Launch
from .attend import angle_arguments, block_channels, contiguous
from .coding_tiles import levels_of_codes, load_rows
from .launches import CodedRows, RotaryAngles
from .levels import scale_of
from .rotated_queries import load_angles


_BLOCK_TOKENS = 16
# Channels up to which four warps have enough registers
_FEW_CHANNELS = 64
# Channels of values that come of one product
_PRODUCT_CHANNELS = 32
# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = ["num_heads", "capacity", "limit"]


@triton.jit
def load_numbers(
    rows_ptr, tokens, places, in_use, width_ptr, coefficient_ptr, ROW_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode numbers of a head's rows over their deviations, `[tokens, places]`, at any places of a row."""
    blocks = places // 8
    widths = tl.load(width_ptr + blocks, mask=in_use, other=0).to(tl.int32)
    all_blocks = tl.arange(0, BLOCK_N)
    all_widths = tl.load(width_ptr + all_blocks, mask=all_blocks < NUM_BLOCKS, other=0).to(tl.int32)
    is_before = all_blocks[None, :] < blocks[:, None]
    first_bytes = 1 + tl.sum(tl.where(is_before, all_widths[None, :], 0), axis=1)
    first_bits = (places % 8) * widths
    shifts = first_bits & 7
    rows_ptr += tokens.to(tl.int64) * ROW_SIZE
    byte_ptrs = rows_ptr[:, None] + (first_bytes + (first_bits >> 3))[None, :]
    low = tl.load(byte_ptrs, mask=(widths > 0)[None, :], other=0).to(tl.int32)
    # A code of at most eight bits may end in the next byte
    high = tl.load(byte_ptrs + 1, mask=(shifts + widths > 8)[None, :], other=0).to(tl.int32)
    codes = ((low | (high << 8)) >> shifts[None, :]) & ((1 << widths) - 1)[None, :]
    own_ptr = (coefficient_ptr + widths * 4)[None, :]
    factor, first = tl.load(own_ptr), tl.load(own_ptr + 1)
    second, third = tl.load(own_ptr + 2), tl.load(own_ptr + 3)
    levels = levels_of_codes(codes, factor, first, second, third)
    return levels * scale_of(tl.load(rows_ptr).to(tl.float32))[:, None]


@triton.jit
def _load_channels(
    rows_ptr, tokens, places, channels, in_use, width_ptr, coefficient_ptr, mean_ptr, deviation_ptr,
    ROW_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Decode channels of keys before their rotary embedding, which are at `places` of their rows."""
    # fmt: off
    numbers = load_numbers(
        rows_ptr, tokens, places, in_use, width_ptr, coefficient_ptr, ROW_SIZE, NUM_BLOCKS, BLOCK_N)
    # fmt: on
    deviation = tl.load(deviation_ptr + channels, mask=in_use, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + channels, mask=in_use, other=0.0).to(tl.float32)
    return numbers * deviation[None, :] + mean[None, :]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED, do_not_specialize_on_alignment=["key_rows_ptr", "padding_ptr"])
def decode_rows_kernel(
    key_rows_ptr, value_rows_ptr, slots_ptr, count_ptr, states_ptr, padding_ptr, first_keys_ptr, first_values_ptr,
    place_ptr, key_width_ptr, key_coefficient_ptr, key_mean_ptr, key_deviation_ptr, partner_ptr, near_ptr, far_ptr,
    value_width_ptr, value_coefficient_ptr, value_mean_ptr, value_deviation_ptr, sign_ptr, num_heads, capacity, limit,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_ROW_SIZE: tl.constexpr, VALUE_ROW_SIZE: tl.constexpr,
    NUM_FIRST: tl.constexpr, NUM_NEAR: tl.constexpr, ROTARY: tl.constexpr, FACTOR: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Decode some tiles of one head's chosen tokens."""
    matrix = tl.program_id(0).to(tl.int64)
    batch = matrix // num_heads
    padding = 0
    if padding_ptr is not None:
        padding = tl.load(padding_ptr + batch).to(tl.int32)
    NUM_KEY_BLOCKS: tl.constexpr = (KEY_DIM + 7) // 8
    NUM_VALUE_BLOCKS: tl.constexpr = (VALUE_DIM + 7) // 8
    count = tl.minimum(tl.load(count_ptr + matrix), limit).to(tl.int32)
    key_rows_ptr += matrix * capacity * KEY_ROW_SIZE
    value_rows_ptr += matrix * limit * VALUE_ROW_SIZE
    states_ptr += matrix * limit * (KEY_DIM + VALUE_DIM)
    first_keys_ptr += matrix * NUM_FIRST * KEY_DIM
    first_values_ptr += matrix * NUM_FIRST * VALUE_DIM
    key_width_ptr += matrix * NUM_KEY_BLOCKS
    value_width_ptr += matrix * NUM_VALUE_BLOCKS
    key_mean_ptr += matrix * KEY_DIM
    key_deviation_ptr += matrix * KEY_DIM
    channels = tl.arange(0, BLOCK_D)
    channel_in_use = channels < KEY_DIM
    places = tl.load(place_ptr + matrix * KEY_DIM + channels, mask=channel_in_use, other=0).to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK_T, count, tl.num_programs(1) * BLOCK_T):
        tokens = start + tl.arange(0, BLOCK_T)
        in_use = tokens < count
        tokens = tl.minimum(tokens, count - 1)
        slots = tl.load(slots_ptr + matrix * limit + tokens).to(tl.int32)
        indices = slots - padding
        is_exact = in_use & (indices >= 0) & (indices < NUM_FIRST)
        row_ptrs = states_ptr + tokens.to(tl.int64)[:, None] * (KEY_DIM + VALUE_DIM)
        # fmt: off
        keys = _load_channels(
            key_rows_ptr, slots, places, channels, channel_in_use, key_width_ptr, key_coefficient_ptr, key_mean_ptr,
            key_deviation_ptr, KEY_ROW_SIZE, NUM_KEY_BLOCKS, BLOCK_D // 8)
        if ROTARY:
            partners = tl.load(partner_ptr + channels, mask=channel_in_use, other=0)
            partner_places = tl.load(place_ptr + matrix * KEY_DIM + partners, mask=channel_in_use, other=0)
            others = _load_channels(
                key_rows_ptr, slots, partner_places.to(tl.int32), partners, channel_in_use, key_width_ptr,
                key_coefficient_ptr, key_mean_ptr, key_deviation_ptr, KEY_ROW_SIZE, NUM_KEY_BLOCKS, BLOCK_D // 8)
            angle_channels = tl.where(channel_in_use, channels, 0)
            cosines, sines = load_angles(
                near_ptr, far_ptr, indices[:, None], angle_channels[None, :], KEY_DIM, NUM_NEAR)
            keys = keys * cosines + others * sines
        # fmt: on
        exact_ptrs = first_keys_ptr + indices[:, None] * KEY_DIM + channels[None, :]
        exact = tl.load(exact_ptrs, mask=is_exact[:, None] & channel_in_use[None, :], other=0.0).to(tl.float32)
        keys = tl.where(is_exact[:, None], exact, keys)
        key_ptrs = row_ptrs + channels[None, :]
        tl.store(key_ptrs, keys.to(states_ptr.dtype.element_ty), mask=in_use[:, None] & channel_in_use[None, :])

        # fmt: off
        rotated = load_rows(
            value_rows_ptr, tokens, value_width_ptr, value_coefficient_ptr, VALUE_ROW_SIZE, VALUE_DIM, BLOCK_E)
        # fmt: on
        rotated *= tl.load(value_deviation_ptr + matrix).to(tl.float32) * FACTOR
        # fmt: off
        _store_values(
            rotated, row_ptrs + KEY_DIM, in_use, indices, is_exact, first_values_ptr, sign_ptr, value_mean_ptr, matrix,
            VALUE_DIM, BLOCK_C)
        # fmt: on


@triton.jit
def _store_values(
    rotated, row_ptrs, in_use, indices, is_exact, exact_ptr, sign_ptr, mean_ptr, matrix, DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rotate values `[BLOCK_T, BLOCK_E]` back, replace those of exact tokens, and store them."""
    BLOCK_E: tl.constexpr = rotated.shape[1]
    for first in range(0, DIM, BLOCK_C):
        channels = first + tl.arange(0, BLOCK_C)
        channel_in_use = channels < DIM
        sign_ptrs = sign_ptr + channels[None, :] * BLOCK_E + tl.arange(0, BLOCK_E)[:, None]
        signs = tl.load(sign_ptrs, mask=channel_in_use[None, :], other=0.0)
        values = dot_exact(rotated, signs.to(tl.float16), 2)
        if mean_ptr is not None:
            means = tl.load(mean_ptr + matrix * DIM + channels, mask=channel_in_use, other=0.0)
            values += means.to(tl.float32)[None, :]
        exact_ptrs = exact_ptr + indices[:, None] * DIM + channels[None, :]
        exact = tl.load(exact_ptrs, mask=is_exact[:, None] & channel_in_use[None, :], other=0.0).to(tl.float32)
        values = tl.where(is_exact[:, None], exact, values)
        own = values.to(row_ptrs.dtype.element_ty)
        tl.store(row_ptrs + channels[None, :], own, mask=in_use[:, None] & channel_in_use[None, :])


def prepare_decoding(
    keys: CodedRows,
    values: CodedRows,
    slots: torch.Tensor,
    count: torch.Tensor,
    places: torch.Tensor,
    signs: torch.Tensor,
    angles: RotaryAngles | None,
    exact: tuple[torch.Tensor, torch.Tensor],
    padding: torch.Tensor | None,
    most_programs: int,
) -> Launch:
    """
    Prepare the launch that decodes chosen tokens to keys and values side by side, `[B, H, K, D + E]`, in the dtype of
    the exact ones; what lies behind a head's count stays as it is.

    Args:
        keys (`CodedRows`): rows `[B, H, capacity, R]`, contiguous, of all tokens: slot i is position i. Formats are of
            a prompt, without bases.
        values (`CodedRows`): rows `[B, H, K, R]`, contiguous, of the chosen tokens.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64), count (`torch.Tensor` of shape `[B, H]`, int64): the
            selection.
        places (`torch.Tensor` of shape `[B, H, D]`, int16): place of every channel in the rows of keys.
        signs: Hadamard matrix of values, as in `prepare_coding`.
        angles (`RotaryAngles`, *optional*): angles of keys.
        exact (two `torch.Tensor` of shape `[B, H, S, D or E]`, contiguous): first tokens of every sequence.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every sequence that have no
            position.
        most_programs (`int`): programs of the launch.
    """
    batch_size, num_heads, limit = slots.shape
    key_layout, value_layout = keys.layout, values.layout
    key_dim, value_dim = key_layout.head_dim, value_layout.head_dim
    states = exact[0].new_empty(batch_size, num_heads, limit, key_dim + value_dim)
    arguments = {
        "key_rows_ptr": keys.rows,
        "value_rows_ptr": values.rows,
        "slots_ptr": slots,
        "count_ptr": count,
        "states_ptr": states,
        "padding_ptr": padding,
        "first_keys_ptr": exact[0],
        "first_values_ptr": exact[1],
        "place_ptr": places,
        "key_width_ptr": contiguous(key_layout.widths),
        "key_coefficient_ptr": keys.coefficients,
        "key_mean_ptr": contiguous(key_layout.mean),
        "key_deviation_ptr": contiguous(key_layout.deviation),
        **angle_arguments(angles),
        "value_width_ptr": contiguous(value_layout.widths),
        "value_coefficient_ptr": values.coefficients,
        "value_mean_ptr": contiguous(value_layout.mean),
        "value_deviation_ptr": contiguous(value_layout.deviation),
        "sign_ptr": signs,
        "num_heads": num_heads,
        "capacity": keys.rows.shape[2],
        "limit": limit,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "KEY_ROW_SIZE": key_layout.row_size,
        "VALUE_ROW_SIZE": value_layout.row_size,
        "NUM_FIRST": exact[0].shape[2],
        "FACTOR": (value_dim & -value_dim) ** -0.5,
        "BLOCK_T": _BLOCK_TOKENS,
        "BLOCK_D": block_channels(key_dim),
        "BLOCK_E": block_channels(value_dim),
        "BLOCK_C": min(_PRODUCT_CHANNELS, block_channels(value_dim)),
    }
    num_matrices = batch_size * num_heads
    grid = (num_matrices, max(min(most_programs // num_matrices, triton.cdiv(limit, _BLOCK_TOKENS)), 1))
    num_warps = 4 if max(key_dim, value_dim) <= _FEW_CHANNELS else 8
    options = {"num_warps": num_warps, "num_stages": 1, "enable_fp_fusion": False}
    return Launch(decode_rows_kernel, grid, arguments, options, states)
