"""Tiles of `attend_kernel`: scores from keys, weights, their sum with values, and that sum rotated back in the end, by
a product with a Hadamard matrix whose signs are made, not loaded.

Sylvester's matrix has -1 where row and column have an odd number of bits in common. Legend as in `attend.py`; a tile
is `[BLOCK_T tokens, BLOCK channels]` of one head.
"""

import triton
import triton.language as tl

from ..arithmetic import dot_parts, inverse_power, multiply, multiply_add, power_below, rotate_pairs, same_halves
from ..attention.masks import mask_scores
from .levels import decode_levels, load_scales, look_up_levels, row_slots
from .rotated_queries import rotate_back


# Factor of weights times scales of values, which are at most 246: as halves they do not overflow, and fewer are 0
WEIGHT_FACTOR = tl.constexpr(128.0)


@triton.jit
def load_pairs(partner_ptr, pairs, KEY_DIM: tl.constexpr):
    """First and second channels of pairs, and which of them there are; others are channel 0."""
    NUM_PAIRS: tl.constexpr = (KEY_DIM + 1) // 2
    in_use = pairs < NUM_PAIRS
    firsts, seconds = pairs, pairs + NUM_PAIRS
    if partner_ptr is not None:
        firsts = tl.load(partner_ptr + pairs, mask=in_use, other=0)
        seconds = tl.load(partner_ptr + NUM_PAIRS + pairs, mask=in_use, other=KEY_DIM)
    has_second = in_use & (seconds < KEY_DIM)
    return tl.where(in_use, firsts, 0), in_use, tl.where(has_second, seconds, 0), has_second


@triton.jit
def load_bases(
    basis_ptr, step_ptr, factor_ptr, mean_ptr, head, firsts, first_in_use, seconds, second_in_use,
    KEY_DIM: tl.constexpr, KEY_COMPONENTS: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """
    A head's bases `[BLOCK_K, BLOCK_D]` of first and second channels of pairs, of numbers up to 1, and their means; and
    what a pair's ones stand for.
    """
    components = row_slots(BLOCK_K)
    component_in_use = components < KEY_COMPONENTS
    steps = tl.load(step_ptr + head * KEY_DIM + components, mask=component_in_use, other=0.0)
    # Every row has a code of 127
    unit = tl.maximum(tl.max(steps, axis=0) * 127.0, 1e-30)
    steps /= unit
    first_factors = tl.load(factor_ptr + head * KEY_DIM + firsts)
    second_factors = tl.load(factor_ptr + head * KEY_DIM + seconds)
    least = tl.where(second_in_use, tl.minimum(first_factors, second_factors), first_factors)
    sizes = unit / least
    basis_ptr += head * (KEY_DIM * KEY_DIM) + components[:, None] * KEY_DIM
    mean_ptr += head * KEY_DIM
    # fmt: off
    first, first_means = _load_half(
        basis_ptr, mean_ptr, firsts, first_in_use, component_in_use, steps, least / first_factors, sizes, DTYPE)
    second, second_means = _load_half(
        basis_ptr, mean_ptr, seconds, second_in_use, component_in_use, steps, least / second_factors, sizes, DTYPE)
    # fmt: on
    return (first, second), (first_means, second_means), sizes


@triton.jit
def _load_half(
    row_ptrs, mean_ptr, channels, channel_in_use, component_in_use, steps, shares, sizes, DTYPE: tl.constexpr
):  # fmt: skip
    in_use = component_in_use[:, None] & channel_in_use[None, :]
    codes = tl.load(row_ptrs + channels[None, :], mask=in_use, other=0).to(tl.float32)
    means = tl.load(mean_ptr + channels, mask=channel_in_use, other=0.0).to(tl.float32) / sizes
    return (codes * steps[:, None] * shares[None, :]).to(DTYPE), means.to(DTYPE)


@triton.jit
def attend_tile(
    start, length, key_rows, basis, means, value_rows, own, partners, size, angles, mask_ptr, mask_rows, mask_stride_t,
    row_in_use, score_ptrs, maximum, totals, output,
    KEY_ROW_SIZE: tl.constexpr, VALUE_ROW_SIZE: tl.constexpr, BASIS: tl.constexpr, ROTARY: tl.constexpr,
    TWO_BITS: tl.constexpr, MASK: tl.constexpr, SCORES: tl.constexpr, DTYPE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """
    Carry the queries, as rotated back to a tile's start, and the online softmax on through a tile; or `SCORES` are
    stored, of a query at each of `score_ptrs` and behind it, and there is no softmax. Rows of a `basis`, two of
    `[BLOCK_K, BLOCK_D]`, become channels by products, others `[BLOCK_K // 8, 8]` are channels.
    """
    cosines, sines, offset_cosines, offset_sines = angles
    # fmt: off
    scales = load_scales(key_rows[0], start, length, KEY_ROW_SIZE, BLOCK_T, IS_WHOLE).to(DTYPE)
    keys = decode_levels(
        key_rows, start, length, KEY_ROW_SIZE, BLOCK_T, BLOCK_K // 8, DTYPE, PAIRS, IS_WHOLE)
    if BASIS:
        keys = keep_halves(tl.reshape(keys, [BLOCK_T, BLOCK_K]), PAIRS)
        # Scales come after the product: a thread then has those of two tokens
        firsts = tl.dot(keys, basis[0], input_precision="ieee").to(DTYPE)
        firsts = multiply_add(firsts, scales[:, None], means[0][None, :], PAIRS)
        seconds = tl.dot(keys, basis[1], input_precision="ieee").to(DTYPE)
        seconds = multiply_add(seconds, scales[:, None], means[1][None, :], PAIRS)
        if ROTARY:
            firsts, seconds = rotate_pairs(firsts, seconds, offset_cosines, offset_sines, PAIRS)
        firsts, seconds = keep_halves(firsts, PAIRS), keep_halves(seconds, PAIRS)
        scores = _multiply_queries(firsts, seconds, own, partners, size, DTYPE, PAIRS, BLOCK_R)
    else:
        keys = tl.reshape(multiply_add(keys, scales[:, None, None], means[None, :, :], PAIRS), [BLOCK_T, BLOCK_K])
        if ROTARY:
            by_cosines = keep_halves(multiply(keys, offset_cosines, PAIRS), PAIRS)
            by_sines = keep_halves(multiply(keys, offset_sines, PAIRS), PAIRS)
            scores = _multiply_queries(by_cosines, by_sines, own, -partners, size, DTYPE, PAIRS, BLOCK_R)
        else:
            scores = tl.dot(keep_halves(keys, PAIRS), own.to(DTYPE), input_precision="ieee") * size[None, :]
    if ROTARY:
        own, partners = rotate_back(own, partners, cosines, sines)
    tokens = start + tl.arange(0, BLOCK_T)
    in_use = (tokens < length)[:, None] & row_in_use[None, :]
    if SCORES:
        tl.store(score_ptrs[None, :] + tokens[:, None], scores, mask=in_use)
    else:
        if MASK != 0 or not IS_WHOLE:
            mask_ptrs = mask_ptr
            if MASK:
                mask_ptrs = mask_ptr + mask_rows[None, :] + tl.cast(tokens, tl.int64)[:, None] * mask_stride_t
            scores = mask_scores(scores, mask_ptrs, in_use, MASK)
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=0))
        # A row that may attend to nothing so far has no maximum to subtract
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - reference[None, :])
        decay = tl.exp2(maximum - reference)[None, :]
        totals = totals * decay + weights
        scales = load_scales(value_rows[0], start, length, VALUE_ROW_SIZE, BLOCK_T, IS_WHOLE) * WEIGHT_FACTOR
        if TWO_BITS:
            values = look_up_levels(value_rows, start, length, VALUE_ROW_SIZE, BLOCK_T, BLOCK_V // 8, IS_WHOLE)
        else:
            values = decode_levels(
                value_rows, start, length, VALUE_ROW_SIZE, BLOCK_T, BLOCK_V // 8, DTYPE, PAIRS, IS_WHOLE)
        values = tl.trans(keep_halves(tl.reshape(values, [BLOCK_T, BLOCK_V]), PAIRS))
        weights = keep_halves((weights * scales[:, None]).to(DTYPE), PAIRS)
        output = tl.dot(values, weights, output * decay, input_precision="ieee")
        maximum = new_maximum
    # fmt: on
    return own, partners, maximum, totals, output


@triton.jit
def _multiply_queries(
    keys, other_keys, own, partners, size, DTYPE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_R: tl.constexpr
):  # fmt: skip
    """
    Scores `[BLOCK_T, BLOCK_R]` of keys and own channels of queries, and other keys and partners' channels. Half as
    many queries, side by side with their partners' channels, are one operand, and their scores are there twice.
    """
    if own.shape[1] == BLOCK_R:
        own, partners = keep_halves(own.to(DTYPE), PAIRS), keep_halves(partners.to(DTYPE), PAIRS)
        scores = tl.dot(keys, own, input_precision="ieee")
        scores = tl.dot(other_keys, partners, scores, input_precision="ieee") * size[None, :]
    else:
        SHAPE: tl.constexpr = [keys.shape[0], BLOCK_R // 2, 2]
        both = keep_halves(tl.reshape(tl.join(own, partners).to(DTYPE), [own.shape[0], BLOCK_R]), PAIRS)
        scores, _ = tl.split(tl.reshape(tl.dot(keys, both, input_precision="ieee"), SHAPE))
        _, other_scores = tl.split(tl.reshape(tl.dot(other_keys, both, input_precision="ieee"), SHAPE))
        scores = (scores + other_scores) * size[None, :]
        scores = tl.reshape(tl.join(scores, scores), [keys.shape[0], BLOCK_R])
    return scores


@triton.jit
def keep_halves(numbers, PAIRS: tl.constexpr):
    """
    Return an operand of a product as it is, without a trace of the bytes it is made of: by their size some compilers
    would choose a layout for the product.
    """
    return same_halves(numbers) if PAIRS else numbers


@triton.jit
def store_sums(maximum_ptr, total_ptr, places, row_in_use, maximum, totals):
    """Maxima and totals of a split's rows, at their `places`."""
    tl.store(maximum_ptr + places, maximum, mask=row_in_use)
    tl.store(total_ptr + places, tl.sum(totals, axis=0), mask=row_in_use)


@triton.jit
def store_nothing(output_ptr, maximum_ptr, total_ptr, matrix, rows, num_rows, channels, row_in_use, DIM: tl.constexpr):
    """Store the partial result of a split that has no tokens."""
    places = (matrix * tl.num_programs(1) + tl.program_id(1)) * num_rows + rows
    nothing = tl.zeros_like(places).to(tl.float32)
    tl.store(maximum_ptr + places, nothing - float("inf"), mask=row_in_use)
    tl.store(total_ptr + places, nothing, mask=row_in_use)
    nothings = nothing[None, :] + tl.zeros_like(channels).to(tl.float32)[:, None]
    store_outputs(output_ptr, places, channels, row_in_use, nothings, DIM)


@triton.jit
def store_outputs(output_ptr, places, channels, row_in_use, output, DIM: tl.constexpr):
    """Outputs `[channels, rows]` of a split, or components."""
    in_use = row_in_use[None, :] & (channels < DIM)[:, None]
    tl.store(output_ptr + places[None, :] * DIM + channels[:, None], output, mask=in_use)


# Channels that come of one product: of more, registers could not hold the matrix
_BLOCK_CHANNELS = tl.constexpr(64)


@triton.jit
def store_rotated(output_ptr, places, slots, row_in_use, output, DIM: tl.constexpr, SIZE: tl.constexpr):
    """
    Store outputs `[BLOCK_V, rows]`, whose channels are `slots`, rotated back; every `SIZE` channels, a power of two,
    were rotated together.
    """
    # Slots of no channel may hold anything
    output = tl.where((slots < DIM)[:, None], output, 0.0)
    # Two halves hold 22 bits of what is at most 2
    power = power_below(tl.max(tl.abs(output), axis=0))
    output *= inverse_power(power)[None, :]
    power *= SIZE**-0.5
    BLOCK: tl.constexpr = output.shape[0] if output.shape[0] < _BLOCK_CHANNELS else _BLOCK_CHANNELS
    COUNT: tl.constexpr = output.shape[0] // BLOCK
    channels = tl.arange(0, BLOCK)
    signs = _signs(channels[:, None], row_slots(BLOCK)[None, :], SIZE)
    blocks = slots // BLOCK
    for number in tl.static_range(COUNT):
        # The matrix of more channels is that of a block, with signs that are its blocks' own
        own = output * _signs(blocks * BLOCK, number * BLOCK, SIZE).to(tl.float32)[:, None]
        own = tl.sum(tl.reshape(own, [COUNT, BLOCK, own.shape[1]]), axis=0)
        turned = dot_parts(signs, own, tl.zeros_like(own), 2) * power[None, :]
        store_outputs(output_ptr, places, channels + number * BLOCK, row_in_use, turned, DIM)


@triton.jit
def _signs(rows, columns, SIZE: tl.constexpr):
    """1 and -1 of the matrix, 0 between channels that were not rotated together, in float16."""
    common = rows & columns & (SIZE - 1)
    common ^= common >> 5
    # A bit says whether five are odd
    odd = (0x96696996 >> (common & 31).to(tl.uint32)) & 1
    signs = 1.0 - 2.0 * odd.to(tl.float16)
    return tl.where(rows // SIZE == columns // SIZE, signs, 0.0).to(tl.float16)
