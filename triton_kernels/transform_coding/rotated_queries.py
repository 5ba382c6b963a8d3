"""Queries rotated back by the angles of a tile's first token, so that keys meet them before their rotary embedding.

A key's score is `sum k (a cos - b sin)` over its channels, with the query's own channel `a` and its partner's `b` as
rotated back to the tile's start, and cosine and sine of the token's offset in the tile. The offsets are those of every
tile: their cosines and sines are loaded once, in the order of the channels, which nothing has to restore.

Legend: BLOCK_K channels, BLOCK_R rows of queries, BLOCK_T tokens of a tile, P near positions.
"""

import triton
import triton.language as tl

from ..arithmetic import LOG2_E


@triton.jit
def load_query(query_ptr, rows, row_stride, row_in_use, channels, channel_in_use):
    """Channels of queries, `[BLOCK_K, BLOCK_R]`, float32."""
    in_use = channel_in_use[:, None] & row_in_use[None, :]
    return tl.load(query_ptr + rows[None, :] * row_stride + channels[:, None], mask=in_use, other=0.0).to(tl.float32)


@triton.jit
def load_angles(near_ptr, far_ptr, position, channels, KEY_DIM: tl.constexpr, NUM_NEAR: tl.constexpr):
    """Cosines and signed sines of a position, which may be negative, `[BLOCK_K]`."""
    distance = tl.abs(position)
    near_ptr += distance % NUM_NEAR * (2 * KEY_DIM) + channels
    far_ptr += distance // NUM_NEAR * (2 * KEY_DIM) + channels
    near_cosines, near_sines = tl.load(near_ptr), tl.load(near_ptr + KEY_DIM)
    far_cosines, far_sines = tl.load(far_ptr), tl.load(far_ptr + KEY_DIM)
    cosines = near_cosines * far_cosines - near_sines * far_sines
    sines = near_sines * far_cosines + near_cosines * far_sines
    return cosines, tl.where(position < 0, -sines, sines)


@triton.jit
def load_offsets(near_ptr, channels, KEY_DIM: tl.constexpr, BLOCK_T: tl.constexpr, DTYPE: tl.constexpr):
    """Cosines and signed sines of the offsets in a tile, `[BLOCK_T, BLOCK_K]`, which are sums of two of a few."""
    # Loaded one by one they took a third of the time that a program of two tiles has
    few_ptr = near_ptr + tl.arange(0, 8)[:, None] * (2 * KEY_DIM) + channels[None, :]
    many_ptr = near_ptr + tl.arange(0, BLOCK_T // 8)[:, None] * (16 * KEY_DIM) + channels[None, :]
    few_cosines, few_sines = tl.load(few_ptr)[None, :, :], tl.load(few_ptr + KEY_DIM)[None, :, :]
    cosines, sines = tl.load(many_ptr)[:, None, :], tl.load(many_ptr + KEY_DIM)[:, None, :]
    SHAPE: tl.constexpr = [BLOCK_T, channels.shape[0]]
    offset_cosines = tl.reshape(cosines * few_cosines - sines * few_sines, SHAPE).to(DTYPE)
    offset_sines = tl.reshape(sines * few_cosines + cosines * few_sines, SHAPE).to(DTYPE)
    return offset_cosines, offset_sines


@triton.jit
def rotate_back(own, partners, cosines, sines):
    """Own and partners' channels of queries, rotated back by angles of the own channels."""
    cosines, sines = cosines[:, None], sines[:, None]
    return own * cosines - partners * sines, partners * cosines + own * sines


@triton.jit
def inverse_sizes(own, partners):
    """Return the sizes that rows are scaled by and back, so that no channel is above 1 however it is rotated."""
    largest = tl.max(tl.abs(own) + tl.abs(partners), axis=0)
    # A row below that throughout counts as zero: the factor that scales it might be infinite
    return tl.where(largest > 1e-30, 1.0 / tl.maximum(largest, 1e-30), 0.0), largest


@triton.jit
def load_rotated_queries(
    query_ptr, rows, row_stride, row_in_use, channels, channel_in_use, partner_channels, partner_in_use, angle_columns,
    sizes, scale, near_ptr, far_ptr, padding_ptr, batch, position, NUM_ANGLES: tl.constexpr, NUM_NEAR: tl.constexpr,
    BLOCK_T: tl.constexpr, ROTARY: tl.constexpr, PADDED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """
    Queries for keys that are multiples of `sizes`, rotated back to a split's first token, and partners' channels of
    them; what their scores are to be multiplied by; cosines and sines from one tile to the next, and of a tile's
    offsets.
    """
    own = load_query(query_ptr, rows, row_stride, row_in_use, channels, channel_in_use)
    partners = load_query(query_ptr, rows, row_stride, row_in_use, partner_channels, partner_in_use)
    own, partners = own * sizes[:, None], partners * sizes[:, None]
    to_one, size = inverse_sizes(own, partners)
    own, partners, size = own * to_one[None, :], partners * to_one[None, :], size * (scale * LOG2_E)
    cosines, sines = sizes, sizes
    offset_cosines, offset_sines = sizes, sizes
    if ROTARY:
        if PADDED:
            position -= tl.load(padding_ptr + batch).to(tl.int32)
        cosines, sines = load_angles(near_ptr, far_ptr, position, angle_columns, NUM_ANGLES, NUM_NEAR)
        own, partners = rotate_back(own, partners, cosines, sines)
        cosines, sines = load_angles(near_ptr, far_ptr, BLOCK_T, angle_columns, NUM_ANGLES, NUM_NEAR)
        offset_cosines, offset_sines = load_offsets(near_ptr, angle_columns, NUM_ANGLES, BLOCK_T, DTYPE)
    return own, partners, size, (cosines, sines, offset_cosines, offset_sines)
