"""What `attend_basis_kernel` does with a tile: components of keys become channels by a product with the basis.

Legend as in `basis_attend.py`; a tile is `[BLOCK_T tokens, BLOCK_K components]` of one head.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from .halves import multiply
from .points import load_points, load_scales, row_slots
from .tiles import attend_keys


@triton.jit
def load_basis(
    basis_ptr, step_ptr, head, channels, channel_in_use, KEY_DIM: tl.constexpr, KEY_COMPONENTS: tl.constexpr,
    BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """A head's basis `[BLOCK_K, BLOCK_D]` of largest number 1, and what that stands for."""
    components = row_slots(BLOCK_K)
    component_in_use = components < KEY_COMPONENTS
    steps = tl.load(step_ptr + head * KEY_DIM + components, mask=component_in_use, other=0.0)
    # Every row has a code of 127
    unit = tl.maximum(tl.max(steps, axis=0) * 127.0, 1e-30)
    basis_ptr += head * (KEY_DIM * KEY_DIM)
    in_use = component_in_use[:, None] & channel_in_use[None, :]
    codes = tl.load(basis_ptr + (components[:, None] * KEY_DIM + channels[None, :]), mask=in_use, other=0)
    return (codes.to(tl.float32) * (steps / unit)[:, None]).to(DTYPE), unit


@triton.jit
def attend_basis_tile(
    start,
    length,
    key_rows_ptr,
    key_words_ptr,
    key_remainder,
    key_codebook,
    basis,
    means,
    value_rows_ptr,
    value_words_ptr,
    value_remainder,
    value_codebook,
    own,
    partners,
    size,
    cosines,
    sines,
    offset_cosines,
    offset_sines,
    mask_ptr,
    mask_rows,
    mask_stride_t,
    row_in_use,
    maximum,
    totals,
    output,
    KEY_ROW_SIZE: tl.constexpr,
    VALUE_ROW_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    TRELLIS: tl.constexpr,
    MASK: tl.constexpr,
    DTYPE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Carries the queries, as turned back to a tile's start, and the online softmax on through a tile."""
    # fmt: off
    scales = load_scales(key_rows_ptr, start, length, KEY_ROW_SIZE, BLOCK_T, IS_WHOLE).to(DTYPE)
    points = load_points(
        key_words_ptr, key_remainder, start, length, key_codebook, KEY_ROW_SIZE, BLOCK_T, BLOCK_K // 8, TRELLIS, DTYPE,
        PAIRS, IS_WHOLE)
    points = multiply(points, tl.broadcast_to(scales[:, None, None], points.shape), PAIRS)
    keys = tl.dot(tl.reshape(points, [BLOCK_T, BLOCK_K]), basis, input_precision="ieee")
    keys = (keys + means[None, :]).to(DTYPE)
    return attend_keys(
        keys, start, length, value_rows_ptr, value_words_ptr, value_remainder, value_codebook, own, partners, size,
        cosines, sines, offset_cosines, offset_sines, mask_ptr, mask_rows, mask_stride_t, row_in_use, maximum, totals,
        output, VALUE_ROW_SIZE, ROTARY, TRELLIS, MASK, DTYPE, PAIRS, BLOCK_T, BLOCK_V, IS_WHOLE)
    # fmt: on
