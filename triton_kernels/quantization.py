"""Quantization of chunks and packing of the codes, in one kernel.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, G groups, P bytes a token. Codes are packed
by slabs: at 2 bits byte `j` of a token holds channels `j`, `j + W`, `j + 2W`, `j + 3W` with `W = ceil(D / 4)`, lowest
bits first, so that a program reads and writes rows of channels that lie side by side. 3 bits are a 2-bit plane and
after it a 1-bit plane, whose slabs are narrower.

A program finds the range of its groups, stores their scales and zeros, and reads those back when it packs: channels
are grouped one way for the range and laid out another way for the slabs, and the round trip through the GPU's cache
turns the one layout into the other. The states are read again too, also from the cache. Long groups of one channel are
too few to fill a GPU with, so there range and packing are launched one after the other, each split its own way.

A scale or zero that is not finite tells that the states exceed float16 or are NaN; looking at that is the caller's.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl


# Groups of this many tokens of a channel are quantized by one program, longer ones by many.
MAX_TOKENS_IN_PROGRAM = 128
_MAX_TOKENS_IN_TILE = 32
_CHANNELS_IN_RANGE_TILE = 32
_MAX_BYTES_IN_TILE = 64
_VALUES_IN_TOKEN_TILE = 1024
# 2**23: a float32 of this size has no fraction, so adding it rounds, half to even.
_ROUNDER = tl.constexpr(8388608.0)


@triton.jit
def _scale_and_zero(low, high, poison, NBITS: tl.constexpr):
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
def _pack_plane(
    states_rows,
    codes_rows,
    scale_rows,
    zero_rows,
    is_token,
    states_stride_d,
    NBITS: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """
    Packs bits `SHIFT` to `SHIFT + WIDTH - 1` of the codes of `BLOCK_L` tokens of a head. The first four are pointers
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
            states = tl.load(states_ptrs, mask=is_token[:, None] & is_channel, other=0.0).to(tl.float32)
            groups = (channels // GROUP_SIZE)[None, :]
            step = tl.load(scale_rows[:, None] + groups, mask=is_channel, other=0.0).to(tl.float32)
            zero = tl.load(zero_rows[:, None] + groups, mask=is_channel, other=0.0).to(tl.float32)
            # A constant group, and what fills up the last slab, has step 0 and code 0
            inverse = tl.where(step > 0, tl.div_rn(tl.zeros_like(step) + 1.0, tl.where(step > 0, step, 1.0)), 0.0)
            # Clamped before rounding, not after, which is the same and keeps to the range that the rounding needs
            position = tl.minimum(tl.maximum((states - zero) * inverse, 0.0), 2.0**NBITS - 1.0)
            codes = (position + _ROUNDER).to(tl.int32, bitcast=True) & 0xFF
            packed |= ((codes >> SHIFT) & ((1 << WIDTH) - 1)) << (slab * WIDTH)
        in_codes = is_token[:, None] & (in_slab < SLAB)[None, :]
        tl.store(codes_rows[:, None] + in_slab[None, :], packed.to(tl.uint8), mask=in_codes)


@triton.jit
def _pack(
    states_rows,
    codes_rows,
    scale_rows,
    zero_rows,
    is_token,
    states_stride_d,
    NBITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Packs all bits of the codes: see `_pack_plane`."""
    # fmt: off
    if NBITS == 3:
        _pack_plane(states_rows, codes_rows, scale_rows, zero_rows, is_token, states_stride_d,
                    NBITS, 2, 0, HEAD_DIM, GROUP_SIZE, BLOCK_L, BLOCK_W)
        _pack_plane(states_rows, codes_rows + (HEAD_DIM + 3) // 4, scale_rows, zero_rows, is_token, states_stride_d,
                    NBITS, 1, 2, HEAD_DIM, GROUP_SIZE, BLOCK_L, BLOCK_W)
    else:
        _pack_plane(states_rows, codes_rows, scale_rows, zero_rows, is_token, states_stride_d,
                    NBITS, NBITS, 0, HEAD_DIM, GROUP_SIZE, BLOCK_L, BLOCK_W)
    # fmt: on


@triton.jit
def _quantize_channels_kernel(
    states_ptr,
    keep_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    num_chunks,
    num_groups,
    group_size,
    num_tile_programs,
    num_block_programs,
    states_stride_b,
    states_stride_h,
    states_stride_m,
    states_stride_l,
    states_stride_d,
    keep_stride_b,
    keep_stride_h,
    keep_stride_m,
    keep_stride_l,
    keep_stride_d,
    NBITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    FINDS_RANGE: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """
    One group of tokens of every channel of a head. To find the range, `num_block_programs` programs share the blocks
    of channels; to pack, `num_tile_programs` programs share the tiles of tokens. What does both is one program.
    """
    program = tl.program_id(0)
    first_block = program % num_block_programs
    program = program // num_block_programs
    first_tile = program % num_tile_programs
    program = program // num_tile_programs
    group = (program % num_groups).to(tl.int64)
    chunk = (program // num_groups).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    states_ptr += batch * states_stride_b + head * states_stride_h + chunk * states_stride_m
    states_ptr += group * group_size * states_stride_l
    group_index = ((batch * tl.num_programs(1) + head) * num_chunks + chunk) * num_groups + group
    codes_ptr += group_index * group_size * NUM_BYTES
    scale_ptr += group_index * HEAD_DIM
    zero_ptr += group_index * HEAD_DIM
    if FINDS_RANGE:
        if HAS_KEEP:
            keep_ptr += batch * keep_stride_b + head * keep_stride_h + chunk * keep_stride_m
            keep_ptr += group * group_size * keep_stride_l
        for block in range(first_block, tl.cdiv(HEAD_DIM, BLOCK_D), num_block_programs):
            channels = block * BLOCK_D + tl.arange(0, BLOCK_D)
            is_channel = channels < HEAD_DIM
            low = tl.full([BLOCK_L, BLOCK_D], float("inf"), dtype=tl.float32)
            high = tl.full([BLOCK_L, BLOCK_D], float("-inf"), dtype=tl.float32)
            poison = tl.zeros([BLOCK_L, BLOCK_D], dtype=tl.float32)
            for start in range(0, group_size, BLOCK_L):
                tokens = (start + tl.arange(0, BLOCK_L)).to(tl.int64)
                kept = (tokens < group_size)[:, None] & is_channel[None, :]
                states_offsets = tokens[:, None] * states_stride_l + channels[None, :] * states_stride_d
                states = tl.load(states_ptr + states_offsets, mask=kept, other=0.0).to(tl.float32)
                if HAS_KEEP:
                    keep_offsets = tokens[:, None] * keep_stride_l + channels[None, :] * keep_stride_d
                    kept = kept & (tl.load(keep_ptr + keep_offsets, mask=kept, other=0) != 0)
                low = tl.minimum(low, tl.where(kept, states, float("inf")))
                high = tl.maximum(high, tl.where(kept, states, float("-inf")))
                poison += tl.where(kept, states * 0.0, 0.0)
            scale, zero = _scale_and_zero(tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(poison, axis=0), NBITS)
            tl.store(scale_ptr + channels, scale, mask=is_channel)
            tl.store(zero_ptr + channels, zero, mask=is_channel)
        # What one thread has stored, others read when they pack
        tl.debug_barrier()
    if PACKS:
        for tile in range(first_tile, tl.cdiv(group_size, BLOCK_L), num_tile_programs):
            tokens = (tile * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
            states_rows = states_ptr + tokens * states_stride_l
            codes_rows = codes_ptr + tokens * NUM_BYTES
            one_row = tl.zeros([1], dtype=tl.int32)
            # fmt: off
            _pack(states_rows, codes_rows, scale_ptr + one_row, zero_ptr + one_row, tokens < group_size,
                  states_stride_d, NBITS, HEAD_DIM, 1, BLOCK_L, BLOCK_W)
            # fmt: on


@triton.jit
def _quantize_tokens_kernel(
    states_ptr,
    keep_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    num_heads,
    num_chunks,
    chunk_length,
    states_stride_b,
    states_stride_h,
    states_stride_m,
    states_stride_l,
    states_stride_d,
    keep_stride_b,
    keep_stride_h,
    keep_stride_m,
    keep_stride_l,
    keep_stride_d,
    NBITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    HEADS_SHARE: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A tile of tokens: of one head, whose channels form `NUM_GROUPS` groups, or of all heads, which `HEADS_SHARE`."""
    num_tiles = tl.cdiv(chunk_length, BLOCK_L)
    chunk = (tl.program_id(0) // num_tiles).to(tl.int64)
    tokens = ((tl.program_id(0) % num_tiles) * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
    first_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    is_token = tokens < chunk_length
    # A row that exists, in place of those past the end
    tokens = tl.where(is_token, tokens, 0)
    states_rows = states_ptr + batch * states_stride_b + chunk * states_stride_m + tokens * states_stride_l
    groups = tl.arange(0, BLOCK_G)
    in_group = tl.arange(0, BLOCK_S)
    channels = groups[:, None] * GROUP_SIZE + in_group[None, :]
    is_channel = (groups < NUM_GROUPS)[:, None] & (in_group < GROUP_SIZE)[None, :]
    last_head = num_heads if HEADS_SHARE else first_head + 1
    low = tl.full([BLOCK_L, BLOCK_G], float("inf"), dtype=tl.float32)
    high = tl.full([BLOCK_L, BLOCK_G], float("-inf"), dtype=tl.float32)
    poison = tl.zeros([BLOCK_L, BLOCK_G], dtype=tl.float32)
    for head in range(first_head, last_head):
        kept = is_token[:, None, None] & is_channel[None, :, :]
        head_offset = tl.cast(head, tl.int64) * states_stride_h
        states_ptrs = (states_rows + head_offset)[:, None, None] + channels[None, :, :] * states_stride_d
        states = tl.load(states_ptrs, mask=kept, other=0.0).to(tl.float32)
        if HAS_KEEP:
            keep_rows = keep_ptr + batch * keep_stride_b + tl.cast(head, tl.int64) * keep_stride_h
            keep_rows += chunk * keep_stride_m + tokens * keep_stride_l
            keep_ptrs = keep_rows[:, None, None] + channels[None, :, :] * keep_stride_d
            kept = kept & (tl.load(keep_ptrs, mask=kept, other=0) != 0)
        low = tl.minimum(low, tl.min(tl.where(kept, states, float("inf")), axis=2))
        high = tl.maximum(high, tl.max(tl.where(kept, states, float("-inf")), axis=2))
        poison += tl.sum(tl.where(kept, states * 0.0, 0.0), axis=2)
    scale, zero = _scale_and_zero(low, high, poison, NBITS)
    range_index = ((batch * tl.num_programs(1) + first_head) * num_chunks + chunk) * chunk_length + tokens
    is_group = is_token[:, None] & (groups < NUM_GROUPS)[None, :]
    range_offsets = range_index[:, None] * NUM_GROUPS + groups[None, :]
    tl.store(scale_ptr + range_offsets, scale, mask=is_group)
    tl.store(zero_ptr + range_offsets, zero, mask=is_group)
    # What one thread has stored, others read when they pack
    tl.debug_barrier()
    scale_rows = scale_ptr + range_index * NUM_GROUPS
    zero_rows = zero_ptr + range_index * NUM_GROUPS
    for head in range(first_head, last_head):
        head_offset = tl.cast(head, tl.int64) * states_stride_h
        codes_index = ((batch * num_heads + head) * num_chunks + chunk) * chunk_length + tokens
        # fmt: off
        _pack(states_rows + head_offset, codes_ptr + codes_index * NUM_BYTES, scale_rows, zero_rows, is_token,
              states_stride_d, NBITS, HEAD_DIM, GROUP_SIZE, BLOCK_L, BLOCK_W)
        # fmt: on


def quantize_and_pack(
    states: torch.Tensor, keep: torch.Tensor | None, nbits: int, axis: str, group_size: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Quantizes chunks of keys or values and packs the codes.

    Args:
        states (`torch.Tensor` of shape `[B, H, M, L, D]`, floating point, any strides):
            What to quantize; computed with in float32.
        keep (`torch.Tensor` broadcastable to the states, bool, *optional*):
            Which values may widen the range of their group. The others are clamped into it.
        nbits (`int`):
            Bits a code, one of 2, 3, 4, 8.
        axis (`str`):
            `"channel"`, groups of consecutive tokens of a channel, or `"token"`, groups of channels of a token.
        group_size (`int`, *optional*):
            Length of a group, a divisor of L or D. `None`: all tokens, or all channels of all heads.

    Returns:
        `codes` (uint8, `[B, H, M, L, P]`), `scale` and `zero` (float16, `[B, H, M, G, D]` by channel,
        `[B, H or 1, M, L, G]` by token), all contiguous. A group whose range does not fit float16, or that has a NaN
        among what is kept, has a scale or zero that is not finite.
    """
    batch_size, num_heads, num_chunks, chunk_length, head_dim = states.shape
    num_bytes = -(-head_dim // 4) + -(-head_dim // 8) if nbits == 3 else -(-head_dim // (8 // nbits))
    heads_share = axis == "token" and group_size is None
    size = group_size or (chunk_length if axis == "channel" else head_dim)
    num_groups = (chunk_length if axis == "channel" else head_dim) // size
    num_range_heads = 1 if heads_share else num_heads
    last_dims = (num_groups, head_dim) if axis == "channel" else (chunk_length, num_groups)
    codes = states.new_empty(batch_size, num_heads, num_chunks, chunk_length, num_bytes, dtype=torch.uint8)
    scale = states.new_empty(batch_size, num_range_heads, num_chunks, *last_dims, dtype=torch.float16)
    zero = torch.empty_like(scale)
    if codes.numel() == 0:
        return codes, scale, zero
    assert num_groups * size == (chunk_length if axis == "channel" else head_dim)
    keep_strides: tuple[int, ...] = (0,) * 5
    if keep is not None:
        keep = keep.expand_as(states)
        keep_strides = keep.stride()
    tensors = (states, keep, codes, scale, zero)
    strides = (*states.stride(), *keep_strides)
    constants = {"NBITS": nbits, "HEAD_DIM": head_dim, "NUM_BYTES": num_bytes, "HAS_KEEP": keep is not None}
    slab = -(-head_dim // (8 // (2 if nbits == 3 else nbits)))
    block_w = min(triton.next_power_of_2(slab), _MAX_BYTES_IN_TILE)
    if axis == "token":
        block_l = max(1, _VALUES_IN_TOKEN_TILE // triton.next_power_of_2(head_dim))
        grid = (triton.cdiv(chunk_length, block_l) * num_chunks, num_range_heads, batch_size)
        _quantize_tokens_kernel[grid](
            *tensors,
            num_heads,
            num_chunks,
            chunk_length,
            *strides,
            **constants,
            GROUP_SIZE=size,
            NUM_GROUPS=num_groups,
            HEADS_SHARE=heads_share,
            BLOCK_L=block_l,
            BLOCK_G=triton.next_power_of_2(num_groups),
            BLOCK_S=triton.next_power_of_2(size),
            BLOCK_W=block_w,
        )
        return codes, scale, zero
    block_l = min(triton.next_power_of_2(size), _MAX_TOKENS_IN_TILE)
    num_tiles, num_blocks = triton.cdiv(size, block_l), triton.cdiv(head_dim, _CHANNELS_IN_RANGE_TILE)
    # Of each launch: what it does, and how many programs share tiles and blocks
    launches = [(True, True, 1, 1)]
    if size > MAX_TOKENS_IN_PROGRAM:
        launches = [(True, False, 1, num_blocks), (False, True, num_tiles, 1)]
    for finds_range, packs, num_tile_programs, num_block_programs in launches:
        num_programs = num_chunks * num_groups * num_tile_programs * num_block_programs
        _quantize_channels_kernel[(num_programs, num_heads, batch_size)](
            *tensors,
            num_chunks,
            num_groups,
            size,
            num_tile_programs,
            num_block_programs,
            *strides,
            **constants,
            FINDS_RANGE=finds_range,
            PACKS=packs,
            BLOCK_L=block_l,
            BLOCK_D=_CHANNELS_IN_RANGE_TILE,
            BLOCK_W=block_w,
        )
    return codes, scale, zero
