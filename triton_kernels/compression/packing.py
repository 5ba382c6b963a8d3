"""What a program that quantizes does with a tile: scales from ranges, packed codes from states.

Codes are packed by slabs: at 2 bits byte `j` of a token holds channels `j`, `j + W`, `j + 2W`, `j + 3W` with
`W = ceil(D / 4)`, lowest bits first, so that a program reads and writes rows of channels that lie side by side. 3 bits
are a 2-bit plane and after it a 1-bit plane, whose slabs are narrower.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


# 2**23: a float32 of this size has no fraction, so adding it rounds, half to even.
_ROUNDER = tl.constexpr(8388608.0)


@triton.jit
def scale_and_zero(low, high, poison, NBITS: tl.constexpr):
    """Scale and zero, in float16, of groups of these ranges; a group of which nothing is kept has the range 0 to 0."""
    low = tl.where(low == float("inf"), 0.0, low)
    high = tl.where(high == float("-inf"), 0.0, high)
    # Minimum and maximum pass over NaN. The poison is a sum of zeros, or NaN
    zero = (low + poison).to(tl.float16)
    span = tl.maximum(high - zero.to(tl.float32), 0.0)
    # The exact division: a scale that differs in its last bit moves codes
    scale = tl.div_rn(span, tl.zeros_like(span) + (2**NBITS - 1)).to(tl.float16)
    return scale, zero


@triton.jit
def report_range(exceeded_ptr, scale, zero):
    """Sets the number there to 1 if any of these is not finite."""
    poison = scale.to(tl.float32) * 0.0 + zero.to(tl.float32) * 0.0
    tl.store(exceeded_ptr, 1, mask=tl.max(tl.ravel((poison != poison).to(tl.int32)), axis=0) > 0)


@triton.jit
def _pack_plane(
    states_rows,
    codes_rows,
    scale_rows,
    zero_rows,
    missing_rows,
    is_token,
    states_stride_d,
    NBITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WRITES_MISSING: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """
    Packs bits `SHIFT` to `SHIFT + WIDTH - 1` of the codes of `BLOCK_L` tokens of a head. The first five are pointers
    to each token's first element; scales and zeros, one for `GROUP_SIZE` channels, may be one row for all tokens.
    """
    PER_BYTE: tl.constexpr = 8 // WIDTH
    SLAB: tl.constexpr = (HEAD_DIM + PER_BYTE - 1) // PER_BYTE
    for start in tl.static_range(0, SLAB, BLOCK_W):
        in_slab = start + tl.arange(0, BLOCK_W)
        packed = tl.zeros([BLOCK_L, BLOCK_W], dtype=tl.int32)
        for slab in tl.static_range(PER_BYTE):
            channels = slab * SLAB + in_slab
            is_channel = ((in_slab < SLAB) & (channels < HEAD_DIM))[None, :]
            states_ptrs = states_rows[:, None] + channels[None, :] * states_stride_d
            in_states = is_token[:, None] & is_channel
            states = tl.load(states_ptrs, mask=in_states, other=0.0).to(tl.float32)
            groups = (channels // GROUP_SIZE)[None, :]
            step = tl.load(scale_rows[:, None] + groups, mask=is_channel, other=0.0).to(tl.float32)
            zero = tl.load(zero_rows[:, None] + groups, mask=is_channel, other=0.0).to(tl.float32)
            # A constant group, and what fills up the last slab, has step 0 and code 0
            inverse = tl.where(step > 0, tl.div_rn(tl.zeros_like(step) + 1.0, tl.where(step > 0, step, 1.0)), 0.0)
            # Clamped before rounding, not after, which is the same and keeps to the range that the rounding needs
            position = tl.minimum(tl.maximum((states - zero) * inverse, 0.0), 2.0**NBITS - 1.0)
            codes = (position + _ROUNDER).to(tl.int32, bitcast=True) & 0xFF
            packed |= ((codes >> SHIFT) & ((1 << WIDTH) - 1)) << (slab * WIDTH)
            if WRITES_MISSING:
                # The product has at most 19 bits: exact, whether or not it is fused with the sum
                missing = states - (codes.to(tl.float32) * step + zero)
                tl.store(missing_rows[:, None] + channels[None, :], missing, mask=in_states)
        in_codes = is_token[:, None] & (in_slab < SLAB)[None, :]
        tl.store(codes_rows[:, None] + in_slab[None, :], packed.to(tl.uint8), mask=in_codes)


@triton.jit
def pack(
    states_rows,
    codes_rows,
    scale_rows,
    zero_rows,
    missing_rows,
    is_token,
    states_stride_d,
    NBITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    WRITES_MISSING: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Packs all bits of the codes: see `_pack_plane`."""
    # fmt: off
    if NBITS == 3:
        _pack_plane(states_rows, codes_rows, scale_rows, zero_rows, missing_rows, is_token, states_stride_d,
                    NBITS, 2, 0, HEAD_DIM, GROUP_SIZE, WRITES_MISSING, BLOCK_L, BLOCK_W)
        _pack_plane(states_rows, codes_rows + (HEAD_DIM + 3) // 4, scale_rows, zero_rows, missing_rows, is_token,
                    states_stride_d, NBITS, 1, 2, HEAD_DIM, GROUP_SIZE, False, BLOCK_L, BLOCK_W)
    else:
        _pack_plane(states_rows, codes_rows, scale_rows, zero_rows, missing_rows, is_token, states_stride_d,
                    NBITS, NBITS, 0, HEAD_DIM, GROUP_SIZE, WRITES_MISSING, BLOCK_L, BLOCK_W)
    # fmt: on
