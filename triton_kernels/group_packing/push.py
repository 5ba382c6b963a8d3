"""Push of new tokens into a layer of chunks: the same launches for every token, with all counts on the device.

    [ chunks ] [ tail: exact, newest ]

A full tail is packed first, whole, as the next chunk. The new token is written behind the tail. Every launch is made
for every token, and all but the last return at once unless the tail is full: `select_kernel`, if outliers or scales of
values are those of all heads of a token, and `push_kernel`.

A program of `push_kernel` takes keys or values of one head. It has counters of its own, so that no program waits for
another. Its threads read what others of them have written, with barriers between.

Legend: B batch, H key/value heads, L tokens a chunk, D and E head dims of keys and values, R rank, K outliers of a
channel of keys, or of a token of values, on each side.
"""

import torch
import triton
import triton.language as tl

from ..arithmetic import dot_exact
from ..launch import Launch
from .arithmetic import (
    inverse_of,
    multiply_columns,
    orthonormalize,
    round_by_thresholds,
    round_even,
    scale_columns,
    scale_of,
    share_errors,
)
from .launches import GroupPushState, packed_side
from .select import select_kernel


# Channels of a product with signs at once, and entries that are sorted at once
_PRODUCT_CHANNELS, _ENTRIES = 32, 1024
# Numbers that four and that eight warps hold in registers
_FEW_NUMBERS, _MANY_NUMBERS = 2048, 8192
# Halves that a product with float32 states is made of
_NUM_PARTS = 3


# fmt: off
@triton.jit(
    do_not_specialize=["num_heads", "capacity", "num_iterations"],
    do_not_specialize_on_alignment=["new_keys_ptr", "new_values_ptr"],
)
def push_kernel(
    new_keys_ptr, new_values_ptr, keys_ptr, values_ptr, counter_ptr, sign_ptr, column_ptr, bound_ptr, key_codes_ptr,
    key_scale_ptr, key_zero_ptr, key_a_ptr, key_b_ptr, key_start_ptr, key_index_ptr, key_outlier_ptr, key_offset_ptr,
    value_codes_ptr, value_scale_ptr, value_zero_ptr, value_a_ptr, value_b_ptr, value_start_ptr, value_index_ptr,
    value_outlier_ptr, value_offset_ptr, num_heads, capacity, num_iterations, KEY: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
):
    """Push a token into the keys or the values of one head."""
    matrix = tl.program_id(0).to(tl.int64)
    is_keys = tl.program_id(1) == 0
    counter_ptr += 4 * (tl.program_id(1) * tl.num_programs(0) + matrix)
    num_packed, num_tail = tl.load(counter_ptr), tl.load(counter_ptr + 2)
    total = tl.load(counter_ptr + 3)
    keys_ptr += matrix * KEY.length * KEY.dim
    values_ptr += matrix * VALUE.length * VALUE.dim
    is_full = num_tail == KEY.length
    chunk = num_packed // KEY.length
    # A graph that is replayed beyond the capacity changes nothing
    has_room = (num_tail < KEY.length) | (chunk < capacity)
    if has_room & is_full:
        if is_keys:
            _pack(
                keys_ptr, None, None, None, key_codes_ptr, key_scale_ptr, key_zero_ptr, key_a_ptr, key_b_ptr,
                key_start_ptr, key_index_ptr, key_outlier_ptr, key_offset_ptr, matrix, num_heads, capacity, chunk,
                num_iterations, KEY, BLOCK_C, BLOCK_E, PARTS)
        else:
            _pack(
                values_ptr, sign_ptr, column_ptr, bound_ptr, value_codes_ptr, value_scale_ptr, value_zero_ptr,
                value_a_ptr, value_b_ptr, value_start_ptr, value_index_ptr, value_outlier_ptr, value_offset_ptr,
                matrix, num_heads, capacity, chunk, num_iterations, VALUE, BLOCK_C, BLOCK_E, PARTS)
        num_packed += KEY.length
        num_tail = tl.zeros_like(num_tail)

    # All threads have read the counters, and what they encode
    tl.debug_barrier()
    if has_room:
        if is_keys:
            _store_token(new_keys_ptr + matrix * KEY.dim, keys_ptr + num_tail * KEY.dim, KEY)
        else:
            _store_token(new_values_ptr + matrix * VALUE.dim, values_ptr + num_tail * VALUE.dim, VALUE)
        tl.store(counter_ptr, num_packed)
        tl.store(counter_ptr + 2, num_tail + 1)
        tl.store(counter_ptr + 3, total + 1)
# fmt: on


@triton.jit
def _store_token(new_ptr, token_ptr, SIDE: tl.constexpr):
    channels = tl.arange(0, SIDE.block_dim)
    in_use = channels < SIDE.dim
    tl.store(token_ptr + channels, tl.load(new_ptr + channels, mask=in_use), mask=in_use)


@triton.jit
def _pack(
    tail_ptr, sign_ptr, column_ptr, bound_ptr, codes_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, start_ptr, index_ptr,
    outlier_ptr, offset_ptr, matrix, num_heads, capacity, chunk, num_iterations, SIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Encode the tail of one head as a chunk."""
    batch, head = matrix // num_heads, matrix % num_heads
    own_chunk = matrix * capacity + chunk
    shared_chunk = batch * capacity + chunk
    tokens = tl.arange(0, SIDE.block_length)[:, None]
    channels = tl.arange(0, SIDE.block_dim)[None, :]
    in_use = (tokens < SIDE.length) & (channels < SIDE.dim)
    if SIDE.is_rotated:
        states = _load_rotated(tail_ptr, sign_ptr, SIDE, BLOCK_C, PARTS)
    else:
        states = tl.load(tail_ptr + tokens * SIDE.dim + channels, mask=in_use, other=0.0).to(tl.float32)
    keep = in_use
    if SIDE.num_outliers > 0:
        index_ptr += shared_chunk * SIDE.num_entries
        outlier_ptr += shared_chunk * SIDE.num_entries
        offset_ptr += shared_chunk * (num_heads + 1)
        if SIDE.is_key:
            index_ptr += head * (2 * SIDE.num_outliers * SIDE.dim)
            outlier_ptr += head * (2 * SIDE.num_outliers * SIDE.dim)
            keep = _select_of_channels(states, keep, index_ptr, SIDE)
        else:
            column_ptr += batch * (SIDE.length * 2 * SIDE.num_outliers)
            bound_ptr += batch * (SIDE.length * 2)
            keep = _keep_between(states, keep, column_ptr, bound_ptr, head, SIDE)

    if SIDE.is_shared:
        scale_ptr += shared_chunk * SIDE.length
        zero_ptr += shared_chunk * SIDE.length
        steps, zeros = _load_shared(scale_ptr, zero_ptr, SIDE)
    else:
        num_scales: tl.constexpr = SIDE.num_groups * (SIDE.dim if SIDE.by_channel else SIDE.length)
        scale_ptr += own_chunk * num_scales
        zero_ptr += own_chunk * num_scales
        steps, zeros = _store_scales(states, keep, scale_ptr, zero_ptr, SIDE)
    numbers = (states - zeros) * inverse_of(steps)
    # False, as a number of the device: a kernel without spreads passes it on, too
    spread = tl.program_id(0) < 0
    if SIDE.spreads:
        spread = share_errors(numbers, keep, SIDE)
    codes = _round(numbers, tokens, channels, spread, SIDE)
    _store_codes(codes, codes_ptr + own_chunk * (SIDE.length * SIDE.row_size), SIDE)

    if SIDE.rank > 0:
        residual = tl.where(keep, states - (codes * steps + zeros), 0.0)
        a_ptr += own_chunk * (SIDE.length * SIDE.rank)
        b_ptr += own_chunk * (SIDE.dim * SIDE.rank)
        _store_factors(residual, a_ptr, b_ptr, start_ptr, num_iterations, SIDE)
    if SIDE.num_outliers > 0:
        # What other threads have stored is read
        tl.debug_barrier()
        # fmt: off
        if SIDE.is_key:
            _store_outliers_of_channels(
                tail_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, index_ptr, outlier_ptr, spread, SIDE)
            num_own = 2 * SIDE.num_outliers * SIDE.dim
            tl.store(offset_ptr + head, (head * num_own).to(tl.int32))
        else:
            _store_outliers_of_tokens(
                tail_ptr, column_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, index_ptr, outlier_ptr, offset_ptr, head,
                spread, SIDE, BLOCK_E)
        # fmt: on
        if head == num_heads - 1:
            tl.store(offset_ptr + num_heads, SIDE.num_entries)


@triton.jit
def _load_rotated(tail_ptr, sign_ptr, SIDE: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr):
    """Load all tokens of a head, multiplied by the Hadamard matrix, `[tokens, channels]`."""
    tokens = tl.arange(0, SIDE.block_length)[:, None]
    rotated = tl.zeros([SIDE.block_length, SIDE.block_dim], tl.float32)
    for first in range(0, SIDE.dim, BLOCK_C):
        own = first + tl.arange(0, BLOCK_C)
        in_use = (tokens < SIDE.length) & (own < SIDE.dim)[None, :]
        states = tl.load(tail_ptr + tokens * SIDE.dim + own[None, :], mask=in_use, other=0.0)
        sign_ptrs = sign_ptr + own[:, None] * SIDE.block_dim + tl.arange(0, SIDE.block_dim)[None, :]
        signs = tl.load(sign_ptrs, mask=(own < SIDE.dim)[:, None], other=0.0)
        if tail_ptr.dtype.element_ty == sign_ptr.dtype.element_ty:
            rotated = tl.dot(states, signs, rotated)
        else:
            rotated += dot_exact(states.to(tl.float32), signs, PARTS)
    return rotated * SIDE.rotation


@triton.jit
def _select_of_channels(states, free, index_ptr, SIDE: tl.constexpr):
    """Store the places of every channel's largest and smallest values; return the values that are none of them."""
    tokens = tl.arange(0, SIDE.block_length)[:, None]
    channels = tl.arange(0, SIDE.block_dim)
    for number in range(2 * SIDE.num_outliers):
        # Signs are turned for the smallest
        sign = tl.where(number < SIDE.num_outliers, 1.0, -1.0)
        ranked = tl.where(free, states * sign, float("-inf"))
        bound = tl.max(ranked, axis=0)
        found = tl.min(tl.where(free & (ranked == bound[None, :]), tokens, SIDE.length - 1), axis=0)
        place = (found << SIDE.channel_bits) + channels
        tl.store(index_ptr + number * SIDE.dim + channels, place, mask=channels < SIDE.dim)
        free = free & (tokens != found[None, :])
    return free


@triton.jit
def _keep_between(states, keep, column_ptr, bound_ptr, head, SIDE: tl.constexpr):
    """Return the values that are no outliers of their tokens; among equal ones the first columns are outliers."""
    tokens = tl.arange(0, SIDE.block_length)
    in_use = tokens < SIDE.length
    columns = (head * SIDE.dim + tl.arange(0, SIDE.block_dim))[None, :]
    last_ptr = column_ptr + tokens * (2 * SIDE.num_outliers) + SIDE.num_outliers - 1
    high = tl.load(bound_ptr + 2 * tokens, mask=in_use, other=0.0)[:, None]
    high_column = tl.load(last_ptr, mask=in_use, other=0)[:, None]
    low = tl.load(bound_ptr + 2 * tokens + 1, mask=in_use, other=0.0)[:, None]
    low_column = tl.load(last_ptr + SIDE.num_outliers, mask=in_use, other=0)[:, None]
    is_outlier = (states > high) | ((states == high) & (columns <= high_column))
    is_outlier |= (states < low) | ((states == low) & (columns <= low_column))
    return keep & (is_outlier == 0)


@triton.jit
def _load_shared(scale_ptr, zero_ptr, SIDE: tl.constexpr):
    """Load the scales of all tokens, `[tokens, 1]`."""
    tokens = tl.arange(0, SIDE.block_length)[:, None]
    in_use = tokens < SIDE.length
    steps = tl.load(scale_ptr + tokens, mask=in_use, other=0.0).to(tl.float32)
    return steps, tl.load(zero_ptr + tokens, mask=in_use, other=0.0).to(tl.float32)


@triton.jit
def _store_scales(states, keep, scale_ptr, zero_ptr, SIDE: tl.constexpr):
    """Find and store the scales of all groups; return steps and zeros of all values."""
    AXIS: tl.constexpr = 0 if SIDE.by_channel else 1
    BLOCK: tl.constexpr = SIDE.block_dim if SIDE.by_channel else SIDE.block_length
    SIZE: tl.constexpr = SIDE.dim if SIDE.by_channel else SIDE.length
    others = tl.arange(0, BLOCK)
    along = tl.expand_dims(tl.arange(0, SIDE.block_length if SIDE.by_channel else SIDE.block_dim), 1 - AXIS)
    # NaN if a value is not finite
    poison = tl.sum(states - states, axis=AXIS)
    steps, zeros = states * 0.0, states * 0.0
    for group in range(SIDE.num_groups):
        is_own = (along // SIDE.group_size == group) & keep
        low = tl.min(tl.where(is_own, states, float("inf")), axis=AXIS)
        high = tl.max(tl.where(is_own, states, float("-inf")), axis=AXIS)
        scale, zero = scale_of(low, high, poison, SIDE.levels)
        place = group * SIZE + others if SIDE.by_channel else others * SIDE.num_groups + group
        tl.store(scale_ptr + place, scale, mask=others < SIZE)
        tl.store(zero_ptr + place, zero, mask=others < SIZE)
        is_in_group = along // SIDE.group_size == group
        steps = tl.where(is_in_group, tl.expand_dims(scale.to(tl.float32), AXIS), steps)
        zeros = tl.where(is_in_group, tl.expand_dims(zero.to(tl.float32), AXIS), zeros)
    return steps, zeros


@triton.jit
def _round(numbers, tokens, channels, spread, SIDE: tl.constexpr):
    """Round numbers to codes, float32."""
    codes = round_even(numbers)
    if SIDE.spreads:
        codes = tl.where(spread, round_by_thresholds(numbers, tokens, channels, SIDE.length), codes)
    return tl.minimum(tl.maximum(codes, 0.0), 1.0 * SIDE.levels)


@triton.jit
def _store_codes(codes, codes_ptr, SIDE: tl.constexpr):
    """Store codes `[tokens, channels]` as bytes: slabs of channels lie in different bits of a byte."""
    numbers = codes.to(tl.int32)
    for p in tl.static_range(len(SIDE.planes)):
        _store_plane(numbers, codes_ptr, SIDE, p, SIDE.planes[p].block, SIDE.planes[p].width)


@triton.jit
def _store_plane(
    numbers, codes_ptr, SIDE: tl.constexpr, PLANE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    tokens = tl.arange(0, SIDE.block_length)[:, None]
    places = tl.arange(0, BLOCK)[None, :]
    packed = tl.zeros([SIDE.block_length, BLOCK], tl.int32)
    for slab in tl.static_range(8 // WIDTH):
        channels = places + slab * SIDE.planes[PLANE].num_bytes
        in_use = channels < SIDE.dim
        source = tl.broadcast_to(tl.where(in_use, channels, 0), [SIDE.block_length, BLOCK])
        own = (tl.gather(numbers, source, axis=1) >> SIDE.planes[PLANE].shift) & ((1 << WIDTH) - 1)
        packed |= tl.where(in_use, own, 0) << (slab * WIDTH)
    in_use = (tokens < SIDE.length) & (places < SIDE.planes[PLANE].num_bytes)
    pointers = codes_ptr + tokens * SIDE.row_size + places + SIDE.planes[PLANE].first_byte
    tl.store(pointers, packed.to(tl.uint8), mask=in_use)


@triton.jit
def _store_factors(residual, a_ptr, b_ptr, start_ptr, num_iterations, SIDE: tl.constexpr):
    """Find and store the factors of the residual `[tokens, channels]` by power iteration."""
    tokens, channels = tl.arange(0, SIDE.block_length), tl.arange(0, SIDE.block_dim)
    b = ()
    for i in tl.static_range(SIDE.rank):
        b = b + (tl.load(start_ptr + channels * SIDE.rank + i, mask=channels < SIDE.dim, other=0.0),)
    for _ in range(num_iterations - 1):
        b = multiply_columns(residual, scale_columns(multiply_columns(residual, b, 1)), 0)
    a = orthonormalize(multiply_columns(residual, orthonormalize(b), 1))
    b = multiply_columns(residual, a, 0)
    for i in tl.static_range(SIDE.rank):
        tl.store(a_ptr + tokens * SIDE.rank + i, a[i].to(tl.float16), mask=tokens < SIDE.length)
        tl.store(b_ptr + channels * SIDE.rank + i, b[i].to(tl.float16), mask=channels < SIDE.dim)


@triton.jit
def _remaining_errors(
    tail_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, tokens, channels, in_use, spread, SIDE: tl.constexpr
):  # fmt: skip
    """Return what codes and low rank lack of states at some places."""
    states = tl.load(tail_ptr + tokens * SIDE.dim + channels, mask=in_use, other=0.0).to(tl.float32)
    if SIDE.by_channel:
        scales = tokens // SIDE.group_size * SIDE.dim + channels
    elif SIDE.is_shared:
        scales = tokens
    else:
        scales = tokens * SIDE.num_groups + channels // SIDE.group_size
    step = tl.load(scale_ptr + scales, mask=in_use, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + scales, mask=in_use, other=0.0).to(tl.float32)
    codes = _round((states - zero) * inverse_of(step), tokens, channels, spread, SIDE)
    missing = states - (codes * step + zero)
    if SIDE.rank > 0:
        correction = tl.zeros_like(missing)
        for i in tl.static_range(SIDE.rank):
            a = tl.load(a_ptr + tokens * SIDE.rank + i, mask=in_use, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + channels * SIDE.rank + i, mask=in_use, other=0.0).to(tl.float32)
            correction += a * b
        missing -= correction
    return missing


@triton.jit
def _store_outliers_of_channels(
    tail_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, index_ptr, outlier_ptr, spread, SIDE: tl.constexpr
):  # fmt: skip
    """Store what is missing at the places of a head's outliers: the first of all channels, the second, and so on."""
    channels = tl.arange(0, SIDE.block_dim)
    in_use = channels < SIDE.dim
    for number in range(2 * SIDE.num_outliers):
        places = number * SIDE.dim + channels
        tokens = tl.load(index_ptr + places, mask=in_use, other=0).to(tl.int32) >> SIDE.channel_bits
        # fmt: off
        missing = _remaining_errors(
            tail_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, tokens, channels, in_use, spread, SIDE)
        # fmt: on
        tl.store(outlier_ptr + places, missing.to(tl.float16), mask=in_use)


@triton.jit
def _store_outliers_of_tokens(
    tail_ptr, column_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, index_ptr, outlier_ptr, offset_ptr, head, spread,
    SIDE: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Store a head's outliers, in the order of tokens, behind those of heads before it."""
    NUM_OF_TOKEN: tl.constexpr = 2 * SIDE.num_outliers
    first = tl.zeros([], tl.int32)
    for block in range(0, SIDE.num_entries, BLOCK_E):
        entries = block + tl.arange(0, BLOCK_E)
        columns = tl.load(column_ptr + entries, mask=entries < SIDE.num_entries, other=2**30)
        first += tl.sum((columns // SIDE.dim < head).to(tl.int32), axis=0)
    tl.store(offset_ptr + head, first)
    for block in range(0, SIDE.num_entries, BLOCK_E):
        entries = block + tl.arange(0, BLOCK_E)
        columns = tl.load(column_ptr + entries, mask=entries < SIDE.num_entries, other=2**30)
        is_own = columns // SIDE.dim == head
        tokens, channels = entries // NUM_OF_TOKEN, columns % SIDE.dim
        # fmt: off
        missing = _remaining_errors(
            tail_ptr, scale_ptr, zero_ptr, a_ptr, b_ptr, tokens, channels, is_own, spread, SIDE)
        # fmt: on
        counted = tl.cumsum(is_own.to(tl.int32), axis=0)
        places = first + counted - 1
        tl.store(index_ptr + places, (tokens << SIDE.channel_bits) + channels, mask=is_own)
        tl.store(outlier_ptr + places, missing.to(tl.float16), mask=is_own)
        first += tl.sum(is_own.to(tl.int32), axis=0)


def prepare_group_push(state: GroupPushState) -> list[Launch]:
    """
    Prepare the launches that push a token: keys `new_keys_ptr` `[B, H, 1, D]`, values `new_values_ptr` `[B, H, 1, E]`
    of the last one.
    """
    keys, values = state.chunks
    assert all(each.is_contiguous() for each in state.tail), "the kernels take no strides"
    tail, device = state.tail, state.tail[0].device
    batch_size, num_heads, length, _ = tail[0].shape
    is_rotated = state.signs is not None
    key = packed_side(keys, is_key=True, spreads=state.spreads_errors[0], is_rotated=False)
    value = packed_side(values, is_key=False, spreads=state.spreads_errors[1], is_rotated=is_rotated)
    capacity = keys.codes.shape[2]
    columns = bounds = None
    if value.num_outliers:
        columns = torch.zeros(batch_size, length, 2 * value.num_outliers, dtype=torch.int32, device=device)
        bounds = torch.zeros(batch_size, length, 2, dtype=torch.float32, device=device)
    launches = []
    options = {"enable_fp_fusion": False, "num_stages": 1}
    if value.num_outliers or value.is_shared:
        block_heads = triton.next_power_of_2(num_heads)
        arguments = {
            "values_ptr": tail[1],
            "counter_ptr": state.counters[1],
            "column_ptr": columns,
            "bound_ptr": bounds,
            "scale_ptr": values.scale,
            "zero_ptr": values.zero,
            "num_heads": num_heads,
            "capacity": capacity,
            "SIDE": value,
            "BLOCK_H": block_heads,
        }
        num_warps = _count_warps(block_heads * value.block_dim)
        launches.append(
            Launch(select_kernel, (batch_size * length,), arguments, {**options, "num_warps": num_warps}, None)
        )
    arguments = {
        "new_keys_ptr": tail[0],
        "new_values_ptr": tail[1],
        "keys_ptr": tail[0],
        "values_ptr": tail[1],
        "counter_ptr": state.counters,
        "sign_ptr": state.signs,
        "column_ptr": columns,
        "bound_ptr": bounds,
        "num_heads": num_heads,
        "capacity": capacity,
        "num_iterations": state.num_iterations,
        "KEY": key,
        "VALUE": value,
        "BLOCK_C": _PRODUCT_CHANNELS,
        "BLOCK_E": _ENTRIES,
        "PARTS": _NUM_PARTS,
    }
    for name, side, start in (("key", keys, state.starts[0]), ("value", values, state.starts[1])):
        stored = {
            f"{name}_codes_ptr": side.codes,
            f"{name}_scale_ptr": side.scale,
            f"{name}_zero_ptr": side.zero,
            f"{name}_a_ptr": side.low_rank_a,
            f"{name}_b_ptr": side.low_rank_b,
            f"{name}_start_ptr": start,
            f"{name}_index_ptr": side.outlier_indices,
            f"{name}_outlier_ptr": side.outlier_values,
            f"{name}_offset_ptr": side.outlier_offsets,
        }
        assert all(each is None or each.is_contiguous() for each in stored.values()), "the kernels take no strides"
        arguments |= stored
    num_warps = _count_warps(max(side.block_length * side.block_dim for side in (key, value)))
    launches.append(
        Launch(push_kernel, (batch_size * num_heads, 2), arguments, {**options, "num_warps": num_warps}, None)
    )
    return launches


def _count_warps(num_numbers: int) -> int:
    """Count the warps of a program that holds so many numbers several times over."""
    if num_numbers <= _FEW_NUMBERS:
        return 4
    return 8 if num_numbers <= _MANY_NUMBERS else 16
