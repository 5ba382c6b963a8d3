"""Tiles of the coding kernels: states are loaded, numbers become codes, and codes become rows; rows become numbers.

A number's code is the count of bounds of its block's width that lie below it. Cells of a grid hold the count below the
whole cell, and the bound in it: two loads, where a search among all bounds would take eight.

Legend: BLOCK_T tokens of one head, BLOCK_K numbers in the order of a row, an eighth as many blocks of them.
"""

import triton
import triton.language as tl

from ..arithmetic import ROUNDING
from ..stored_format import LAST_SCALE, LEAST_GAIN, SCALE_OFFSET, SCALE_STEPS
from .levels import scale_of
from .rotated_queries import load_angles


# A grid over numbers from `-GRID_END` to `GRID_END`, in cells of `1 / GRID_STEPS`. Every bound is nearer to 0, and
# bounds of 8 bits are further apart
GRID_END = tl.constexpr(4.5)
GRID_STEPS = tl.constexpr(64)
# The last cell begins at `GRID_END`
NUM_CELLS = tl.constexpr(577)
# Share of its value without error below which `z.q` is no measure of a scale
_LEAST_GAIN = tl.constexpr(LEAST_GAIN)
_SCALE_STEPS, _SCALE_OFFSET = tl.constexpr(SCALE_STEPS), tl.constexpr(float(SCALE_OFFSET))
_LAST_SCALE = tl.constexpr(float(LAST_SCALE))


@triton.jit
def row_places(BLOCK_K: tl.constexpr):
    """
    Return the number of a row at every slot of a tile: the first ones of all blocks, the second ones, and so on, so
    that a thread has numbers of one block. Attention has another order, `levels.row_slots`.
    """
    numbers = tl.arange(0, BLOCK_K)
    return numbers % (BLOCK_K // 8) * 8 + numbers // (BLOCK_K // 8)


@triton.jit
def head_states(states_ptr, stride_t, batch, head, stride_b, stride_h, ALIGNED: tl.constexpr):
    """Return a pointer to the states of a head, and the stride of its tokens, aligned for the compiler if they are."""
    states_ptr += batch * stride_b + head * stride_h
    if ALIGNED:
        states_ptr, stride_t = tl.multiple_of(states_ptr, 16), tl.multiple_of(stride_t, 16)
    return states_ptr, stride_t


@triton.jit
def tile_tokens(tile, length, BLOCK_T: tl.constexpr):
    """List a tile's tokens, the last token in the place of those behind it, and a mask of the tokens in use."""
    tokens = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    return tl.minimum(tokens, length - 1), tokens < length


@triton.jit
def load_states(
    states_ptr, stride_t, tokens, channels, channel_in_use, positions, partner_ptr, near_ptr, far_ptr,
    HEAD_DIM: tl.constexpr, NUM_NEAR: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Load channels of tokens, `[BLOCK_T, channels]`, float32; `ROTARY` undoes the embedding of their positions."""
    token_ptrs = states_ptr + tokens.to(tl.int64)[:, None] * stride_t
    in_use = channel_in_use[None, :]
    states = tl.load(token_ptrs + channels[None, :], mask=in_use, other=0.0).to(tl.float32)
    if ROTARY:
        partners = tl.load(partner_ptr + channels, mask=channel_in_use, other=0)
        others = tl.load(token_ptrs + partners[None, :], mask=in_use, other=0.0).to(tl.float32)
        cosines, sines = load_angles(near_ptr, far_ptr, positions[:, None], channels[None, :], HEAD_DIM, NUM_NEAR)
        states = states * cosines - others * sines
    return states


@triton.jit
def load_rows(
    rows_ptr, tokens, width_ptr, coefficient_ptr, ROW_SIZE: tl.constexpr, NUM_CODED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Decode rows of a head's tokens to numbers over their deviations, `[BLOCK_T, BLOCK_K]`, in `row_places`."""
    blocks, lanes = tl.arange(0, BLOCK_K // 8), tl.arange(0, 8)[:, None]
    widths = tl.load(width_ptr + blocks, mask=blocks < (NUM_CODED + 7) // 8, other=0).to(tl.int32)
    first_bytes = 1 + tl.cumsum(widths, axis=0) - widths
    first_bits = lanes * widths[None, :]
    shifts = first_bits & 7
    rows_ptr += tokens.to(tl.int64) * ROW_SIZE
    byte_ptrs = rows_ptr[:, None, None] + (first_bytes[None, :] + (first_bits >> 3))[None, :, :]
    low = tl.load(byte_ptrs, mask=(widths > 0)[None, None, :], other=0).to(tl.int32)
    # A code of at most eight bits may end in the next byte
    high = tl.load(byte_ptrs + 1, mask=(shifts + widths[None, :] > 8)[None, :, :], other=0).to(tl.int32)
    codes = ((low | (high << 8)) >> shifts[None, :, :]) & ((1 << widths) - 1)[None, None, :]
    own_ptr = (coefficient_ptr + widths * 4)[None, None, :]
    factor, first = tl.load(own_ptr), tl.load(own_ptr + 1)
    second, third = tl.load(own_ptr + 2), tl.load(own_ptr + 3)
    levels = levels_of_codes(codes, factor, first, second, third)
    levels = tl.where((8 * blocks[None, :] + lanes < NUM_CODED)[None, :, :], levels, 0.0)
    levels *= scale_of(tl.load(rows_ptr).to(tl.float32))[:, None, None]
    return tl.reshape(levels, [tokens.shape[0], BLOCK_K])


@triton.jit
def store_rows(
    normal, tokens, token_in_use, width_ptr, coefficient_ptr, cell_code_ptr, cell_bound_ptr, rows_ptr,
    ROW_SIZE: tl.constexpr, NUM_BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr, BY_ENERGY: tl.constexpr,
    NUM_REFITS: tl.constexpr,
):  # fmt: skip
    """Encode a head's tokens, whose numbers `[BLOCK_T, BLOCK_K]` are in `row_places`, and store their rows."""
    BLOCK_T: tl.constexpr = normal.shape[0]
    BLOCK_K: tl.constexpr = normal.shape[1]
    places = row_places(BLOCK_K)
    widths = tl.load(width_ptr + places // 8, mask=places < 8 * NUM_BLOCKS, other=0).to(tl.int32)
    has_bits = (widths > 0).to(tl.float32)
    weights = has_bits * (1 << 2 * widths).to(tl.float32)
    book = _load_codebook(widths, coefficient_ptr, cell_code_ptr, cell_bound_ptr)
    squares = normal * normal
    energy = tl.sum(squares * weights[None, :] if BY_ENERGY else squares, axis=1)
    coded_energy = tl.sum(squares * has_bits[None, :], axis=1)
    found = scale_of(_stored_scale(tl.sqrt(coded_energy / tl.maximum(tl.sum(has_bits, axis=0), 1.0))))
    if NUM_REFITS > 0:
        num_fitted, num_changed = 0, 1
        while (num_fitted < NUM_REFITS) & (num_changed > 0):
            scale = found
            codes = _find_codes(normal, scale, book)
            found = scale_of(_fitting_scale(normal, codes, weights, energy, scale, book, WEIGHTED, BY_ENERGY))
            num_changed = tl.sum((found != scale).to(tl.int32), axis=0)
            num_fitted += 1
    codes = _find_codes(normal, found, book)
    stored = _fitting_scale(normal, codes, weights, energy, found, book, WEIGHTED, BY_ENERGY)
    rows_ptr += tokens.to(tl.int64) * ROW_SIZE
    tl.store(rows_ptr, stored.to(tl.uint8), mask=token_in_use)

    shifted = codes.to(tl.int64) << ((places & 7) * widths).to(tl.int64)[None, :]
    words = tl.sum(tl.reshape(shifted, [BLOCK_T, 8, BLOCK_K // 8]), axis=1)
    blocks, lanes = tl.arange(0, BLOCK_K // 8), tl.arange(0, 8)[:, None]
    block_widths = tl.load(width_ptr + blocks, mask=blocks < NUM_BLOCKS, other=0).to(tl.int32)
    first_bytes = 1 + tl.cumsum(block_widths, axis=0) - block_widths
    bytes_of_words = ((words[:, None, :] >> (8 * lanes).to(tl.int64)[None, :, :]) & 255).to(tl.uint8)
    in_row = (first_bytes[None, :] + lanes)[None, :, :]
    in_use = token_in_use[:, None, None] & (lanes < block_widths[None, :])[None, :, :]
    tl.store(rows_ptr[:, None, None] + in_row, bytes_of_words, mask=in_use)
    row_end = 1 + tl.sum(block_widths, axis=0)
    if row_end < ROW_SIZE:
        # With more bits than their format, rows of blocks that have the most bits already end with zeros
        spare = row_end + tl.arange(0, BLOCK_K)[None, :]
        zeros = tl.zeros([BLOCK_T, BLOCK_K], tl.uint8)
        tl.store(rows_ptr[:, None] + spare, zeros, mask=token_in_use[:, None] & (spare < ROW_SIZE))


@triton.jit
def _load_codebook(widths, coefficient_ptr, cell_code_ptr, cell_bound_ptr):
    """Load coefficients of the levels of every number's width, `[1, BLOCK_K]` each, and pointers to its cells."""
    own_ptr = (coefficient_ptr + widths * 4)[None, :]
    factor, first = tl.load(own_ptr), tl.load(own_ptr + 1)
    second, third = tl.load(own_ptr + 2), tl.load(own_ptr + 3)
    cells = (widths * NUM_CELLS)[None, :]
    return factor, first, second, third, cell_code_ptr + cells, cell_bound_ptr + cells


@triton.jit
def _find_codes(normal, scale, book):
    """Find codes `[BLOCK_T, BLOCK_K]` of numbers over their tokens' scales `[BLOCK_T]`."""
    _, _, _, _, code_ptrs, bound_ptrs = book
    numbers = normal * (1.0 / scale)[:, None]
    near = tl.minimum(tl.maximum(tl.where(numbers == numbers, numbers, 0.0), -GRID_END), GRID_END)
    cells = ((near + GRID_END) * GRID_STEPS).to(tl.int32)
    return tl.load(code_ptrs + cells).to(tl.int32) + (numbers > tl.load(bound_ptrs + cells)).to(tl.int32)


@triton.jit
def _fitting_scale(normal, codes, weights, energy, scale, book, WEIGHTED: tl.constexpr, BY_ENERGY: tl.constexpr):
    """Return the scale for codes that were found with `scale`, as the byte that is stored."""
    factor, first, second, third, _, _ = book
    levels = levels_of_codes(codes, factor, first, second, third)
    counted = levels * weights[None, :] if WEIGHTED or BY_ENERGY else levels
    over = tl.sum(normal * counted, axis=1)
    if WEIGHTED:
        fitting = over / tl.maximum(tl.sum(levels * counted, axis=1), 1e-9)
    else:
        is_measured = over > _LEAST_GAIN * energy / scale
        fitting = tl.where(is_measured, energy / tl.where(is_measured, over, 1.0), scale)
    return _stored_scale(fitting)


@triton.jit
def levels_of_codes(codes, factor, first, second, third):
    """Return the levels of codes, by the coefficients of their widths."""
    centred = (2 * codes + 1).to(tl.float32) * factor - 1.0
    square = centred * centred
    return centred * (first + square * (second + square * third))


@triton.jit
def _stored_scale(scale):
    """Return the bytes of scales, as numbers; 0 for NaN."""
    steps = tl.log2(tl.where(scale > 1e-6, scale, 1e-6)) * _SCALE_STEPS
    return tl.minimum(tl.maximum(((steps + ROUNDING) - ROUNDING) + _SCALE_OFFSET, 0.0), _LAST_SCALE)
