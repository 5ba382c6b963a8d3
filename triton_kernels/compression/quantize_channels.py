"""Quantization of groups of tokens that share one scale a channel; legend as in `quantization.py`."""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from .arguments import quantization_arguments
from .packing import pack, report_range, scale_and_zero


# Groups of this many tokens of a channel are quantized by one program, longer ones by many.
MAX_TOKENS_IN_PROGRAM = 128
_MAX_TOKENS_IN_TILE = 32
_CHANNELS_IN_RANGE_TILE = 32


@triton.jit
def _store_range(
    states_ptr,
    keep_ptr,
    scale_ptr,
    zero_ptr,
    exceeded_ptr,
    channels,
    group_size,
    states_stride_l,
    states_stride_d,
    keep_stride_l,
    keep_stride_d,
    NBITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    REPORTS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Scales and zeros of some channels, whose pointers are those of the group."""
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


# What differs from prompt to prompt: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_chunks",
    "num_groups",
    "group_size",
    "num_tile_programs",
    "num_block_programs",
    "finds_range",
    "packs",
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
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
    finds_range,
    packs,
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
    if finds_range:
        if HAS_KEEP:
            keep_ptr += batch * keep_stride_b + head * keep_stride_h + chunk * keep_stride_m
            keep_ptr += group * group_size * keep_stride_l
        for block in range(first_block, tl.cdiv(HEAD_DIM, BLOCK_D), num_block_programs):
            channels = block * BLOCK_D + tl.arange(0, BLOCK_D)
            # fmt: off
            _store_range(states_ptr, keep_ptr, scale_ptr, zero_ptr, exceeded_ptr, channels, group_size,
                         states_stride_l, states_stride_d, keep_stride_l, keep_stride_d,
                         NBITS, HEAD_DIM, HAS_KEEP, REPORTS, BLOCK_L, BLOCK_D)
            # fmt: on
        # What one thread has stored, others read when they pack
        tl.debug_barrier()
    if packs:
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


def quantize_channels(
    states: torch.Tensor,
    keep: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    missing: torch.Tensor | None,
    exceeded: torch.Tensor | None,
    *,
    nbits: int,
    group_size: int,
) -> None:
    """Fills codes, scales and zeros of groups of `group_size` tokens; arguments as of `quantize_and_pack`."""
    batch_size, num_heads, num_chunks, _, head_dim = states.shape
    num_groups = scale.shape[3]
    block_l = min(triton.next_power_of_2(group_size), _MAX_TOKENS_IN_TILE)
    num_tiles, num_blocks = triton.cdiv(group_size, block_l), triton.cdiv(head_dim, _CHANNELS_IN_RANGE_TILE)
    # Of each launch: what it does, and how many programs share tiles and blocks
    launches = [(1, 1, 1, 1)]
    if group_size > MAX_TOKENS_IN_PROGRAM:
        launches = [(1, 0, 1, num_blocks), (0, 1, num_tiles, 1)]
    for finds_range, packs, num_tile_programs, num_block_programs in launches:
        num_programs = num_chunks * num_groups * num_tile_programs * num_block_programs
        _quantize_channels_kernel[(num_programs, num_heads, batch_size)](
            **quantization_arguments(states, keep, codes, scale, zero, missing, exceeded, nbits),
            num_chunks=num_chunks,
            num_groups=num_groups,
            group_size=group_size,
            num_tile_programs=num_tile_programs,
            num_block_programs=num_block_programs,
            finds_range=finds_range,
            packs=packs,
            BLOCK_L=block_l,
            BLOCK_D=_CHANNELS_IN_RANGE_TILE,
        )
