"""The output of a tile's values, a block for each field of their codes.

Legend as in `attend.py`; a tile is of one chunk and head, and all pointers are those of that chunk and head. `SIDE` is
the `SideLayout` of the values. A field's output `[words, rows]` is in units of its own (`field_unit`), so that it can
be the sum that tensor cores add to.
"""

import triton
import triton.language as tl

from ..arithmetic import dot_parts, inverse_power, power_below
from .codes import channel_mask, field_number, load_by_field, load_words, take_field


# Probabilities times scales are at most twice that: small ones keep their digits in float16
_BOOST = tl.constexpr(2.0**14)


@triton.constexpr_function
def field_unit(side, piece, field, of_codes=False):
    """
    Return the size of a 1 in a field's output, times the reference that scales per token are relative to. `of_codes`
    it is the factor of boosted weights times a field's codes, as float16, also where the output is in units of 1.
    """
    # Not by a second function: up to Triton 3.6 one that calls another hands it tuples without names
    own = side.pieces[piece].fields[field]
    return 1.0 if side.by_channel and not of_codes else 2.0 ** (24 - 14 + own.shift - own.bit)


@triton.jit
def empty_outputs(SIDE: tl.constexpr, BLOCK_R: tl.constexpr):
    """Outputs and sums of zeros before the first tile."""
    outputs = ()
    for p in tl.static_range(len(SIDE.pieces)):
        for _ in tl.static_range(len(SIDE.pieces[p].fields)):
            outputs = outputs + (tl.zeros([tl.constexpr(SIDE.pieces[p].block), BLOCK_R], tl.float32),)
    sums = ()
    for _ in tl.static_range(tl.constexpr(SIDE.num_groups)):
        sums = sums + (tl.zeros([BLOCK_R], tl.float32),)
    return outputs, sums


@triton.jit
def weigh_codes(
    outputs, zero_sums, reference, probabilities, decay, codes_ptr, scale_ptr, zero_ptr, token_in_use,
    SIDE: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """
    Outputs decayed plus `values^T probabilities`, with values `zero + scale * code`.

    A scale per token multiplies the probabilities of its group, relative to a power of two near the largest so far. A
    scale per channel multiplies the output of its tile. Zeros per token become a sum for each group, `zero_sums`.
    """
    weighted = ()
    sums = ()
    if SIDE.by_channel:
        weighted = weighted + (probabilities * _BOOST,)
        total = tl.sum(probabilities, axis=0)
        sums = zero_sums
    else:
        tokens = tl.arange(0, BLOCK_T) * SIDE.scale_stride_s
        scales = ()
        largest = tl.zeros([BLOCK_T], tl.float32)
        for group in tl.static_range(tl.constexpr(SIDE.num_groups)):
            scale = tl.load(scale_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            zero = tl.load(zero_ptr + tokens + group, mask=token_in_use, other=0.0).to(tl.float32)
            scales = scales + (scale,)
            sums = sums + (zero_sums[group] * decay + tl.sum(probabilities * zero[:, None], axis=0),)
            largest = tl.maximum(largest, scale)
        new_reference = tl.maximum(reference, power_below(tl.max(largest, axis=0)))
        inverse = inverse_power(new_reference)
        decay = decay * (reference * inverse)
        reference = new_reference
        for group in tl.static_range(tl.constexpr(SIDE.num_groups)):
            weighted = weighted + (probabilities * (scales[group] * (inverse * _BOOST))[:, None],)
    if PARTS == 1:
        halves = ()
        for group in tl.static_range(len(weighted)):
            halves = halves + (weighted[group].to(tl.float16),)
        weighted = halves
    result = ()
    for p in tl.static_range(len(SIDE.pieces)):
        words = load_words(codes_ptr, token_in_use, SIDE, p, 1)
        for f in tl.static_range(len(SIDE.pieces[p].fields)):
            output = outputs[field_number(SIDE, p, f)] * decay[None, :]
            codes = take_field(words, SIDE, p, f, PACKED)
            if SIDE.by_channel:
                product = dot_parts(codes, weighted[0], tl.zeros(output.shape, tl.float32), PARTS)
                scale = load_by_field(scale_ptr, SIDE, p, f).to(tl.float32)
                output += product * (scale * field_unit(SIDE, p, f, True))[:, None]
                if SIDE.pieces[p].plane == 0:
                    zero = load_by_field(zero_ptr, SIDE, p, f).to(tl.float32)
                    output += zero[:, None] * total[None, :]
            else:
                output = dot_parts(codes, weighted[SIDE.pieces[p].fields[f].group], output, PARTS)
            result = result + (output,)
    return result, sums, reference


@triton.jit
def store_partials(
    output_ptr, maximum_ptr, total_ptr, outputs, zero_sums, reference, maximum, total, rows, num_rows,
    SIDE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Store what program (head, split, rows) of the grid has summed: planes of codes as if they were splits."""
    row_in_use = rows < num_rows
    split = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    for plane in tl.static_range(PLANES):
        result = (split * PLANES + plane) * num_rows + rows
        tl.store(maximum_ptr + result, maximum, mask=row_in_use)
        # Counted once
        tl.store(total_ptr + result, total if plane == 0 else tl.zeros_like(total), mask=row_in_use)
        for p in tl.static_range(len(SIDE.pieces)):
            for f in tl.static_range(len(SIDE.pieces[p].fields)):
                if SIDE.pieces[p].plane == plane:
                    output = outputs[field_number(SIDE, p, f)] * (reference * field_unit(SIDE, p, f))
                    if plane == 0 and not SIDE.by_channel:
                        output += zero_sums[SIDE.pieces[p].fields[f].group][None, :]
                    words = SIDE.pieces[p].unit * tl.arange(0, SIDE.pieces[p].block)[:, None]
                    pointers = output_ptr + result[None, :] * SIDE.dim + words
                    in_use = channel_mask(SIDE, p, f)[:, None] & row_in_use[None, :]
                    tl.store(pointers + SIDE.pieces[p].fields[f].first_channel, output, mask=in_use)
