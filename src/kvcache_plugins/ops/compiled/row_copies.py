"""Copies of chosen rows: `ops.gather.gather_rows` on a CPU.

A task is one head. Pages that are mapped files are read a share of them at a time, and let go of: a step's rows lie
in nearly all of them. So rows are put in the order of those shares first, which takes far less than bringing them.
Bytes are copied, whatever they stand for.

Legend: B batch, H heads, K slots.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import int64, njit, types
from numba.core import cgutils

from kvcache_plugins.ops.mapped_files import address_of_advise

from .arrays import longs_at
from .primitives import OPTIONS, WORKER
from .threads import FIRST, num_tasks, run, take_task
from .vectors import untyped_intrinsic


# Of pages that are let go of, the share that is mapped at once
_SHARES = 12
_BLOCK = mmap.PAGESIZE
_LET_GO = int(mmap.MADV_DONTNEED)


@untyped_intrinsic
def copy_bytes(typing_context: Any, source: Any, target: Any, count: Any) -> Any:
    """Bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        source, target = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(int64, int64, int64), generate


@untyped_intrinsic
def _advise(typing_context: Any, function: Any, address: Any, length: Any, advice: Any) -> Any:
    """`madvise`, which is at the address `function`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        long, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [long, long, number])
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, [args[1], args[2], builder.trunc(args[3], number)])
        return context.get_dummy_value()

    return types.void(int64, int64, int64, int64), generate


@njit(**OPTIONS)
def order_by_share(slots: Any, share_slots: int, ends: Any) -> Any:
    """Numbers of the slots of one share after those of the other, and in `ends` where each share's end."""
    order = np.empty(slots.shape[0], dtype=np.int64)
    for k in range(slots.shape[0]):
        ends[slots[k] // share_slots + 1] += 1
    for share in range(1, ends.shape[0]):
        ends[share] += ends[share - 1]
    for k in range(slots.shape[0]):
        share = slots[k] // share_slots
        order[ends[share]] = k
        ends[share] += 1
    return order


@njit(**OPTIONS)
def _let_go(function: int, address: int, length: int) -> None:
    first = address % _BLOCK
    _advise(int64(function), int64(address - first), int64(length + first), int64(_LET_GO))


@njit(**OPTIONS)
def _copy_head(matrix: int, shape: Any, pages: Any, slots: Any, out: int, advise: int) -> None:
    """All rows of one head; `slots` are its own, the address `out` is all heads'."""
    page_tokens, row_bytes = shape
    num_slots, num_pages = slots.shape[0], pages.shape[0]
    head_bytes = page_tokens * row_bytes
    at_once = num_pages if advise == 0 else -(-num_pages // _SHARES)
    ends = np.zeros(-(-num_pages // at_once) + 1, dtype=np.int64)
    order = order_by_share(slots, at_once * page_tokens, ends)
    out += matrix * num_slots * row_bytes
    start = 0
    for share in range(ends.shape[0] - 1):
        for number in range(start, ends[share]):
            slot = slots[order[number]]
            place = pages[slot // page_tokens] + matrix * head_bytes + slot % page_tokens * row_bytes
            copy_bytes(int64(place), int64(out + order[number] * row_bytes), int64(row_bytes))
        start = ends[share]
        if advise != 0:
            for page in range(share * at_once, min((share + 1) * at_once, num_pages)):
                _let_go(advise, pages[page] + matrix * head_bytes, head_bytes)


@njit(**WORKER)
def _copy(address: int) -> None:
    """
    The worker of a table, see `threads`: K, tokens of a page, bytes of a row, address of the pages' addresses, how
    many they are, addresses of slots and result, and that of `madvise` or 0.
    """
    n = longs_at(address, (FIRST + 8,))[FIRST:]
    pages = longs_at(n[3], (n[4],))
    matrix, count = take_task(address), num_tasks(address)
    while matrix < count:
        _copy_head(matrix, (n[1], n[2]), pages, longs_at(n[5], (count, n[0]))[matrix], n[6], n[7])
        matrix = take_task(address)


@torch.compiler.disable
def copy_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor, *, are_mapped: bool) -> None:
    """The rows that `ops.gather.gather_rows` returns, into a tensor."""
    # Names keep alive what is handed over by address
    pages, slots = [page.contiguous() for page in pages], slots.contiguous()
    addresses = np.array([page.data_ptr() for page in pages], dtype=np.int64)
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    numbers = (
        *(slots.shape[2], page_tokens, row_dim * out.element_size(), addresses.ctypes.data, len(pages)),
        *(slots.data_ptr(), out.data_ptr(), address_of_advise() if are_mapped else 0),
    )
    run(_copy, batch_size * num_heads, numbers)
