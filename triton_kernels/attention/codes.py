"""The codes of a tile, taken apart by bit field without converting an integer.

A field of a word, masked and read as a float16, is a subnormal number: the code times a power of two. Tensor cores
multiply it as it is, and the power goes into what it is multiplied by. So a word of two bytes costs one instruction a
field, for two words at once. Legend as in `attend.py`; `SIDE` is a `SideLayout`, whose pieces and fields are named by
their numbers.
"""

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
def load_words(codes_ptr, token_in_use, SIDE: tl.constexpr, PIECE: tl.constexpr, TOKEN_AXIS: tl.constexpr):
    """
    Words of a piece, of the tile that begins at `codes_ptr`.

    They are `[tokens, words]`, or `[words, tokens]` for a token axis of 1. Loaded as they are multiplied, they reach
    tensor cores by way of shared memory alone; their codes, turned afterwards, would be written there once a field.
    """
    NUM_WORDS: tl.constexpr = SIDE.pieces[PIECE].num_words
    BLOCK_W: tl.constexpr = SIDE.pieces[PIECE].block
    words = tl.expand_dims(tl.arange(0, BLOCK_W), TOKEN_AXIS)
    tokens = tl.expand_dims(tl.arange(0, token_in_use.shape[0]), 1 - TOKEN_AXIS)
    in_use = tl.expand_dims(token_in_use, 1 - TOKEN_AXIS)
    if NUM_WORDS < BLOCK_W:
        in_use = in_use & (words < NUM_WORDS)
    pointer = codes_ptr + SIDE.pieces[PIECE].first_byte
    if SIDE.pieces[PIECE].unit == 2:
        pointer = pointer.to(tl.pointer_type(tl.uint16))
    stride: tl.constexpr = SIDE.codes_stride_t // SIDE.pieces[PIECE].unit
    return tl.load(pointer + (tokens * stride + words), mask=in_use, other=0).to(tl.uint16)


@triton.jit
def take_field(words, SIDE: tl.constexpr, PIECE: tl.constexpr, FIELD: tl.constexpr, PACKED: tl.constexpr):
    """Codes times `2 ** (bit - 24)` in float16, of the shape of `words`."""
    DOWN: tl.constexpr = SIDE.pieces[PIECE].fields[FIELD].down
    WIDTH: tl.constexpr = SIDE.pieces[PIECE].fields[FIELD].width
    MASK: tl.constexpr = ((1 << WIDTH) - 1) << SIDE.pieces[PIECE].fields[FIELD].bit
    if PACKED:
        # LLVM would mask words one by one
        return tl.inline_asm_elementwise(
            _field_instructions(DOWN, MASK), "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
        )
    return ((words >> DOWN) & MASK).to(tl.uint16).to(tl.float16, bitcast=True)


@triton.constexpr_function
def field_number(side, piece, field):
    """The place of a field in tuples of something for each."""
    return sum(len(each.fields) for each in side.pieces[:piece]) + field


@triton.jit
def field_channels(SIDE: tl.constexpr, PIECE: tl.constexpr, FIELD: tl.constexpr):
    """The channels of a field's codes `[words]`."""
    words = SIDE.pieces[PIECE].unit * tl.arange(0, SIDE.pieces[PIECE].block)
    return SIDE.pieces[PIECE].fields[FIELD].first_channel + words


@triton.constexpr_function
def _has_all_channels(side, piece, field):
    """Return whether all words of a block are in use, and all channels of the field exist."""
    words = side.pieces[piece]
    last_channel = words.fields[field].first_channel + words.unit * (words.num_words - 1)
    return words.num_words == words.block and last_channel < side.dim


@triton.jit
def channel_mask(SIDE: tl.constexpr, PIECE: tl.constexpr, FIELD: tl.constexpr):
    """Return a mask of the channels of a field that exist."""
    BLOCK_W: tl.constexpr = SIDE.pieces[PIECE].block
    if _has_all_channels(SIDE, PIECE, FIELD):
        return tl.full([BLOCK_W], 1, tl.int1)
    return (tl.arange(0, BLOCK_W) < SIDE.pieces[PIECE].num_words) & (field_channels(SIDE, PIECE, FIELD) < SIDE.dim)


@triton.jit
def load_by_field(pointer, SIDE: tl.constexpr, PIECE: tl.constexpr, FIELD: tl.constexpr):
    """Load the numbers of a field's channels `[words]` of a vector over channels."""
    # The constant comes last, so that all fields share a register of addresses
    words = SIDE.pieces[PIECE].unit * tl.arange(0, SIDE.pieces[PIECE].block)
    pointers = pointer + words + SIDE.pieces[PIECE].fields[FIELD].first_channel
    if _has_all_channels(SIDE, PIECE, FIELD):
        return tl.load(pointers)
    return tl.load(pointers, mask=channel_mask(SIDE, PIECE, FIELD), other=0.0)
