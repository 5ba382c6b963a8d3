"""Selection of outliers: indices of the largest and the smallest values of short rows.

A value and its place are packed into one 64-bit integer whose order is that of the values. A reduction then gives the
extreme and where it is at once, and no two places are equal, so that none is taken twice. The few values a side
(1% of a row) are taken one after the other: sorting a row takes 55 steps at 1024 values, and topk of a library a
launch or two a side. What is left of a row is known then, and is written down for the quantization on request.
"""

# What a kernel is given are pointers, integers and tiles, for which Triton has no types
# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl


MAX_ROW_LENGTH = 4096
_VALUES_PER_WARP = 512
_MIN_TILE_SIZE = 1024
# Below every packed value: a place past the end of the row, or already taken.
_TAKEN = tl.constexpr(-(2**63))
# Below every value, -inf included (whose order is -2139095041), and above `_TAKEN`.
_INVALID = tl.constexpr(-(2**31) + 1)
_NAN_ORDER = tl.constexpr(2**31 - 1)


@triton.jit
def _order(values):
    """int32 of the same order as float32 `values`; NaN, as in PyTorch, is the largest."""
    bits = values.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(values != values, _NAN_ORDER, order)


# What differs from prompt to prompt: a kernel for each divisibility would gain nothing
_NOT_SPECIALIZED = [
    "num_chunks",
    "num_rows",
    "row_length",
    "num_per_side",
    *(f"valid_stride_{dimension}" for dimension in "bhmron"),
    *(f"counts_stride_{dimension}" for dimension in "bhmr"),
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _select_outliers_kernel(
    rows_ptr,
    valid_ptr,
    counts_ptr,
    keep_ptr,
    indices_ptr,
    num_chunks,
    num_rows,
    row_length,
    num_per_side,
    rows_stride_b,
    rows_stride_h,
    rows_stride_m,
    rows_stride_r,
    rows_stride_o,
    rows_stride_n,
    valid_stride_b,
    valid_stride_h,
    valid_stride_m,
    valid_stride_r,
    valid_stride_o,
    valid_stride_n,
    keep_stride_b,
    keep_stride_h,
    keep_stride_m,
    keep_stride_r,
    keep_stride_o,
    keep_stride_n,
    counts_stride_b,
    counts_stride_h,
    counts_stride_m,
    counts_stride_r,
    WRITES_KEEP: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """A block of rows of one chunk, each of pieces of `INNER` values if that is not 0. The indices are contiguous."""
    num_blocks = tl.cdiv(num_rows, BLOCK_R)
    chunk = (tl.program_id(0) // num_blocks).to(tl.int64)
    rows = ((tl.program_id(0) % num_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    is_row = rows < num_rows
    places = tl.arange(0, BLOCK_N)
    in_row = (places < row_length)[None, :]
    in_block = is_row[:, None] & in_row
    outer, inner = tl.zeros_like(places), places
    if INNER > 0:
        # Heads lie far apart: their number times the length of a long prompt's exceeds 32 bits
        outer, inner = (places // INNER).to(tl.int64), places % INNER
    rows_ptr += batch * rows_stride_b + head * rows_stride_h + chunk * rows_stride_m
    rows_offsets = rows[:, None] * rows_stride_r + (outer * rows_stride_o + inner * rows_stride_n)[None, :]
    order = _order(tl.load(rows_ptr + rows_offsets, mask=in_block, other=0.0).to(tl.float32))
    high, low = order, ~order
    valid_ptr += batch * valid_stride_b + head * valid_stride_h + chunk * valid_stride_m
    valid_offsets = rows[:, None] * valid_stride_r + (outer * valid_stride_o + inner * valid_stride_n)[None, :]
    valid = tl.load(valid_ptr + valid_offsets, mask=in_block, other=0) != 0
    high = tl.where(valid, high, _INVALID)
    low = tl.where(valid, low, _INVALID)
    # The lower a place, the larger what is packed: of equal values the first is taken
    packed_places = (BLOCK_N - 1 - places).to(tl.int64)[None, :]
    high = tl.where(in_row, (high.to(tl.int64) << 32) | packed_places, _TAKEN)
    low = tl.where(in_row, (low.to(tl.int64) << 32) | packed_places, _TAKEN)
    counts_ptr += batch * counts_stride_b + head * counts_stride_h + chunk * counts_stride_m
    counts = tl.load(counts_ptr + rows * counts_stride_r, mask=is_row, other=0)
    row_index = ((batch * tl.num_programs(1) + head) * num_chunks + chunk) * num_rows + rows
    indices_ptr += row_index * 2 * num_per_side
    for slot in range(num_per_side):
        highest = tl.max(high, axis=1)
        is_highest = high == highest[:, None]
        high = tl.where(is_highest, _TAKEN, high)
        # A slot that does not count takes nothing from the smallest
        low = tl.where(is_highest & (slot < counts)[:, None], _TAKEN, low)
        tl.store(indices_ptr + slot, BLOCK_N - 1 - (highest & (BLOCK_N - 1)), mask=is_row)
    for slot in range(num_per_side):
        lowest = tl.max(low, axis=1)
        low = tl.where((low == lowest[:, None]) & (slot < counts)[:, None], _TAKEN, low)
        tl.store(indices_ptr + num_per_side + slot, BLOCK_N - 1 - (lowest & (BLOCK_N - 1)), mask=is_row)
    if WRITES_KEEP:
        # Of the smallest also those that the largest took are gone
        keep = (low != _TAKEN) & valid
        keep_ptr += batch * keep_stride_b + head * keep_stride_h + chunk * keep_stride_m
        keep_offsets = rows[:, None] * keep_stride_r + (outer * keep_stride_o + inner * keep_stride_n)[None, :]
        tl.store(keep_ptr + keep_offsets, keep, mask=in_block)


def select_outliers(
    rows: torch.Tensor,
    num_per_side: int,
    valid: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    row_dims: int = 1,
) -> torch.Tensor:
    """
    Indices of the `num_per_side` largest and the `num_per_side` smallest values of every row.

    Args:
        rows (`torch.Tensor` of shape `[N, n]` to `[B, H, M, N, n]`, floating point, any strides):
            Rows of at most `MAX_ROW_LENGTH` values. NaN is the largest value.
        num_per_side (`int`):
            How many to select on each side, at most `n // 2`.
        valid (`torch.Tensor` broadcastable to the rows, bool, *optional*):
            Which values may be selected. Where there are too few, the rest of the slots hold other places.
        counts (`torch.Tensor` broadcastable to `[..., N]`, integer, *optional*):
            How many slots a side of each row count, at most `num_per_side` (and half of what is valid): the first
            ones. `None`: all. What the other slots hold is of no meaning.
        keep (`torch.Tensor` of the shape of the rows, bool, any strides, *optional*):
            Filled with which values are valid and not in a slot that counts.
        row_dims (`int`, *optional*, defaults to 1):
            2 if a row is the last two dimensions, `[..., N, n1, n2]`, `n = n1 * n2`.

    Returns:
        Indices into the rows (int64, `[..., N, 2 * num_per_side]`): of the largest, in descending order, and of the
        smallest, in ascending order. No slot that counts repeats another that does.
    """
    leading, row_shape = rows.shape[:-row_dims], rows.shape[-row_dims:]
    row_length = row_shape.numel()
    indices = rows.new_empty(*leading, 2 * num_per_side, dtype=torch.int64)
    assert 2 * num_per_side <= row_length <= MAX_ROW_LENGTH and 1 <= len(leading) <= 4
    if indices.numel() == 0:
        return indices
    padding = (None,) * (4 - len(leading))
    keep_strides: tuple[int, ...] = (0,) * 6
    # The same kernel whether something is padded or not
    valid = (everything(rows.device) if valid is None else valid).expand_as(rows)[padding]
    counts = (_all_slots(rows.device) if counts is None else counts.long()).expand(leading)[padding]
    if keep is not None:
        assert keep.shape == rows.shape
        keep = keep[padding]
        keep_strides = _row_strides(keep, row_dims)
    rows = rows[padding]
    batch_size, num_heads, num_chunks, num_rows = rows.shape[:4]
    block_n = triton.next_power_of_2(row_length)
    block_r = min(max(_MIN_TILE_SIZE // block_n, 1), triton.next_power_of_2(num_rows))
    grid = (triton.cdiv(num_rows, block_r) * num_chunks, num_heads, batch_size)
    _select_outliers_kernel[grid](
        rows,
        valid,
        counts,
        keep,
        indices,
        num_chunks,
        num_rows,
        row_length,
        num_per_side,
        *_row_strides(rows, row_dims),
        *_row_strides(valid, row_dims),
        *keep_strides,
        *counts.stride(),
        WRITES_KEEP=keep is not None,
        INNER=row_shape[1] if row_dims == 2 else 0,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        num_warps=min(max(block_r * block_n // _VALUES_PER_WARP, 1), 8),
    )
    return indices


@functools.cache
def everything(device: torch.device) -> torch.Tensor:
    """What says of every value that it is valid."""
    return torch.ones(1, dtype=torch.bool, device=device)


@functools.cache
def _all_slots(device: torch.device) -> torch.Tensor:
    """What says of every row that all of its slots count."""
    return torch.full((1,), MAX_ROW_LENGTH, device=device)


def _row_strides(tensor: torch.Tensor, row_dims: int) -> tuple[int, ...]:
    """Strides of `[B, H, M, N, n]` or `[B, H, M, N, n1, n2]`, as if a row always had two dimensions."""
    strides = tensor.stride()
    return strides if row_dims == 2 else (*strides[:4], 0, strides[4])
