"""The codes of a tile, taken apart by bit field without converting an integer.

A field of a word, masked and read as a float16, is a subnormal number: the code times a power of two. Tensor cores
multiply it as it is, and the power goes into what it is multiplied by. So a word of two bytes costs one instruction a
field, for two words at once. Legend as in `attend.py`; pieces and fields are those of `packing.py`.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.constexpr_function
def _field_instructions(down, mask):
    """Two words at once; the bits that a shift takes from one word to the other are masked out."""
    both = mask | mask << 16
    if down == 0:
        return f"and.b32 $0, $1, {both};"
    return f"{{ .reg .b32 down; shr.b32 down, $1, {down}; and.b32 $0, down, {both}; }}"


@triton.jit
def load_words(
    codes_ptr, token_in_use, STRIDE: tl.constexpr, PIECE: tl.constexpr, UNIT: tl.constexpr, TOKEN_AXIS: tl.constexpr
):
    """
    Words of a piece, of the tile that begins at `codes_ptr`.

    They are `[tokens, words]`, or `[words, tokens]` for a token axis of 1. Loaded as they are multiplied, they reach
    tensor cores by way of shared memory alone; their codes, turned afterwards, would be written there once a field.
    """
    FIRST_BYTE: tl.constexpr = PIECE[0]
    NUM_WORDS: tl.constexpr = PIECE[1]
    BLOCK_W: tl.constexpr = PIECE[2]
    words = tl.expand_dims(tl.arange(0, BLOCK_W), TOKEN_AXIS)
    tokens = tl.expand_dims(tl.arange(0, token_in_use.shape[0]), 1 - TOKEN_AXIS)
    in_use = tl.expand_dims(token_in_use, 1 - TOKEN_AXIS)
    if NUM_WORDS < BLOCK_W:
        in_use = in_use & (words < NUM_WORDS)
    pointer = codes_ptr + FIRST_BYTE
    if UNIT == 2:
        pointer = pointer.to(tl.pointer_type(tl.uint16))
    return tl.load(pointer + (tokens * (STRIDE // UNIT) + words), mask=in_use, other=0).to(tl.uint16)


@triton.jit
def take_field(words, FIELD: tl.constexpr, PACKED: tl.constexpr):
    """Codes times `2 ** (bit - 24)` in float16, of the shape of `words`."""
    DOWN: tl.constexpr = FIELD[0]
    MASK: tl.constexpr = ((1 << FIELD[2]) - 1) << FIELD[1]
    if PACKED:
        # LLVM would mask words one by one
        return tl.inline_asm_elementwise(
            _field_instructions(DOWN, MASK), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return ((words >> DOWN) & MASK).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def field_channels(PIECE: tl.constexpr, FIELD: tl.constexpr, UNIT: tl.constexpr):
    """The channels of a field's codes `[words]`."""
    BLOCK_W: tl.constexpr = PIECE[2]
    return FIELD[4] + UNIT * tl.arange(0, BLOCK_W)


@triton.constexpr_function
def has_all_channels(piece, field, unit, dim):
    """Whether all of a block's words are in use, and all of the field's channels there."""
    return piece[1] == piece[2] and field[4] + unit * (piece[1] - 1) < dim


@triton.jit
def channel_mask(PIECE: tl.constexpr, FIELD: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr):
    """Which of a field's channels there are."""
    BLOCK_W: tl.constexpr = PIECE[2]
    if has_all_channels(PIECE, FIELD, UNIT, DIM):
        return tl.full([BLOCK_W], 1, tl.int1)
    return (tl.arange(0, BLOCK_W) < PIECE[1]) & (field_channels(PIECE, FIELD, UNIT) < DIM)


@triton.jit
def load_by_field(pointer, PIECE: tl.constexpr, FIELD: tl.constexpr, UNIT: tl.constexpr, DIM: tl.constexpr):
    """What a vector over channels holds for a field's channels `[words]`."""
    BLOCK_W: tl.constexpr = PIECE[2]
    # The constant comes last, so that all fields share a register of addresses
    pointers = pointer + UNIT * tl.arange(0, BLOCK_W) + FIELD[4]
    if has_all_channels(PIECE, FIELD, UNIT, DIM):
        return tl.load(pointers)
    return tl.load(pointers, mask=channel_mask(PIECE, FIELD, UNIT, DIM), other=0.0)
