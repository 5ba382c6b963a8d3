"""Rows of pages in host memory, read or written by the GPU itself: only those that were chosen cross the bus.

A library's way is to gather on the host and to copy the result, for which the host has to know what was chosen: it
waits for the GPU in every layer of every step. Page-locked memory has one address for host and device, so here the
programs of a kernel follow the chosen slots, which never leave the GPU, and read each row where it stands. What is
beyond `count` is neither read nor written: its place in the result keeps whatever bytes it held, NaN among them, so an
attention has to put -inf in the place of its scores *and* 0 in the place of its values (zero times NaN is NaN).

Pages are given by their addresses, a tensor on the device: a launch does not depend on their number. In Triton's
interpreter these are addresses of ordinary memory, and the kernel is the same.

Legend: B batch, H heads, K slots given, R numbers a row; a word is the widest integer that rows consist of.
"""

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl

from .launch import OPTIONS, Launch, tensor_arguments


# Most bytes that one thread can move at once
_VECTOR_BYTES = 16
_WORD_TYPES = {4: torch.int32, 2: torch.int16, 1: torch.int8}
# Words that a program has under way at once, 16 KiB of 4 bytes each: the bus answers in a microsecond or two, and with
# all programs together that is several times what it moves meanwhile
_WORDS_AT_ONCE = 4096
_MAX_BLOCK_WORDS = 512
# The other multiprocessors are left to the layer that computes at the same time
_NUM_PROGRAMS = 64


# Arguments that differ from step to step: kernels for each divisibility would gain nothing, and be compiled amid steps
_NOT_SPECIALIZED = [
    "num_matrices",
    "num_heads",
    "num_slots",
    *(f"{name}_stride_{dimension}" for name in ("slots", "count", "rows") for dimension in "bh"),
    "rows_stride_k",
]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _move_rows_kernel(
    page_addresses_ptr, slots_ptr, count_ptr, rows_ptr, num_matrices, num_heads, num_slots, slots_stride_b,
    slots_stride_h, slots_stride_k, count_stride_b, count_stride_h, rows_stride_b, rows_stride_h, rows_stride_k,
    PAGE_TOKENS: tl.constexpr, NUM_WORDS: tl.constexpr, WORD_BYTES: tl.constexpr, PAGE_ALIGNMENT: tl.constexpr,
    ROW_ALIGNMENT: tl.constexpr, WRITES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Some tiles of the rows of some heads; the programs of a head take turns. Alignments are in bytes, else words."""
    word: tl.constexpr = rows_ptr.dtype.element_ty
    for matrix in range(tl.program_id(0), num_matrices, tl.num_programs(0)):
        matrix_64 = tl.cast(matrix, tl.int64)
        batch, head = matrix_64 // num_heads, matrix_64 % num_heads
        own_slots_ptr = slots_ptr + batch * slots_stride_b + head * slots_stride_h
        own_rows_ptr = rows_ptr + batch * rows_stride_b + head * rows_stride_h
        count = num_slots
        if count_ptr is not None:
            given = tl.load(count_ptr + batch * count_stride_b + head * count_stride_h)
            count = tl.minimum(given, num_slots).to(tl.int32)
        for start in range(tl.program_id(1) * BLOCK_T, count, tl.num_programs(1) * BLOCK_T):
            places = start + tl.arange(0, BLOCK_T)
            in_use = places < count
            slots = tl.load(own_slots_ptr + places.to(tl.int64) * slots_stride_k, mask=in_use, other=0).to(tl.int64)
            addresses = tl.load(page_addresses_ptr + slots // PAGE_TOKENS, mask=in_use, other=0)
            addresses += (matrix_64 * PAGE_TOKENS + slots % PAGE_TOKENS) * (NUM_WORDS * WORD_BYTES)
            stored_rows = tl.multiple_of(addresses.to(tl.pointer_type(word)), PAGE_ALIGNMENT)
            rows = tl.multiple_of(own_rows_ptr + places.to(tl.int64) * rows_stride_k, ROW_ALIGNMENT)
            for first in tl.static_range(0, NUM_WORDS, BLOCK_W):
                words = first + tl.arange(0, BLOCK_W)
                mask = in_use[:, None] & (words < NUM_WORDS)[None, :]
                stored_ptrs, row_ptrs = stored_rows[:, None] + words[None, :], rows[:, None] + words[None, :]
                if WRITES:
                    tl.store(stored_ptrs, tl.load(row_ptrs, mask=mask, other=0), mask=mask)
                else:
                    # Past the first cache, which might hold what the host has since written anew
                    values = tl.load(stored_ptrs, mask=mask, other=0, cache_modifier=".cg")
                    tl.store(row_ptrs, values, mask=mask)


def page_addresses(pages: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """
    Return the addresses of pages, for kernels. The caller keeps the pages while a kernel may use them.

    Args:
        pages (`Sequence[torch.Tensor]`): of one shape `[B, H, page tokens, R]` and dtype, contiguous; page-locked if
            `device` is a GPU.
        device (`torch.device`): where the kernels run.

    Returns:
        `torch.Tensor` of shape `[pages]`, int64, on `device`. The host does not wait for it.
    """
    assert all(page.is_contiguous() and page.data_ptr() % _VECTOR_BYTES == 0 for page in pages)
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        addresses = addresses.pin_memory()
    return addresses.to(device, non_blocking=True)


def gather_rows(
    addresses: torch.Tensor, slots: torch.Tensor, count: torch.Tensor | None, out: torch.Tensor, page_tokens: int
) -> None:
    """
    Copy the rows of some slots into `out`, on the current stream.

    Args:
        addresses (`torch.Tensor` of shape `[pages]`): of `page_addresses`, of pages `[B, H, page_tokens, R]`.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64, any strides): slot `s` is row `s % page_tokens` of page
            `s // page_tokens`. Those beyond `count` may be anything.
        count (`torch.Tensor` of shape `[B, H]`, integer, any strides, *optional*, defaults to K): how many rows each
            head gets; what `out` holds beyond them stays as it is.
        out (`torch.Tensor` of shape `[B, H, K, R]`): in the pages' dtype, its last dimension contiguous.
        page_tokens (`int`): rows a page.
    """
    _move_rows(addresses, slots, count, out, page_tokens, writes=False)


def write_rows(
    addresses: torch.Tensor, slots: torch.Tensor, count: torch.Tensor | None, rows: torch.Tensor, page_tokens: int
) -> None:
    """
    Copy `rows` into some slots, on the current stream: a copy by PyTorch into rows that do not lie side by side goes
    through memory that is not page-locked, for which the host waits. Arguments as of `gather_rows`; no slot twice.
    """
    _move_rows(addresses, slots, count, rows, page_tokens, writes=True)


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """View rows `[B, H, K, R]` as words, which move more bytes at once."""
    return rows.view(_WORD_TYPES[min(_row_alignment(rows), max(_WORD_TYPES))])


def _row_alignment(rows: torch.Tensor) -> int:
    itemsize = rows.element_size()
    offsets = (rows.data_ptr(), *(stride * itemsize for stride in rows.stride()[:3]))
    return gcd(rows.shape[3] * itemsize, _VECTOR_BYTES, *offsets)


def _move_rows(
    addresses: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor | None,
    rows: torch.Tensor,
    page_tokens: int,
    *,
    writes: bool,
) -> None:
    if rows.numel():
        prepare_move(addresses, slots, count, rows, page_tokens, writes=writes)()


def prepare_move(
    addresses: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor | None,
    rows: torch.Tensor,
    page_tokens: int,
    *,
    writes: bool,
) -> Launch:
    """Prepare the launch of `gather_rows`, or of `write_rows`, with rows as words of bytes."""
    batch_size, num_heads, num_slots, row_dim = rows.shape
    assert slots.shape == rows.shape[:3] and rows.stride(3) == 1
    row_bytes = row_dim * rows.element_size()
    # Of a row in its page, and of one here
    page_alignment, row_alignment = gcd(row_bytes, _VECTOR_BYTES), _row_alignment(rows)
    words = as_words(rows)
    word_bytes = words.element_size()
    num_words = row_bytes // word_bytes
    block_words = min(triton.next_power_of_2(num_words), _MAX_BLOCK_WORDS)
    block_tokens = min(triton.next_power_of_2(num_slots), max(_WORDS_AT_ONCE // block_words, 1))
    num_splits = min(triton.cdiv(_NUM_PROGRAMS, batch_size * num_heads), triton.cdiv(num_slots, block_tokens))
    # Of many heads a program takes several in turn
    num_matrices = batch_size * num_heads
    arguments = {
        "page_addresses_ptr": addresses,
        **tensor_arguments("slots", slots, "bhk"),
        **tensor_arguments("count", count, "bh"),
        **tensor_arguments("rows", words, "bhk"),
        "num_matrices": num_matrices,
        "num_heads": num_heads,
        "num_slots": num_slots,
        "PAGE_TOKENS": page_tokens,
        "NUM_WORDS": num_words,
        "WORD_BYTES": word_bytes,
        "PAGE_ALIGNMENT": page_alignment,
        "ROW_ALIGNMENT": row_alignment,
        "WRITES": writes,
        "BLOCK_T": block_tokens,
        "BLOCK_W": block_words,
    }
    grid = (min(num_matrices, _NUM_PROGRAMS), num_splits)
    return Launch(_move_rows_kernel, grid, arguments, OPTIONS, rows)
