"""Chosen rows of an offloaded cache by the C kernels: attention over them where they stand, and copies of them.

Legend: B batch, H key/value heads, G queries a head, D and E head dims of keys and values, K slots, W tokens of the
window.
"""

import ctypes
import mmap
from collections.abc import Sequence

import torch

from kvcache_plugins.ops.mapped_files import address_of_advise

from .layer import KINDS, MOST_CHANNELS, ROWS
from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run


class Window(ctypes.Structure):
    """The newest tokens, see `scattered.h`."""

    _fields_ = (
        ("length", LONG),
        ("kind", LONG),
        ("start", LONG),
        ("key_strides", LONG * 2),
        ("value_strides", LONG * 2),
        ("keys", ADDRESS),
        ("values", ADDRESS),
    )


class Mask(ctypes.Structure):
    """A row of a mask for every item, see `scattered.h`."""

    _fields_ = (("columns", LONG), ("is_boolean", LONG), ("numbers", ADDRESS))


class _Gathered(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("heads", "groups", "key_dim", "value_dim", "kind")),
        *((name, LONG) for name in ("num_slots", "num_pages", "page_tokens")),
        ("scale", ctypes.c_double),
        *((name, ADDRESS) for name in ("query", "result", "pages", "slots", "counts", "columns")),
        ("window", Window),
        ("mask", Mask),
    )


class _Copies(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("num_slots", "num_pages", "page_tokens", "row_size")),
        *((name, ADDRESS) for name in ("pages", "slots", "result", "advise")),
        ("let_go", LONG),
        ("block", LONG),
    )


def can_attend_rows(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Whether rows are of a kind that `attend_rows` reads."""
    return max(key_dim, value_dim) <= MOST_CHANNELS and dtype in KINDS


def num_units(query: torch.Tensor) -> int:
    """Units of queries `[B, H, G, D]`, see `layer.h`."""
    batch_size, num_heads, groups, _ = query.shape
    return batch_size * num_heads * -(-groups // ROWS)


def page_addresses(pages: Sequence[torch.Tensor], shape: Sequence[int]) -> "ctypes.Array[ctypes.c_void_p]":
    """Addresses of pages, which have one dtype and a shape."""
    dtype = pages[0].dtype
    return (ADDRESS * len(pages))(*[address_of("pages", page, dtype, shape) for page in pages])


def whole_rows(name: str, states: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """
    States `[B, H, tokens, D]` of a dtype, in which the tokens of a head follow each other; heads may be strides apart,
    within the tensor's own memory.

    Raises:
        ValueError: if they are of another shape, or not on the CPU.
    """
    if states.shape != shape or not states.is_cpu:
        raise ValueError(f"`{name}` has to be {shape} on the CPU, but got {tuple(states.shape)} on {states.device}")
    states = states if states.dtype is dtype else states.to(dtype)
    return states if states.stride()[2:] == (shape[3], 1) else states.contiguous()


def window_of(keys: torch.Tensor, values: torch.Tensor, start: int) -> Window:
    """The window of `whole_rows` `[B, H, W, D or E]` of one dtype; `start` is the first one's column of the mask."""
    size, key_strides, value_strides = keys.element_size(), keys.stride(), values.stride()
    return Window(
        *(keys.shape[2], KINDS[keys.dtype], start),
        (key_strides[0] * size, key_strides[1] * size),
        (value_strides[0] * size, value_strides[1] * size),
        *(keys.data_ptr(), values.data_ptr()),
    )


def readable_mask(mask: torch.Tensor) -> torch.Tensor:
    """A mask `[B, tokens]`, boolean or added to scores, as it is read by address."""
    return (mask if mask.dtype == torch.bool else mask.float()).contiguous()


def mask_of(mask: torch.Tensor | None, batch_size: int, stop: int) -> Mask:
    """A readable mask, which has to have columns up to `stop`."""
    if mask is None:
        return Mask()
    if mask.shape[1] < max(stop, 1):
        raise ValueError(f"`mask` has to have at least {max(stop, 1)} columns, but got {mask.shape[1]}")
    address = address_of("mask", mask, (torch.bool, torch.float32), (batch_size, None))
    return Mask(mask.shape[1], mask.dtype == torch.bool, address)


@torch.compiler.disable
def attend_rows(
    query: torch.Tensor,
    pages: Sequence[torch.Tensor],
    slots: torch.Tensor,
    count: torch.Tensor,
    window_keys: torch.Tensor,
    window_values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window_start: int,
) -> torch.Tensor:
    """
    Attention of one new token over chosen rows where they stand, and the window: see `ops.gather.attend_staged`.

    Args:
        pages (`Sequence[torch.Tensor]`, each of shape `[B, H, tokens of a page, D + E]`): a key and its value side by
            side.
        slots (`torch.Tensor` of shape `[B, H, K]`, int64): which rows: slot `i` is row `i` of all pages one behind the
            other; of those beyond all, the last one counts.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the token's row of the mask.
        positions (`torch.Tensor` of shape `[B, H, K or more]`, int64, *optional*): columns of the mask that the slots'
            tokens have; by default the slots.
        query, count, window_keys, window_values, scale, window_start: as there.
    """
    batch_size, num_heads, groups, key_dim = query.shape
    window_length, value_dim = window_values.shape[2:]
    heads, dtype, page_tokens = (batch_size, num_heads), pages[0].dtype, pages[0].shape[2]
    # Names keep alive what is handed over by address
    queries, slots, count = query.float().contiguous(), slots.contiguous(), count.contiguous()
    pages = [page.contiguous() for page in pages]
    page_table = page_addresses(pages, (*heads, page_tokens, key_dim + value_dim))
    window_keys = whole_rows("window_keys", window_keys, dtype, (*heads, window_length, key_dim))
    window_values = whole_rows("window_values", window_values, dtype, (*heads, window_length, value_dim))
    result = torch.empty((*heads, groups, value_dim))
    columns = slots
    if mask is not None:
        mask = readable_mask(mask)
        columns = slots if positions is None else positions[:, :, : slots.shape[2]].contiguous()
    of_slots = *heads, slots.shape[2]
    call = _Gathered(
        Tasks(0, num_units(query), 0),
        *(num_heads, groups, key_dim, value_dim, KINDS[dtype], of_slots[2], len(pages), page_tokens, scale),
        address_of("query", queries, torch.float32, (*heads, groups, key_dim)),
        *(result.data_ptr(), ctypes.addressof(page_table)),
        address_of("slots", slots, torch.int64, of_slots),
        address_of("count", count, torch.int64, heads),
        slots.data_ptr() if columns is slots else address_of("positions", columns, torch.int64, of_slots),
        window_of(window_keys, window_values, window_start),
        mask_of(mask, batch_size, window_start + window_length),
    )
    run(function("attend_gathered"), call, min(num_threads(), call.tasks.count))
    return result if query.dtype is torch.float32 else result.to(query.dtype)


@torch.compiler.disable
def copy_rows(pages: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor, *, are_mapped: bool) -> None:
    """Copies the rows that `ops.gather.gather_rows` returns into a tensor; the last one for slots beyond all."""
    pages, slots = [page.contiguous() for page in pages], slots.contiguous()
    batch_size, num_heads, page_tokens, row_dim = pages[0].shape
    sizes = batch_size, num_heads, slots.shape[2]
    if slots.numel() and not page_tokens * len(pages):
        raise ValueError(f"pages without rows for {sizes[2]} slots")
    page_table = page_addresses(pages, pages[0].shape)
    call = _Copies(
        Tasks(0, batch_size * num_heads, 0),
        *(sizes[2], len(pages), page_tokens, row_dim * out.element_size(), ctypes.addressof(page_table)),
        address_of("slots", slots, torch.int64, sizes),
        address_of("out", out, pages[0].dtype, (*sizes, row_dim)),
        *(address_of_advise() if are_mapped else 0, int(mmap.MADV_DONTNEED) if are_mapped else 0, mmap.PAGESIZE),
    )
    run(function("copy_rows"), call, min(num_threads(), call.tasks.count))
