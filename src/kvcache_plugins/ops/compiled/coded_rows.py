"""Tokens of which keys and values are codes, made dense for `attend_rows` on a CPU: only those that were chosen.

In plain PyTorch it takes some twenty operations over all of them, each through memory. Here a token is read once, and
written once; what it lies in is told by numbers, so there is one compiled function for all.

Legend: B batch, H key/value heads, D and E head dims of keys and values, K slots, S sink tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import float32, int32, njit, uint16

from kvcache_plugins.ops.quantization import packed_planes
from kvcache_plugins.ops.rotation import rotation_size

from .arrays import bytes_at, floats_at, halves_at, longs_at
from .primitives import OPTIONS, WORKER, to_floats
from .threads import FIRST, num_tasks, run, take_task
from .tile import rotate_row
from .vectors import (
    LANES,
    add,
    broadcast,
    float_of_half,
    load_bytes,
    load_floats,
    masked_to_floats,
    multiply,
    multiply_add,
    store_floats,
)


class KeyCodes(NamedTuple):
    """
    Keys in groups of tokens: a number is `zero + scale * code`, both of its channel in its group.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, groups, tokens of a group, bytes]`, uint8): see `ops.quantization.pack`.
        scale, zero (`torch.Tensor` of shape `[B, H, groups, D]`, float16): a channel's step and minimum.
        nbits (`int`): bits a code.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    nbits: int


@njit(**OPTIONS)
def _widen_plane(rows: Any, row: int, start: int, plane: Any, number: int, codes: Any) -> None:
    """One plane of a token's codes, whose bytes begin at `start`, as floats in row `number` of `codes`."""
    bits, shift, size = plane
    mask = (1 << bits) - 1
    if size < LANES:
        for field in range(8 // bits):
            for j in range(size):
                code = (rows[row, start + j] >> (bits * field)) & mask
                codes[number, field * size + j] = float32(code << shift)
        return
    for offset in range(0, size, LANES):
        # The last vector may not reach beyond the row: it repeats some of the one before
        offset = min(offset, size - LANES)
        packed = load_bytes(rows, row, start + offset)
        for field in range(8 // bits):
            weight = broadcast(float32(1 << shift) / float32(1 << (bits * field)))
            part = masked_to_floats(packed, int32(mask << (bits * field)))
            store_floats(codes, number, field * size + offset, multiply(part, weight))


@njit(**OPTIONS)
def _widen_codes(rows: Any, row: int, planes: Any, codes: Any) -> None:
    """The codes of a token, the planes of which are in row `row` of `[any, bytes]`, in the first row of `codes`."""
    start = 0
    for number in range(planes.shape[0]):
        plane = planes[number, 0], planes[number, 1], planes[number, 2]
        _widen_plane(rows, row, start, plane, number, codes)
        start += planes[number, 2]
    if planes.shape[0] > 1:
        for d in range(0, codes.shape[1], LANES):
            store_floats(codes, 0, d, add(load_floats(codes, 0, d), load_floats(codes, 1, d)))


@njit(**OPTIONS)
def _write_key(codes: Any, steps: Any, minima: Any, key_dim: int, out: Any, row: int) -> None:
    """`minimum + step * code`, each of its channel."""
    whole = key_dim - key_dim % LANES
    for d in range(0, whole, LANES):
        number = multiply_add(load_floats(codes, 0, d), load_floats(steps, 0, d), load_floats(minima, 0, d))
        store_floats(out, row, d, number)
    for d in range(whole, key_dim):
        out[row, d] = minima[0, d] + steps[0, d] * codes[0, d]


@njit(**OPTIONS)
def _write_value(codes: Any, step: Any, minimum: Any, first: int, stop: int, out: Any, row: int, column: int) -> None:
    """`minimum + step * code` of the channels from `first` to `stop`; channel 0 goes to `column`."""
    whole = stop - (stop - first) % LANES
    steps, minima = broadcast(step), broadcast(minimum)
    for d in range(first, whole, LANES):
        store_floats(out, row, column + d, multiply_add(load_floats(codes, 0, d), steps, minima))
    for d in range(whole, stop):
        out[row, column + d] = minimum + step * codes[0, d]


@njit(**OPTIONS)
def _half_at(rows: Any, row: int, place: int) -> Any:
    """The float16 whose two bytes begin at a place of a row."""
    return float_of_half(uint16(uint16(rows[row, place]) | uint16(rows[row, place + 1]) << uint16(8)))


@njit(**OPTIONS)
def _widen_head(matrix: int, shape: Any, keys: Any, values: Any, chosen: Any, sinks: Any, out_address: int) -> None:
    """All chosen tokens of one head; see `_widen`."""
    num_matrices, num_heads, num_slots, key_dim, value_dim, num_sinks = shape
    code_address, scale_address, zero_address, num_groups, group_size, key_bytes, key_planes_at, num_key_planes = keys
    pages_at, num_pages, page_tokens, row_bytes, group_channels, value_planes_at, num_value_planes, turned = values
    slots = longs_at(chosen[0], (num_matrices, num_slots))[matrix]
    places = longs_at(chosen[1], (num_matrices, num_slots))[matrix]
    count = longs_at(chosen[2], (num_matrices,))[matrix]
    first_slot = longs_at(sinks[0], (num_matrices // num_heads,))[matrix // num_heads]
    sink_keys = floats_at(sinks[1], (num_matrices * num_sinks, key_dim))
    sink_values = floats_at(sinks[2], (num_matrices * num_sinks, value_dim))
    codes = bytes_at(code_address, (num_matrices, num_groups * group_size, key_bytes))[matrix]
    scale = halves_at(scale_address, (num_matrices, num_groups, key_dim))[matrix]
    zero = halves_at(zero_address, (num_matrices, num_groups, key_dim))[matrix]
    key_planes = longs_at(key_planes_at, (num_key_planes, 3))
    value_planes = longs_at(value_planes_at, (num_value_planes, 3))
    pages = longs_at(pages_at, (num_pages,))
    out = floats_at(out_address, (num_matrices, num_slots, key_dim + value_dim))[matrix]
    code_bytes = 0
    for plane in range(num_value_planes):
        code_bytes += value_planes[plane, 2]
    value_groups = value_dim // group_channels
    # Vectors are written whole, and a plane's bytes may stand for more channels than there are
    padded = -(-max(key_dim, value_dim) // LANES) * LANES + LANES
    numbers = np.zeros((2, padded), dtype=np.float32)
    steps, minima = np.empty((1, padded), dtype=np.float32), np.empty((1, padded), dtype=np.float32)
    for k in range(count):
        slot, place = slots[k], places[k]
        number = slot - first_slot
        if 0 <= number < num_sinks:
            for d in range(key_dim):
                out[k, d] = sink_keys[matrix * num_sinks + number, d]
            for d in range(value_dim):
                out[k, key_dim + d] = sink_values[matrix * num_sinks + number, d]
            continue
        group = place // group_size
        to_floats(scale, group, 0, key_dim, steps)
        to_floats(zero, group, 0, key_dim, minima)
        _widen_codes(codes, place, key_planes, numbers)
        _write_key(numbers, steps, minima, key_dim, out, k)
        page = bytes_at(pages[slot // page_tokens], (num_matrices, page_tokens, row_bytes))[matrix]
        row = slot % page_tokens
        _widen_codes(page, row, value_planes, numbers)
        for g in range(value_groups):
            step = _half_at(page, row, code_bytes + 2 * g)
            minimum = _half_at(page, row, code_bytes + 2 * (value_groups + g))
            first = g * group_channels
            _write_value(numbers, step, minimum, first, first + group_channels, out, k, key_dim)
        if turned > 1:
            rotate_row(out, k, key_dim, key_dim + value_dim, turned)


@njit(**WORKER)
def _widen(address: int) -> None:
    """
    The worker of a table, see `threads`.

    It has B * H, H, K, D, E, S; of keys the addresses of codes, steps, minima, then groups, tokens of a group, bytes
    of a token, address of the planes and how many; of values the address of the pages' addresses, pages, tokens of a
    page, bytes of a row, channels of a group, address of the planes and how many, channels that are rotated together;
    addresses of slots, places and counts; of first slots, keys and values of sink tokens; and of the result.
    """
    n = longs_at(address, (FIRST + 29,))[FIRST:]
    shape = (n[0], n[1], n[2], n[3], n[4], n[5])
    keys = (n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13])
    values = (n[14], n[15], n[16], n[17], n[18], n[19], n[20], n[21])
    chosen, sinks = (n[22], n[23], n[24]), (n[25], n[26], n[27])
    matrix, count = take_task(address), num_tasks(address)
    while matrix < count:
        _widen_head(matrix, shape, keys, values, chosen, sinks, n[28])
        matrix = take_task(address)


@torch.compiler.disable
def widen_rows(
    keys: KeyCodes,
    places: torch.Tensor,
    pages: Sequence[torch.Tensor],
    slots: torch.Tensor,
    count: torch.Tensor,
    value_dim: int,
    value_nbits: int,
    value_group_size: int,
    sinks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """
    Keys and values of chosen tokens, side by side.

    Args:
        keys (`KeyCodes`):
            The keys.
        places (`torch.Tensor` of shape `[B, H, K]`, int64):
            Where they stand, over all groups one behind the other.
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, bytes]`, uint8):
            Rows of rotated values: codes, then steps and then minima of a row's groups in float16.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64):
            Which rows: slot `i` is row `i` of all pages one behind the other.
        count (`torch.Tensor` of shape `[B, H]`, int64):
            How many of them count, the first ones. What is written for the others is anything.
        value_dim, value_nbits, value_group_size (`int`):
            E, bits a code of a value, channels that share a step.
        sinks (`tuple[torch.Tensor, torch.Tensor, torch.Tensor]`):
            First slot of every item's sink tokens `[B]`, int64, and exact keys and values of those in the slots from
            there on, `[B, H, S, D or E]`.

    Returns:
        `torch.Tensor` of shape `[B, H, K, D + E]`, float32.
    """
    batch_size, num_heads, num_slots = slots.shape
    num_groups, group_size, key_bytes = keys.codes.shape[2:]
    key_dim = keys.scale.shape[3]
    # Names keep alive what is handed over by address
    codes, scale, zero = keys.codes.contiguous(), keys.scale.contiguous(), keys.zero.contiguous()
    slots, places, count = slots.contiguous(), places.contiguous(), count.contiguous()
    first, sink_keys, sink_values = sinks[0].contiguous(), sinks[1].float().contiguous(), sinks[2].float().contiguous()
    pages = [page.contiguous() for page in pages]
    page_addresses = np.array([page.data_ptr() for page in pages], dtype=np.int64)
    key_planes = np.array(packed_planes(key_dim, keys.nbits), dtype=np.int64)
    value_planes = np.array(packed_planes(value_dim, value_nbits), dtype=np.int64)
    out = torch.empty((batch_size, num_heads, num_slots, key_dim + value_dim), dtype=torch.float32)
    numbers = (
        *(batch_size * num_heads, num_heads, num_slots, key_dim, value_dim, sink_keys.shape[2]),
        *(
            *(each.data_ptr() for each in (codes, scale, zero)),
            *(num_groups, group_size, key_bytes, key_planes.ctypes.data, len(key_planes)),
        ),
        *(
            *(page_addresses.ctypes.data, len(pages), *pages[0].shape[2:], value_group_size),
            *(value_planes.ctypes.data, len(value_planes), rotation_size(value_dim)),
        ),
        *(slots.data_ptr(), places.data_ptr(), count.data_ptr()),
        *(first.data_ptr(), sink_keys.data_ptr(), sink_values.data_ptr()),
        out.data_ptr(),
    )
    run(_widen, batch_size * num_heads, numbers)
    return out
