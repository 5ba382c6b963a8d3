"""The outliers of a tile, added without atomics, so that results are the same from run to run.

Query (or probabilities) are gathered at `BLOCK_E` entries at once, and scattered to tokens (or channels) by a dot with
a one-hot matrix. Legend as in `attend.py`; all pointers are those of one chunk. `SIDE` is a `SideLayout`.
"""

import functools

import torch
import triton
import triton.language as tl

from ..arithmetic import dot_parts, inverse_power
from ..stored_format import OUTLIER_TILE
from .codes import field_channels, field_number
from .values import field_unit


STORED_TILE = tl.constexpr(OUTLIER_TILE)
# Where 0 stands in the table of numbers
_ZERO = tl.constexpr(64)
# Negative integers read as float16 are NaN and equal nothing
_MAX_CHANNELS = 2048


@functools.cache
def number_table(device: torch.device) -> torch.Tensor:
    """The bits of integers from -64 on, up to every channel's and every token's of a tile, as float16."""
    return torch.arange(-_ZERO.value, _MAX_CHANNELS, device=device, dtype=torch.int16).view(torch.float16)


@triton.jit
def load_entries(index_ptr, value_ptr, first_entry, last_entry, CHANNEL_BITS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Token within the stored tile, channel and value of some outliers; 0 behind the last."""
    entries = first_entry + tl.arange(0, BLOCK_E)
    in_use = entries < last_entry
    index = tl.load(index_ptr + entries, mask=in_use, other=0).to(tl.int32)
    values = tl.load(value_ptr + entries, mask=in_use, other=0.0).to(tl.float32)
    return index >> CHANNEL_BITS, index & ((1 << CHANNEL_BITS) - 1), values


@triton.jit
def load_bounds(offset_ptr, head, num_heads, first_token, limit, NUMBER: tl.constexpr):
    """
    First and last entry of a stored tile, and the tile's first token in the stored one.

    A tile that begins within a stored one may reach into the next, which is the second that this is asked for.
    """
    stored = first_token // STORED_TILE + NUMBER
    is_there = (NUMBER == 0) | (stored * STORED_TILE < limit)
    slot = tl.where(is_there, stored, 0) * num_heads + head
    first = tl.load(offset_ptr + slot)
    last = tl.where(is_there, tl.load(offset_ptr + slot + 1), first)
    return first, last, first_token - stored * STORED_TILE


@triton.jit
def one_hot(number_ptr, rows, columns, PACKED: tl.constexpr):
    """1 in float16 where numbers are equal, `[rows, columns]`."""
    numbers = tl.load(number_ptr + rows + _ZERO)
    columns = columns.to(tl.int16).to(tl.float16, bitcast=True)
    left, right = tl.broadcast(numbers[:, None], columns[None, :])
    if PACKED:
        # Two at once; LLVM would compare and select one by one
        return tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r", [left, right], dtype=tl.float16, is_pure=True, pack=2
        )
    return (left == right).to(tl.float16)


@triton.jit
def score_outliers(
    scores, query_rows_ptr, row_in_use, inverse_query_power, number_ptr, index_ptr, value_ptr, offset_ptr, head,
    num_heads, first_token, limit, STORED_TILES: tl.constexpr, SIDE: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """`scores` `[tokens, rows]` with what the entries add to `keys query^T`."""
    for number in tl.static_range(STORED_TILES):
        first, last, start = load_bounds(offset_ptr, head, num_heads, first_token, limit, number)
        for entry in range(first, last, BLOCK_E):
            tokens, channels, values = load_entries(index_ptr, value_ptr, entry, last, SIDE.channel_bits, BLOCK_E)
            gathered = tl.load(query_rows_ptr[None, :] + channels[:, None], mask=row_in_use[None, :], other=0.0)
            gathered = gathered.to(tl.float32) * inverse_query_power[None, :]
            places = one_hot(number_ptr, start + tl.arange(0, BLOCK_T), tokens, PACKED)
            scores = dot_parts(places, gathered * values[:, None], scores, PARTS)
    return scores


@triton.jit
def weigh_outliers(
    outputs, probabilities, reference, number_ptr, index_ptr, value_ptr, offset_ptr, head, num_heads, first_token,
    limit, SIDE: tl.constexpr, STORED_TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Outputs with what the entries add to `values^T probabilities`."""
    inverse = inverse_power(reference)
    for number in tl.static_range(STORED_TILES):
        first, last, start = load_bounds(offset_ptr, head, num_heads, first_token, limit, number)
        for entry in range(first, last, BLOCK_E):
            tokens, channels, values = load_entries(index_ptr, value_ptr, entry, last, SIDE.channel_bits, BLOCK_E)
            tokens -= start
            in_tile = (tokens >= 0) & (tokens < BLOCK_T)
            tokens = tl.broadcast_to(tl.where(in_tile, tokens, 0)[:, None], [BLOCK_E, BLOCK_R])
            gathered = tl.gather(probabilities, tokens, axis=0) * tl.where(in_tile, values, 0.0)[:, None]
            result = ()
            for p in tl.static_range(len(SIDE.pieces)):
                for f in tl.static_range(len(SIDE.pieces[p].fields)):
                    output = outputs[field_number(SIDE, p, f)]
                    if SIDE.pieces[p].plane == 0:
                        own = field_channels(SIDE, p, f)
                        places = one_hot(number_ptr, own, channels, PACKED)
                        product = dot_parts(places, gathered, tl.zeros(output.shape, tl.float32), PARTS)
                        output += product * (inverse * (1.0 / field_unit(SIDE, p, f)))
                    result = result + (output,)
            outputs = result
    return outputs
