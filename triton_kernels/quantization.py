"""Quantization of chunks and packing of the codes, in one kernel.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, G groups, P bytes a token. The layout of
the bytes is told in `packing`.

A program finds the range of its groups, stores their scales and zeros, and reads those back when it packs: channels
are grouped one way for the range and laid out another way for the slabs, and the round trip through the GPU's cache
turns the one layout into the other. The states are read again too, also from the cache. Long groups of one channel are
too few to fill a GPU with, so there range and packing are launched one after the other, each split its own way.

What the codes miss of each value can be written along with them: it is known here without unpacking anything.

A scale or zero that is not finite tells that the states exceed float16 or are NaN. A number in the GPU's memory is set
then, so that many launches can be looked at with one synchronization.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from kvcache_plugins.triton_kernels.packing import pack, report_range, scale_and_zero


# Groups of this many tokens of a channel are quantized by one program, longer ones by many.
MAX_TOKENS_IN_PROGRAM = 128
_MAX_TOKENS_IN_TILE = 32
_CHANNELS_IN_RANGE_TILE = 32
_MAX_BYTES_IN_TILE = 64
_VALUES_IN_TOKEN_TILE = 1024


@triton.jit
def _quantize_channels_kernel(
    states_ptr,
    keep_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    missing_ptr,
    exceeded_ptr,
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
    WRITES_MISSING: tl.constexpr,
    REPORTS: tl.constexpr,
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
            scale, zero = scale_and_zero(tl.min(low, axis=0), tl.max(high, axis=0), tl.sum(poison, axis=0), NBITS)
            tl.store(scale_ptr + channels, scale, mask=is_channel)
            tl.store(zero_ptr + channels, zero, mask=is_channel)
            if REPORTS:
                report_range(exceeded_ptr, scale, zero)
        # What one thread has stored, others read when they pack
        tl.debug_barrier()
    if PACKS:
        for tile in range(first_tile, tl.cdiv(group_size, BLOCK_L), num_tile_programs):
            tokens = (tile * BLOCK_L + tl.arange(0, BLOCK_L)).to(tl.int64)
            states_rows = states_ptr + tokens * states_stride_l
            codes_rows = codes_ptr + tokens * NUM_BYTES
            missing_rows = codes_rows
            if WRITES_MISSING:
                missing_rows = missing_ptr + (group_index * group_size + tokens) * HEAD_DIM
            one_row = tl.zeros([1], dtype=tl.int32)
            # fmt: off
            pack(states_rows, codes_rows, scale_ptr + one_row, zero_ptr + one_row, missing_rows, tokens < group_size,
                  states_stride_d, NBITS, HEAD_DIM, 1, WRITES_MISSING, BLOCK_L, BLOCK_W)
            # fmt: on


@triton.jit
def _quantize_tokens_kernel(
    states_ptr,
    keep_ptr,
    codes_ptr,
    scale_ptr,
    zero_ptr,
    missing_ptr,
    exceeded_ptr,
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
    WRITES_MISSING: tl.constexpr,
    REPORTS: tl.constexpr,
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
    scale, zero = scale_and_zero(low, high, poison, NBITS)
    range_index = ((batch * tl.num_programs(1) + first_head) * num_chunks + chunk) * chunk_length + tokens
    is_group = is_token[:, None] & (groups < NUM_GROUPS)[None, :]
    range_offsets = range_index[:, None] * NUM_GROUPS + groups[None, :]
    tl.store(scale_ptr + range_offsets, scale, mask=is_group)
    tl.store(zero_ptr + range_offsets, zero, mask=is_group)
    if REPORTS:
        report_range(exceeded_ptr, scale, zero)
    # What one thread has stored, others read when they pack
    tl.debug_barrier()
    scale_rows = scale_ptr + range_index * NUM_GROUPS
    zero_rows = zero_ptr + range_index * NUM_GROUPS
    for head in range(first_head, last_head):
        head_offset = tl.cast(head, tl.int64) * states_stride_h
        codes_index = ((batch * num_heads + head) * num_chunks + chunk) * chunk_length + tokens
        codes_rows = codes_ptr + codes_index * NUM_BYTES
        missing_rows = codes_rows
        if WRITES_MISSING:
            missing_rows = missing_ptr + codes_index * HEAD_DIM
        # fmt: off
        pack(states_rows + head_offset, codes_rows, scale_rows, zero_rows, missing_rows, is_token,
              states_stride_d, NBITS, HEAD_DIM, GROUP_SIZE, WRITES_MISSING, BLOCK_L, BLOCK_W)
        # fmt: on


def quantize_and_pack(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    nbits: int,
    axis: str,
    group_size: int | None,
    missing: torch.Tensor | None = None,
    exceeded: torch.Tensor | None = None,
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
        missing (`torch.Tensor` of shape `[B, H, M, L, D]`, float32, contiguous, *optional*):
            Filled with the states less what codes, scales and zeros stand for.
        exceeded (`torch.Tensor` of shape `[1]`, int32, *optional*):
            Set to 1 if a scale or zero is not finite.

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
    tensors = (states, keep, codes, scale, zero, missing, exceeded)
    strides = (*states.stride(), *keep_strides)
    constants = {"NBITS": nbits, "HEAD_DIM": head_dim, "NUM_BYTES": num_bytes, "HAS_KEEP": keep is not None}
    constants |= {"WRITES_MISSING": missing is not None, "REPORTS": exceeded is not None}
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
