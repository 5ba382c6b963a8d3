"""The codes of a tile: loaded, and multiplied by queries or probabilities with scales wherever they cost least.

A scale per channel multiplies the query (or the output), a scale per token the scores (or the probabilities), and the
zeros become a constant per row. Only groups that fit neither way are dequantized in registers. Legend as in
`attend.py`; a tile is `[BLOCK_T tokens, BLOCK_D channels]` of one chunk and head, and all pointers are those of that
chunk and head.
"""

# The parameters of kernels are pointers, numbers and blocks: no Python types
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.dot import dot_exact


@triton.jit
def load_codes(
    codes_ptr,
    STRIDE: tl.constexpr,
    channels,
    in_use,
    HEAD_DIM: tl.constexpr,
    NBITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Codes `[tokens, channels]` in float16, of the tile that begins at `codes_ptr`."""
    rows_ptr = codes_ptr + tl.arange(0, BLOCK_T)[:, None] * STRIDE
    channels = channels[None, :]
    if NBITS == 3:
        # Two planes: two low bits, then the high bit
        LOW_WIDTH: tl.constexpr = (HEAD_DIM + 3) // 4
        HIGH_WIDTH: tl.constexpr = (HEAD_DIM + 7) // 8
        low = tl.load(rows_ptr + channels % LOW_WIDTH, mask=in_use, other=0).to(tl.int32)
        high = tl.load(rows_ptr + (LOW_WIDTH + channels % HIGH_WIDTH), mask=in_use, other=0).to(tl.int32)
        codes = ((low >> (channels // LOW_WIDTH * 2)) & 3) | (((high >> (channels // HIGH_WIDTH)) & 1) << 2)
    elif NBITS == 8:
        codes = tl.load(rows_ptr + channels, mask=in_use, other=0).to(tl.int32)
    else:
        # A byte is read once for each of its channels: the cache next to the registers answers all but the first
        WIDTH: tl.constexpr = (HEAD_DIM * NBITS + 7) // 8
        packed = tl.load(rows_ptr + channels % WIDTH, mask=in_use, other=0).to(tl.int32)
        codes = (packed >> (channels // WIDTH * NBITS)) & ((1 << NBITS) - 1)
    return codes.to(tl.float16)


@triton.jit
def load_groups(
    scale_ptr,
    zero_ptr,
    STRIDE: tl.constexpr,
    first_token,
    token_in_use,
    channels,
    channel_in_use,
    tokens_per_group,
    CHANNELS_PER_GROUP: tl.constexpr,
    FOLD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Scale and zero of a tile in float32: `[channels]` (fold 0), `[tokens]` (1) or `[tokens, channels]` (2, 3)."""
    tokens = tl.arange(0, BLOCK_T)
    if FOLD == 0:
        base = tl.cast(first_token // tokens_per_group, tl.int64) * STRIDE
        offsets = channels
        in_use = channel_in_use
    elif FOLD == 1:
        base = tl.cast(first_token, tl.int64) * STRIDE
        offsets = tokens * STRIDE
        in_use = token_in_use
    else:
        if FOLD == 2:
            base = tl.cast(first_token, tl.int64) * STRIDE
            offsets = tokens[:, None] * STRIDE + (channels // CHANNELS_PER_GROUP)[None, :]
        else:
            base = tl.cast(first_token // tokens_per_group, tl.int64) * STRIDE
            groups = (first_token % tokens_per_group + tokens) // tokens_per_group
            offsets = groups[:, None] * STRIDE + channels[None, :]
        in_use = token_in_use[:, None] & channel_in_use[None, :]
    scale = tl.load(scale_ptr + base + offsets, mask=in_use, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + base + offsets, mask=in_use, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def score_codes(
    query,
    query_sum,
    codes,
    scale,
    zero,
    FOLD: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`query keys^T` `[rows, tokens]`, with keys `zero + scale * code`."""
    if FOLD == 0:
        scores = dot_exact(query * scale[None, :], tl.trans(codes), PARTS)
        scores += tl.sum(query * zero[None, :], axis=1)[:, None]
    elif FOLD == 1:
        scores = dot_exact(query, tl.trans(codes), PARTS)
        scores = scores * scale[None, :] + query_sum[:, None] * zero[None, :]
    else:
        keys = codes.to(tl.float32) * scale + zero
        if PARTS == 1:
            scores = dot_exact(query, tl.trans(keys.to(tl.float16)), PARTS)
        else:
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    return scores


@triton.jit
def weigh_codes(probabilities, codes, scale, zero, FOLD: tl.constexpr, PARTS: tl.constexpr):
    """`probabilities values` `[rows, channels]`, with values `zero + scale * code`."""
    if FOLD == 0:
        output = dot_exact(probabilities, codes, PARTS) * scale[None, :]
        output += tl.sum(probabilities, axis=1)[:, None] * zero[None, :]
    elif FOLD == 1:
        output = dot_exact(probabilities * scale[None, :], codes, PARTS)
        output += tl.sum(probabilities * zero[None, :], axis=1)[:, None]
    else:
        values = codes.to(tl.float32) * scale + zero
        if PARTS == 1:
            output = dot_exact(probabilities, values.to(tl.float16), PARTS)
        else:
            output = tl.dot(probabilities, values, input_precision="ieee")
    return output
