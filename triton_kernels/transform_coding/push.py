"""Push of new tokens into a layer of rows: one launch a token, the same at every step, with all counts on the device.

    [ older rows ] [ recent rows, with more bits ] [ tail: exact, newest ]

A full tail is packed first: its oldest tokens are encoded behind the recent rows, or behind the older rows of a layer
without recent ones. If there are too many recent rows then, the oldest are requantized behind the older rows: codes
become numbers in registers, and these are encoded with fewer bits. Remaining recent rows and tokens move to the front.
The new token is written behind the tail.

A program takes keys or values of one head. It has counters of its own, so that no program waits for another. Its
threads read what others of them have written, with barriers between.

Legend: B batch, H key/value heads, D and E head dims of keys and values, R bytes of a row.
"""

import torch
import triton
import triton.language as tl

from ..launch import Launch
from .code_rows import code_tile, format_arguments, load_deviations, row_channels
from .coding_tiles import load_rows, row_places, store_rows, tile_tokens
from .launches import Codebook, Format, PushState, RotaryAngles


# Tokens of a tile, as many as the fewest rows of a product
_TILE_TOKENS = 16
# Channels up to which four warps have enough registers, without and with a basis
_FEW_CHANNELS, _FEW_CHANNELS_IN_BASIS = 128, 64
# Numbers of the tail, or bytes of rows, that are moved at once
_MOVED_NUMBERS = 2048
# Kernel arguments of a format that one side alone has
_KEY_ARGUMENTS = {"partner_ptr", "near_ptr", "far_ptr", "NUM_NEAR", "ROTARY"}
_VALUE_ARGUMENTS = {"sign_ptr", "ROTATED"}
# Arguments that differ between layers and options: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_heads",
    "limit",
    "num_kept",
    "capacity",
    "older_capacity",
    "most_recent",
    "num_after",
    "start",
]


@triton.jit(
    do_not_specialize=_NOT_SPECIALIZED,
    do_not_specialize_on_alignment=["new_keys_ptr", "new_values_ptr"],
)
def push_kernel(
    new_keys_ptr, new_values_ptr, keys_ptr, values_ptr, key_rows_ptr, value_rows_ptr, key_older_rows_ptr,
    value_older_rows_ptr, counter_ptr, recent_offset_ptr, padding_ptr, key_order_ptr, key_mean_ptr, key_deviation_ptr,
    key_basis_ptr, key_inverse_ptr, key_step_ptr, key_factor_ptr, key_width_ptr, key_older_width_ptr, key_partner_ptr,
    key_near_ptr, key_far_ptr, key_coefficient_ptr, key_cell_code_ptr, key_cell_bound_ptr, value_sign_ptr,
    value_order_ptr, value_mean_ptr, value_deviation_ptr, value_basis_ptr, value_inverse_ptr, value_step_ptr,
    value_factor_ptr, value_width_ptr, value_older_width_ptr, value_coefficient_ptr, value_cell_code_ptr,
    value_cell_bound_ptr, num_heads, limit, num_kept, capacity, older_capacity, most_recent, num_after, start,
    BASIS: tl.constexpr, PADDED: tl.constexpr, HAS_RECENT: tl.constexpr, KEY_HEAD_DIM: tl.constexpr,
    KEY_NUM_CODED: tl.constexpr, KEY_NUM_DEVIATIONS: tl.constexpr, KEY_ROW_SIZE: tl.constexpr,
    KEY_OLDER_ROW_SIZE: tl.constexpr, KEY_FACTOR: tl.constexpr, KEY_NUM_NEAR: tl.constexpr,
    KEY_NUM_PARTS: tl.constexpr, KEY_ROTARY: tl.constexpr, KEY_WEIGHTED: tl.constexpr, KEY_BY_ENERGY: tl.constexpr,
    KEY_NUM_REFITS: tl.constexpr, KEY_BLOCK_C: tl.constexpr, KEY_BLOCK_K: tl.constexpr, VALUE_HEAD_DIM: tl.constexpr,
    VALUE_NUM_CODED: tl.constexpr, VALUE_NUM_DEVIATIONS: tl.constexpr, VALUE_ROW_SIZE: tl.constexpr,
    VALUE_OLDER_ROW_SIZE: tl.constexpr, VALUE_FACTOR: tl.constexpr, VALUE_NUM_PARTS: tl.constexpr,
    VALUE_ROTATED: tl.constexpr, VALUE_WEIGHTED: tl.constexpr, VALUE_BY_ENERGY: tl.constexpr,
    VALUE_NUM_REFITS: tl.constexpr, VALUE_BLOCK_C: tl.constexpr, VALUE_BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Push a token into the keys or the values of one head."""
    matrix = tl.program_id(0).to(tl.int64)
    batch, head = matrix // num_heads, matrix % num_heads
    is_keys = tl.program_id(1) == 0
    counter_ptr += 4 * (tl.program_id(1) * tl.num_programs(0) + matrix)
    num_older, num_recent = tl.load(counter_ptr), tl.load(counter_ptr + 1)
    num_tail, total = tl.load(counter_ptr + 2), tl.load(counter_ptr + 3)
    padding = 0
    if PADDED:
        padding = tl.load(padding_ptr + batch).to(tl.int32)
    keys_ptr += matrix * limit * KEY_HEAD_DIM
    values_ptr += matrix * limit * VALUE_HEAD_DIM

    count = limit - num_kept
    # Rows behind which tokens are encoded, and rows that become older ones then
    num_rows = num_older
    num_added = count
    num_requantized = 0
    if HAS_RECENT:
        num_rows = num_recent
        num_behind = (num_recent + count).to(tl.int32)
        num_requantized = tl.where(num_behind > most_recent, num_behind - num_after, 0)
        num_added = num_requantized
    # A graph that is replayed beyond the capacity changes nothing
    has_room = (num_tail < limit) | (num_older + num_added <= older_capacity)
    if has_room & (num_tail == limit):
        # fmt: off
        if is_keys:
            position = (total - limit).to(tl.int32) - padding
            _pack(
                keys_ptr, count, num_kept, position, matrix, head, None, key_order_ptr, key_mean_ptr,
                key_deviation_ptr, key_basis_ptr, key_inverse_ptr, key_step_ptr, key_factor_ptr, key_width_ptr,
                key_older_width_ptr, key_partner_ptr, key_near_ptr, key_far_ptr, key_coefficient_ptr,
                key_cell_code_ptr, key_cell_bound_ptr, key_rows_ptr + matrix * capacity * KEY_ROW_SIZE, num_rows,
                key_older_rows_ptr, matrix * older_capacity + num_older, num_requantized, num_after, HAS_RECENT,
                KEY_HEAD_DIM, KEY_NUM_CODED, KEY_NUM_DEVIATIONS, KEY_ROW_SIZE, KEY_OLDER_ROW_SIZE, KEY_FACTOR,
                KEY_NUM_NEAR, KEY_NUM_PARTS, BASIS, KEY_ROTARY, False, KEY_WEIGHTED, KEY_BY_ENERGY, KEY_NUM_REFITS,
                BLOCK_T, KEY_BLOCK_C, KEY_BLOCK_K, BLOCK_M)
        else:
            _pack(
                values_ptr, count, num_kept, padding, matrix, head, value_sign_ptr, value_order_ptr, value_mean_ptr,
                value_deviation_ptr, value_basis_ptr, value_inverse_ptr, value_step_ptr, value_factor_ptr,
                value_width_ptr, value_older_width_ptr, None, None, None, value_coefficient_ptr, value_cell_code_ptr,
                value_cell_bound_ptr, value_rows_ptr + matrix * capacity * VALUE_ROW_SIZE, num_rows,
                value_older_rows_ptr, matrix * older_capacity + num_older, num_requantized, num_after, HAS_RECENT,
                VALUE_HEAD_DIM, VALUE_NUM_CODED, VALUE_NUM_DEVIATIONS, VALUE_ROW_SIZE, VALUE_OLDER_ROW_SIZE,
                VALUE_FACTOR, 1, VALUE_NUM_PARTS, BASIS, False, VALUE_ROTATED, VALUE_WEIGHTED, VALUE_BY_ENERGY,
                VALUE_NUM_REFITS, BLOCK_T, VALUE_BLOCK_C, VALUE_BLOCK_K, BLOCK_M)
        # fmt: on
        num_older += num_added
        if HAS_RECENT:
            num_recent += count - num_requantized
        num_tail = num_kept.to(tl.int64)

    # All threads have read the counters, and what they encode or move
    tl.debug_barrier()
    if has_room:
        channels = tl.arange(0, BLOCK_D)
        if is_keys:
            key = tl.load(new_keys_ptr + matrix * KEY_HEAD_DIM + channels, mask=channels < KEY_HEAD_DIM)
            tl.store(keys_ptr + num_tail * KEY_HEAD_DIM + channels, key, mask=channels < KEY_HEAD_DIM)
        else:
            value = tl.load(new_values_ptr + matrix * VALUE_HEAD_DIM + channels, mask=channels < VALUE_HEAD_DIM)
            tl.store(values_ptr + num_tail * VALUE_HEAD_DIM + channels, value, mask=channels < VALUE_HEAD_DIM)
        if recent_offset_ptr is not None:
            first_recent = total - num_tail - num_recent
            tl.store(recent_offset_ptr + batch, start - first_recent + padding, mask=is_keys & (head == 0))
        tl.store(counter_ptr, num_older)
        tl.store(counter_ptr + 1, num_recent)
        tl.store(counter_ptr + 2, num_tail + 1)
        tl.store(counter_ptr + 3, total + 1)


@triton.jit
def _pack(
    tail_ptr, count, num_kept, position, matrix, head, sign_ptr, order_ptr, mean_ptr, deviation_ptr, basis_ptr,
    inverse_ptr, step_ptr, factor_ptr, width_ptr, older_width_ptr, partner_ptr, near_ptr, far_ptr, coefficient_ptr,
    cell_code_ptr, cell_bound_ptr, rows_ptr, num_rows, older_rows_ptr, first_older, num_requantized, num_after,
    HAS_RECENT: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_CODED: tl.constexpr, NUM_DEVIATIONS: tl.constexpr,
    ROW_SIZE: tl.constexpr, OLDER_ROW_SIZE: tl.constexpr, FACTOR: tl.constexpr, NUM_NEAR: tl.constexpr,
    NUM_PARTS: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr, ROTATED: tl.constexpr, WEIGHTED: tl.constexpr,
    BY_ENERGY: tl.constexpr, NUM_REFITS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Encode a head's `count` oldest tokens behind its rows, requantize the oldest of these, and move the others."""
    for tile in range(0, tl.cdiv(count, BLOCK_T)):
        tokens, token_in_use = tile_tokens(tile, count, BLOCK_T)
        # fmt: off
        code_tile(
            tail_ptr, HEAD_DIM, tokens, token_in_use, position + tokens, matrix, head, sign_ptr, order_ptr, mean_ptr,
            deviation_ptr, basis_ptr, inverse_ptr, step_ptr, factor_ptr, width_ptr, partner_ptr, near_ptr, far_ptr,
            coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr + num_rows * ROW_SIZE, HEAD_DIM, NUM_CODED,
            NUM_DEVIATIONS, ROW_SIZE, FACTOR, NUM_NEAR, NUM_PARTS, BASIS, ROTARY, ROTATED, WEIGHTED, BY_ENERGY,
            NUM_REFITS, BLOCK_C, BLOCK_K)
        # fmt: on
    if HAS_RECENT:
        # fmt: off
        _requantize(
            rows_ptr, older_rows_ptr + first_older * OLDER_ROW_SIZE, num_requantized, num_after, matrix, head,
            order_ptr, deviation_ptr, width_ptr, older_width_ptr, coefficient_ptr, cell_code_ptr, cell_bound_ptr,
            HEAD_DIM, NUM_CODED, NUM_DEVIATIONS, ROW_SIZE, OLDER_ROW_SIZE, BASIS, WEIGHTED, BY_ENERGY, NUM_REFITS,
            BLOCK_T, BLOCK_K, BLOCK_M)
        # fmt: on
    _move_to_front(tail_ptr, count * HEAD_DIM, num_kept * HEAD_DIM, BLOCK_M)


@triton.jit
def _requantize(
    rows_ptr, older_rows_ptr, count, num_after, matrix, head, order_ptr, deviation_ptr, width_ptr, older_width_ptr,
    coefficient_ptr, cell_code_ptr, cell_bound_ptr, HEAD_DIM: tl.constexpr, NUM_CODED: tl.constexpr,
    NUM_DEVIATIONS: tl.constexpr, ROW_SIZE: tl.constexpr, OLDER_ROW_SIZE: tl.constexpr, BASIS: tl.constexpr,
    WEIGHTED: tl.constexpr, BY_ENERGY: tl.constexpr, NUM_REFITS: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Encode a head's first `count` rows with fewer bits, store them, and move the other `num_after` to the front."""
    NUM_BLOCKS: tl.constexpr = (NUM_CODED + 7) // 8
    row_format = head if BASIS else matrix
    if count > 0:
        # Other threads may have stored some of the rows just now
        tl.debug_barrier()
        for tile in range(0, tl.cdiv(count, BLOCK_T)):
            rows, row_in_use = tile_tokens(tile, count, BLOCK_T)
            # fmt: off
            normal = load_rows(
                rows_ptr, rows, width_ptr + row_format * NUM_BLOCKS, coefficient_ptr, ROW_SIZE, NUM_CODED, BLOCK_K)
            # fmt: on
            if NUM_DEVIATIONS > 0:
                places = row_places(BLOCK_K)
                in_use = places < NUM_CODED
                channels = row_channels(order_ptr, matrix, places, in_use, HEAD_DIM)
                # Rounds as if states were decoded, and makes channels that do not vary zero
                # fmt: off
                deviation, inverse = load_deviations(
                    deviation_ptr, matrix, channels, in_use, HEAD_DIM, NUM_DEVIATIONS)
                # fmt: on
                normal = normal * deviation[None, :] * inverse[None, :]
            # fmt: off
            store_rows(
                normal, rows, row_in_use, older_width_ptr + row_format * NUM_BLOCKS, coefficient_ptr, cell_code_ptr,
                cell_bound_ptr, older_rows_ptr, OLDER_ROW_SIZE, NUM_BLOCKS, WEIGHTED, BY_ENERGY, NUM_REFITS)
            # fmt: on
        _move_to_front(rows_ptr, count * ROW_SIZE, num_after * ROW_SIZE, BLOCK_M)


@triton.jit
def _move_to_front(numbers_ptr, distance, length, BLOCK_M: tl.constexpr):
    """Move the `length` numbers that follow the first `distance` numbers to the front."""
    for first in range(0, length, BLOCK_M):
        places = first + tl.arange(0, BLOCK_M)
        numbers = tl.load(numbers_ptr + distance + places, mask=places < length, other=0)
        # All threads have read what stands where others write
        tl.debug_barrier()
        tl.store(numbers_ptr + places, numbers, mask=places < length)


def prepare_push(
    state: PushState[Format],
    codebooks: tuple[Codebook, Codebook],
    signs: torch.Tensor | None = None,
    angles: RotaryAngles | None = None,
) -> Launch:
    """
    Prepare the launch that pushes a token: keys `new_keys_ptr` `[B, H, 1, D]`, values `new_values_ptr` `[B, H, 1, E]`.

    Args:
        state (`PushState`): the layer.
        codebooks (two `Codebook`): codes of keys and of values.
        signs, angles: as in `prepare_coding`, signs of values and angles of keys, up to `state.num_positions`.
    """
    batch_size, num_heads, limit, _ = state.tail[0].shape
    if not 0 <= state.num_kept < limit:
        raise ValueError(f"`num_kept` has to be less than the tail's {limit} tokens, not {state.num_kept}")
    has_recent = state.recent is not None and state.finer_formats is not None
    rows = state.recent if has_recent else state.older
    encoded_formats = state.finer_formats if has_recent else state.formats
    assert rows is not None and encoded_formats is not None
    arguments: dict[str, object] = {}
    sides = (("key", None, angles, _VALUE_ARGUMENTS), ("value", signs, None, _KEY_ARGUMENTS))
    for index, (name, own_signs, own_angles, other_arguments) in enumerate(sides):
        row_format, older_format = encoded_formats[index], state.formats[index]
        own = {
            **format_arguments(row_format, codebooks[index], own_signs, own_angles, state.tail[0].dtype),
            "rows_ptr": rows[index],
            "older_rows_ptr": state.older[index] if has_recent else None,
            "older_width_ptr": older_format.widths.contiguous() if has_recent else None,
            "OLDER_ROW_SIZE": older_format.row_size,
        }
        for argument in own.keys() - other_arguments:
            arguments[f"{name.upper() if argument.isupper() else name}_{argument}"] = own[argument]
    most_channels = max(each.head_dim for each in state.formats)
    arguments |= {
        "new_keys_ptr": state.tail[0],
        "new_values_ptr": state.tail[1],
        "keys_ptr": state.tail[0],
        "values_ptr": state.tail[1],
        "counter_ptr": state.counters,
        "recent_offset_ptr": state.recent_offset,
        "padding_ptr": state.padding,
        "num_heads": num_heads,
        "limit": limit,
        "num_kept": state.num_kept,
        "capacity": rows[0].shape[2],
        "older_capacity": state.older[0].shape[2],
        "most_recent": state.most_recent,
        "num_after": state.num_after,
        "start": state.start,
        "BASIS": state.formats[0].basis is not None,
        "PADDED": state.padding is not None,
        "HAS_RECENT": has_recent,
        "BLOCK_D": triton.next_power_of_2(most_channels),
        "BLOCK_T": _TILE_TOKENS,
        "BLOCK_M": _MOVED_NUMBERS,
    }
    # Tiles are small for their warps: without fused products, lanes that hold the same sum have the same one, see
    # `combine`
    few_channels = _FEW_CHANNELS if state.formats[0].basis is None else _FEW_CHANNELS_IN_BASIS
    num_warps = 4 if most_channels <= few_channels else 8
    options = {"enable_fp_fusion": False, "num_warps": num_warps, "num_stages": 1}
    return Launch(push_kernel, (batch_size * num_heads, 2), arguments, options, None)
