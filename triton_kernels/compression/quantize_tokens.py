"""Quantization of groups of channels of one token; legend as in `quantization.py`."""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from .arguments import quantization_arguments
from .packing import pack, report_range, scale_and_zero


_VALUES_IN_TILE = 1024


# What differs from prompt to prompt: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = ["num_chunks", "chunk_length"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
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


def quantize_tokens(
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
    """
    Fills codes, scales and zeros of groups of `group_size` channels, of all heads where there is but one head of
    scales; arguments as of `quantize_and_pack`.
    """
    batch_size, num_heads, num_chunks, chunk_length, head_dim = states.shape
    num_range_heads, num_groups = scale.shape[1], scale.shape[4]
    block_l = max(1, _VALUES_IN_TILE // triton.next_power_of_2(head_dim))
    grid = (triton.cdiv(chunk_length, block_l) * num_chunks, num_range_heads, batch_size)
    _quantize_tokens_kernel[grid](
        **quantization_arguments(states, keep, codes, scale, zero, missing, exceeded, nbits),
        num_heads=num_heads,
        num_chunks=num_chunks,
        chunk_length=chunk_length,
        GROUP_SIZE=group_size,
        NUM_GROUPS=num_groups,
        HEADS_SHARE=num_range_heads < num_heads,
        BLOCK_L=block_l,
        BLOCK_G=triton.next_power_of_2(num_groups),
        BLOCK_S=triton.next_power_of_2(group_size),
    )
