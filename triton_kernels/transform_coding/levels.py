"""Codes of a tile of rows, and the levels that they stand for.

A block of width w is w bytes at any byte of a row: three aligned words hold it, wherever it begins. Two shifts bring
it to the beginning of 64 bits, the first code in bits 8 - w to 7; further shifts by 2 w, 4 w and 6 w bring the third,
the fifth and the seventh code there, each with the next code right above it. The lower halves of two such results
share a word, so that two codes are masked at a time. Read as float16, `code * 2 ** (8 - w)` is a subnormal half, and
two halves go through the polynomial together: on a GPU one instruction for both. If all codes have two bits, no
polynomial is needed. Nothing else depends on the widths but numbers that a thread, which has the same block of every
token, keeps in registers. Loops over blocks of one width would need other loops for every head, and a table of levels
a load for every number.

The kernel has its own order of a block's channels: what shares a word stands side by side.

Legend: BLOCK_T tokens of a tile, BLOCK_N blocks.
"""

import triton
import triton.language as tl

from ..arithmetic import join_halves, multiply, multiply_add, permute_bytes
from ..stored_format import SCALE_OFFSET, SCALE_STEPS


# Tokens in use behind a tile whose words are loaded without a look at where the rows end: three words of a block may
# reach eleven bytes beyond a row, and a row has four at least
TOKENS_BEHIND = tl.constexpr(3)
# Of bytes that are scales: what a byte is a step of, and the logarithm of the smallest one's inverse
_SCALE_STEP = tl.constexpr(1 / SCALE_STEPS)
_LEAST_LOGARITHM = tl.constexpr(SCALE_OFFSET / SCALE_STEPS)


@triton.jit
def row_slots(BLOCK: tl.constexpr):
    """Return the channel of a row, in the row's order, for every slot of a tile."""
    places = tl.arange(0, BLOCK)
    return places // 8 * 8 + (places & 1) * 4 + ((places >> 1) & 3)


@triton.jit
def load_codebook(width_ptr, coefficient_ptr, NUM_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """
    Load widths and first bytes of a head's blocks, and coefficients of their levels, each `[BLOCK_N]`. These are of
    polynomials in a quarter of `c`, see `CodedRows`: the factor that makes that of a code is a half, too.
    """
    blocks = tl.arange(0, BLOCK_N)
    widths = tl.load(width_ptr + blocks, mask=blocks < NUM_BLOCKS, other=0).to(tl.int32)
    first_bytes = 1 + tl.cumsum(widths, axis=0) - widths
    own_ptr = coefficient_ptr + widths * 4
    term = ((tl.load(own_ptr) - 1.0) / 4).to(DTYPE)
    first = (tl.load(own_ptr + 1) * 4).to(DTYPE)
    second = (tl.load(own_ptr + 2) * 64).to(DTYPE)
    third = (tl.load(own_ptr + 3) * 1024).to(DTYPE)
    return widths, first_bytes, term, first, second, third


@triton.jit
def aligned_rows(rows_ptr):
    """The word that a pointer to bytes points into, and its byte there."""
    address = rows_ptr.to(tl.uint64)
    remainder = address & 3
    return (address - remainder).to(tl.pointer_type(tl.uint32)), remainder.to(tl.int32)


@triton.jit
def decode_levels(
    rows, first_token, length, ROW_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """
    Levels `[BLOCK_T, BLOCK_N, 8]` of rows, a pointer and their codebook, from a token on, in the order of `row_slots`;
    of tokens behind the `length` in use finite, but otherwise anything. A whole tile has `TOKENS_BEHIND` tokens in use
    behind it.
    """
    word_ptr, remainder = aligned_rows(rows[0])
    widths, first_bytes, term, first, second, third = rows[1]
    TURN: tl.constexpr = min(max(128 // BLOCK_N, 4), BLOCK_T)
    start = tl.cast(first_token, tl.int64) * ROW_SIZE + remainder
    first_word = start >> 2
    # Four rows are whole words: a thread's tokens lie alike, and their words at a distance that is known
    turns = tl.arange(0, BLOCK_T // TURN)[:, None, None]
    tokens = tl.arange(0, TURN)[None, :, None]
    first_bits = 8 * first_bytes - 8 + widths
    bits = ((start & 3) << 3).to(tl.int32) + ((tokens & 3) * (8 * ROW_SIZE) + first_bits[None, None, :])
    words = (bits >> 5) + (tokens >> 2) * ROW_SIZE
    words_ptr = word_ptr + first_word + words + turns * (TURN // 4 * ROW_SIZE)
    # Said so that Triton up to 3.6 lays lanes along blocks, not tokens. As nothing is known of the address' alignment,
    # no word is loaded together with another
    words_ptr = tl.max_contiguous(words_ptr, [1, 1, 2])
    if IS_WHOLE:
        word_0, word_1, word_2 = tl.load(words_ptr), tl.load(words_ptr + 1), tl.load(words_ptr + 2)
    else:
        # Of the words that hold rows in use the last: behind it may be no memory
        last_word = (((tl.cast(length, tl.int64) * ROW_SIZE + remainder - 1) >> 2) - first_word).to(tl.int32)
        words += turns * (TURN // 4 * ROW_SIZE)
        word_0 = tl.load(words_ptr, mask=words <= last_word, other=0)
        word_1 = tl.load(words_ptr + 1, mask=words + 1 <= last_word, other=0)
        word_2 = tl.load(words_ptr + 2, mask=words + 2 <= last_word, other=0)
    shifts = bits & 31
    block = _join_words(_shift_words(word_0, word_1, shifts), _shift_words(word_1, word_2, shifts))
    quarter = 2 * widths[None, None, :]
    even = join_halves(block.to(tl.uint32), _shift(block, 2 * quarter), PAIRS)
    odd = join_halves(_shift(block, quarter), _shift(block, 3 * quarter), PAIRS)
    later = widths.to(tl.uint32)[None, None, :]
    fields = ((256 - (256 >> widths)) * 0x00010001).to(tl.uint32)[None, None, :]
    pairs_0, pairs_1 = even & fields, (even >> later) & fields
    pairs_2, pairs_3 = odd & fields, (odd >> later) & fields
    pairs = tl.join(tl.join(pairs_0, pairs_2), tl.join(pairs_1, pairs_3))
    # Halves of a word next to each other, so that arithmetic is on both at a time
    numbers = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.float16, bitcast=True)
    numbers = tl.reshape(numbers, [BLOCK_T, BLOCK_N, 8]).to(DTYPE)
    # `code * 2 ** (8 - w)` in units of `2 ** -24`, times `2 ** 15`, is `code * factor / 2`
    centred = multiply_add(numbers, tl.full([1, 1, 1], 32768.0, DTYPE), term[None, :, None], PAIRS)
    square = multiply(centred, centred, PAIRS)
    inner = multiply_add(square, third[None, :, None], second[None, :, None], PAIRS)
    return multiply(centred, multiply_add(square, inner, first[None, :, None], PAIRS), PAIRS)


@triton.jit
def load_four_levels(coefficient_ptr):
    """The four levels of codes of two bits, as bytes of two words."""
    own_ptr = coefficient_ptr + 2 * 4
    first, second, third = tl.load(own_ptr + 1), tl.load(own_ptr + 2), tl.load(own_ptr + 3)
    near = _bits(0.25 * (first + 0.0625 * (second + 0.0625 * third)))
    far = _bits(0.75 * (first + 0.5625 * (second + 0.5625 * third)))
    return far | (near << 16) | 0x80008000, near | (far << 16)


@triton.jit
def _bits(number):
    return number.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def look_up_levels(
    rows, first_token, length, ROW_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """
    Levels as of `decode_levels`, of rows whose codes all have two bits: a byte permutation takes two of the four.
    """
    word_ptr, remainder = aligned_rows(rows[0])
    levels = rows[1]
    TURN: tl.constexpr = min(max(256 // BLOCK_N, 4), BLOCK_T)
    start = tl.cast(first_token, tl.int64) * ROW_SIZE + remainder
    first_word = start >> 2
    turns = tl.arange(0, BLOCK_T // TURN)[:, None, None]
    tokens = tl.arange(0, TURN)[None, :, None]
    bits = (((start & 3) + 1) << 3).to(tl.int32) + (tokens & 3) * (8 * ROW_SIZE)
    words = (bits >> 5) + (tokens >> 2) * ROW_SIZE + tl.arange(0, BLOCK_N // 2)[None, None, :]
    words_ptr = word_ptr + first_word + words + turns * (TURN // 4 * ROW_SIZE)
    words_ptr = tl.max_contiguous(words_ptr, [1, 1, 2])
    if IS_WHOLE:
        word_0, word_1 = tl.load(words_ptr), tl.load(words_ptr + 1)
    else:
        last_word = (((tl.cast(length, tl.int64) * ROW_SIZE + remainder - 1) >> 2) - first_word).to(tl.int32)
        words += turns * (TURN // 4 * ROW_SIZE)
        word_0 = tl.load(words_ptr, mask=words <= last_word, other=0)
        word_1 = tl.load(words_ptr + 1, mask=words + 1 <= last_word, other=0)
    # Two blocks, whose codes with numbers four apart are at the same place of bytes
    codes = _shift_words(word_0, word_1, bits & 31)
    pairs_0, pairs_1 = _look_up(codes, levels), _look_up(codes >> 2, levels)
    pairs_2, pairs_3 = _look_up(codes >> 4, levels), _look_up(codes >> 6, levels)
    pairs = tl.join(tl.join(pairs_0, pairs_2), tl.join(pairs_1, pairs_3))
    numbers = tl.join(pairs.to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.float16, bitcast=True)
    return tl.reshape(numbers, [BLOCK_T, BLOCK_N, 8])


@triton.jit
def _look_up(codes, levels):
    """Levels of the codes in the lowest two bits of each byte: words of two, of both halves."""
    # A nibble for each of the bytes `2 code` and `2 code + 1`
    places = (codes & 0x03030303) * 0x22 + 0x10101010
    return tl.join(permute_bytes(levels[0], levels[1], places), permute_bytes(levels[0], levels[1], places >> 16))


@triton.jit
def _join_words(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _shift(pair, count):
    """The low word of a pair of words that is shifted right."""
    return (pair >> tl.cast(count, tl.uint64)).to(tl.uint32)


@triton.jit
def _shift_words(low, high, count):
    return _shift(_join_words(low, high), count)


@triton.jit
def load_scales(
    rows_ptr, first_token, length, ROW_SIZE: tl.constexpr, BLOCK_T: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """The scales of a tile's tokens `[BLOCK_T]`, float32; anything finite behind those in use."""
    turns, tokens = tl.arange(0, BLOCK_T // 8)[:, None] * 8, tl.arange(0, 8)[None, :]
    rows_ptr += tl.cast(first_token, tl.int64) * ROW_SIZE + tokens * ROW_SIZE + turns * ROW_SIZE
    stored = tl.load(rows_ptr) if IS_WHOLE else tl.load(rows_ptr, mask=first_token + turns + tokens < length, other=0)
    stored = tl.reshape(stored, [BLOCK_T])
    return scale_of(stored.to(tl.float32))


@triton.jit
def scale_of(stored):
    """The scales that bytes, as numbers, stand for."""
    return tl.exp2(stored * _SCALE_STEP - _LEAST_LOGARITHM)
