"""The end of a decode step in one launch: merges partial attentions and attends to what is stored exactly.

A program takes one key/value head, and some rows and channels of the output. It attends to the exact parts (the first
tokens, the newest tokens) as `attend.py` does to a tile, and then merges the splits of every compressed block by their
maxima.

Legend as in `attend.py`; T tokens of an exact part.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..arithmetic import LOG2_E, block_size, dot_precision
from ..launch import Launch, tensor_arguments
from .dense_part import DensePart, attend_part, part_arguments
from .partials import Partials, block_arguments, merge_splits


_MAX_BLOCKS = 3
_MAX_PARTS = 2
_BLOCK_TOKENS = 64
# The same of wide heads in float32, whose tiles would spill four warps' registers
_BLOCK_TOKENS_WIDE, _NUM_WARPS_WIDE = 32, 8
_MOST_CHANNELS_NARROW = 64
_MAX_BLOCK_CHANNELS = 64
# Rows of queries that registers and shared memory have room for
_MAX_BLOCK_ROWS = 32
_MAX_BLOCK_ROWS_FLOAT32 = 16
# Keys of a tile up to which the next one's fit into the 99 KB of shared memory that the smallest GPUs have
_MAX_BYTES_AHEAD = 32768
# Rows of splits that are read at once, so that their loads overlap
_ROWS_AT_ONCE = 128


# Arguments that differ from prompt to prompt or step to step: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_rows",
    *(f"num_splits_{index}" for index in range(3)),
    *(f"num_tokens_{index}" for index in range(2)),
    *(f"mask_{index}_{name}" for index in range(2) for name in ("stride_b", "stride_h", "stride_q", "num_queries")),
]


@triton.jit(
    do_not_specialize=_NOT_SPECIALIZED,
    do_not_specialize_on_alignment=["mask_0_ptr", "mask_1_ptr", "num_tokens_0_ptr", "num_tokens_1_ptr"],
)
def combine_kernel(
    query_ptr, query_stride_b, query_stride_h, query_stride_r, result_ptr, output_0_ptr, maximum_0_ptr, total_0_ptr,
    num_splits_0, output_1_ptr, maximum_1_ptr, total_1_ptr, num_splits_1, output_2_ptr, maximum_2_ptr, total_2_ptr,
    num_splits_2, keys_0_ptr, keys_0_stride_b, keys_0_stride_h, keys_0_stride_t, values_0_ptr, values_0_stride_b,
    values_0_stride_h, values_0_stride_t, mask_0_ptr, mask_0_stride_b, mask_0_stride_h, mask_0_stride_q,
    mask_0_stride_t, mask_0_num_queries, num_tokens_0, num_tokens_0_ptr, keys_1_ptr, keys_1_stride_b, keys_1_stride_h,
    keys_1_stride_t, values_1_ptr, values_1_stride_b, values_1_stride_h, values_1_stride_t, mask_1_ptr,
    mask_1_stride_b, mask_1_stride_h, mask_1_stride_q, mask_1_stride_t, mask_1_num_queries, num_tokens_1,
    num_tokens_1_ptr, num_heads, num_rows, scale, MASK_0: tl.constexpr, MASK_1: tl.constexpr,
    NUM_BLOCKS: tl.constexpr, NUM_PARTS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows and channels of one head's result, from `NUM_PARTS` exact parts and the splits of `NUM_BLOCKS` blocks."""
    batch = (tl.program_id(0) // num_heads).to(tl.int64)
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    first_channel = tl.program_id(1) * BLOCK_V
    rows = tl.arange(0, BLOCK_R)
    if MANY_ROWS:
        rows += tl.program_id(2) * BLOCK_R
    row_in_use = rows < num_rows
    scale_base_2 = scale * LOG2_E

    maximum = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    output = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    if NUM_PARTS > 0:
        key_channels = tl.arange(0, BLOCK_K)
        query_ptr += batch * query_stride_b + head * query_stride_h
        query = tl.load(
            query_ptr + rows[:, None] * query_stride_r + key_channels[None, :],
            mask=row_in_use[:, None] & (key_channels < KEY_DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
    # fmt: off
    if NUM_PARTS > 0:
        output, maximum, total = attend_part(
            output, maximum, total, query, rows, first_channel, num_rows,
            keys_0_ptr, keys_0_stride_b, keys_0_stride_h, keys_0_stride_t,
            values_0_ptr, values_0_stride_b, values_0_stride_h, values_0_stride_t,
            mask_0_ptr, mask_0_stride_b, mask_0_stride_h, mask_0_stride_q, mask_0_stride_t, mask_0_num_queries,
            num_tokens_0, num_tokens_0_ptr, batch, head, scale_base_2, MASK_0, KEY_DIM, VALUE_DIM, PRECISION,
            BLOCK_T, BLOCK_K, BLOCK_V)
    if NUM_PARTS > 1:
        output, maximum, total = attend_part(
            output, maximum, total, query, rows, first_channel, num_rows,
            keys_1_ptr, keys_1_stride_b, keys_1_stride_h, keys_1_stride_t,
            values_1_ptr, values_1_stride_b, values_1_stride_h, values_1_stride_t,
            mask_1_ptr, mask_1_stride_b, mask_1_stride_h, mask_1_stride_q, mask_1_stride_t, mask_1_num_queries,
            num_tokens_1, num_tokens_1_ptr, batch, head, scale_base_2, MASK_1, KEY_DIM, VALUE_DIM, PRECISION,
            BLOCK_T, BLOCK_K, BLOCK_V)
    if BLOCK_M < BLOCK_R:
        # Products have more rows than there are queries, which merging would be a multiple of the work with
        FOLDED: tl.constexpr = [BLOCK_R // BLOCK_M, BLOCK_M]
        is_first = rows < BLOCK_M
        maximum = tl.max(tl.reshape(tl.where(is_first, maximum, float("-inf")), FOLDED), axis=0)
        total = tl.sum(tl.reshape(tl.where(is_first, total, 0.0), FOLDED), axis=0)
        output = tl.where(is_first[:, None], output, 0.0)
        output = tl.sum(tl.reshape(output, [BLOCK_R // BLOCK_M, BLOCK_M, BLOCK_V]), axis=0)
        rows = tl.arange(0, BLOCK_M)
    if NUM_BLOCKS > 0:
        output, maximum, total = merge_splits(
            output, maximum, total, output_0_ptr, maximum_0_ptr, total_0_ptr, num_splits_0, rows, num_rows,
            first_channel, VALUE_DIM, BLOCK_V, BLOCK_S)
    if NUM_BLOCKS > 1:
        output, maximum, total = merge_splits(
            output, maximum, total, output_1_ptr, maximum_1_ptr, total_1_ptr, num_splits_1, rows, num_rows,
            first_channel, VALUE_DIM, BLOCK_V, BLOCK_S)
    if NUM_BLOCKS > 2:
        output, maximum, total = merge_splits(
            output, maximum, total, output_2_ptr, maximum_2_ptr, total_2_ptr, num_splits_2, rows, num_rows,
            first_channel, VALUE_DIM, BLOCK_V, BLOCK_S)
    # fmt: on
    output = output / tl.where(total > 0, total, 1.0)[:, None]
    row_in_use = rows < num_rows
    value_channels = first_channel + tl.arange(0, BLOCK_V)
    result = tl.program_id(0).to(tl.int64) * num_rows + rows
    tl.store(
        result_ptr + result[:, None] * VALUE_DIM + value_channels[None, :],
        output.to(result_ptr.dtype.element_ty),
        mask=row_in_use[:, None] & (value_channels < VALUE_DIM)[None, :],
    )


def prepare_combination(
    partials: Sequence[Partials], exact_parts: Sequence[DensePart], query: torch.Tensor, scale: float
) -> Launch:
    """
    Prepare the launch whose result is attention over compressed blocks and exact parts together, zero where a row may
    attend to nothing.

    Args:
        partials (`Sequence[Partials]`): what launches over compressed blocks leave.
        exact_parts (`Sequence[DensePart]`): at most two stretches stored as they are.
        query (`torch.Tensor` of shape `[B, H, rows, D]`): the queries of those launches. The result is `[B, H, rows,
            value D]` in their dtype.
        scale (`float`): factor of the scores.
    """
    exact_parts = [part for part in exact_parts if part.keys.shape[2] > 0]
    if len(exact_parts) > _MAX_PARTS:
        raise ValueError(f"`exact_parts` may be at most {_MAX_PARTS}, not {len(exact_parts)}")
    value_dim = partials[0].output.shape[-1] if partials else exact_parts[0].values.shape[-1]
    blocks = [block for block in partials if block.output.shape[2] > 0]
    if len(blocks) > _MAX_BLOCKS:
        rest = blocks[_MAX_BLOCKS - 1 :]
        blocks = [
            *blocks[: _MAX_BLOCKS - 1],
            Partials(*(torch.cat(parts, dim=2) for parts in zip(*rest, strict=True))),
        ]
    query = query if query.stride(-1) == 1 else query.contiguous()
    batch_size, num_heads, num_rows, key_dim = query.shape
    result = query.new_empty(batch_size, num_heads, num_rows, value_dim)
    is_float32 = query.dtype == torch.float32
    block_rows = min(block_size(num_rows), _MAX_BLOCK_ROWS_FLOAT32 if is_float32 else _MAX_BLOCK_ROWS)
    block_merged = min(block_rows, triton.next_power_of_2(num_rows))
    is_wide = is_float32 and key_dim > _MOST_CHANNELS_NARROW
    block_tokens = _BLOCK_TOKENS_WIDE if is_wide else _BLOCK_TOKENS
    bytes_ahead = block_tokens * block_size(key_dim) * query.element_size()
    block_channels = min(_MAX_BLOCK_CHANNELS, block_size(value_dim))
    grid = (batch_size * num_heads, triton.cdiv(value_dim, block_channels), triton.cdiv(num_rows, block_rows))
    arguments = {
        **tensor_arguments("query", query, "bhr"),
        "result_ptr": result,
        **block_arguments(0, blocks),
        **block_arguments(1, blocks),
        **block_arguments(2, blocks),
        **parts_arguments(exact_parts, num_heads, num_rows),
        "num_heads": num_heads,
        "num_rows": num_rows,
        "scale": scale,
        # Fewer blocks or parts have the kernel of all, the others without tokens: nothing is compiled amid decoding
        "NUM_BLOCKS": _MAX_BLOCKS if blocks else 0,
        "NUM_PARTS": _MAX_PARTS if exact_parts else 0,
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "PRECISION": dot_precision(query.dtype),
        "BLOCK_R": block_rows,
        "BLOCK_T": block_tokens,
        "BLOCK_K": block_size(key_dim),
        "BLOCK_V": block_channels,
        "BLOCK_M": block_merged,
        "BLOCK_S": max(1, _ROWS_AT_ONCE // block_merged),
        # Known to the compiler because a decode step, which has few, needs fewer registers so
        "MANY_ROWS": num_rows > block_rows,
    }
    # Tiles of keys and values that are on their way or in use. Without fused products, which not all lanes that hold a
    # sum have in the same places, what they store to one place is the same
    options = {"num_stages": 2 if bytes_ahead <= _MAX_BYTES_AHEAD else 1, "enable_fp_fusion": False}
    if is_wide:
        options["num_warps"] = _NUM_WARPS_WIDE
    return Launch(combine_kernel, grid, arguments, options, result)


def parts_arguments(parts: Sequence[DensePart], num_heads: int, num_rows: int) -> dict[str, object]:
    """List the launch's arguments of all exact parts; one that is alone is given twice, and counts once."""
    if not parts:
        return {**part_arguments(0, None, num_heads, num_rows), **part_arguments(1, None, num_heads, num_rows)}
    is_alone = len(parts) < _MAX_PARTS
    return {
        **part_arguments(0, parts[0], num_heads, num_rows),
        **part_arguments(1, parts[-1], num_heads, num_rows, is_spare=is_alone),
    }
