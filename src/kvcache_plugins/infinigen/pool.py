"""Rows of one layer's tokens in host memory: pages that are only ever appended to, and a limit if there is one.

A row holds all that a step fetches of a token of one head, side by side, so that one transfer fetches it: its key and
value as they are, or bytes that a codec made of them. Pages have one size: what is stored does not move when the pool
grows. Only where no GPU uses it, a first page that is alone has but the capacity that its tokens need, and moves to
twice as much. With `max_tokens` the pool stops growing there, each head on its own: a new token then takes the slot of
a victim, and slots no longer stand in the order of positions.

For a GPU pages are page-locked: it writes and reads them while the host goes on. What it was told to do and may not
have done yet is known by events (`PendingWork`), and the host waits for those before it touches a page itself or gives
one back. In memory that is not page-locked, or for a part of a page that does not lie in one piece, PyTorch's copies
make the host wait; so whole pages are copied, and parts written by a kernel or head by head.

Legend: B batch, H key/value heads, R numbers of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import torch

from kvcache_plugins.files.mapped_files import release
from kvcache_plugins.kernels.engine import choose_copy_kernel
from kvcache_plugins.kernels.tokens import gather_rows

from .disk_pages import DiskPages
from .eviction import UsageRecord


PAGE_TOKENS = 1024
# Of a first page that is not whole
_LEAST_TOKENS = 64
# Of a full pool, the share that may be replaced at once
_REPLACED_AT_ONCE = 8


def is_gpu(device: torch.device) -> bool:
    """Tells whether a device works on its own, so that the host must neither wait for it nor run ahead of it."""
    return device.type == "cuda"


class PendingWork:
    """Events behind all that GPUs were told to do with pages. A copy has none: whoever copies pages waits before."""

    def __init__(self) -> None:
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}

    def note(self, stream: torch.cuda.Stream) -> None:
        """Adds what a stream has been told so far."""
        event = self._events.get(stream)
        if event is None:
            event = self._events[stream] = torch.cuda.Event()
        event.record(stream)

    def wait(self) -> None:
        """Has the host wait for all of it."""
        for event in self._events.values():
            event.synchronize()
        self._events.clear()

    def __reduce__(self) -> tuple[object, ...]:
        return PendingWork, ()


class TokenPool:
    """
    Rows of a layer's tokens, `[B, H, slots, R]`, in host memory.

    Args:
        parts: parts that rows consist of, whose shapes, dtype and device the pool takes over; none of them is stored.
        max_tokens, eviction, num_protected: a limit of slots a head, and who gives way there: see `UsageRecord`.
        folder: where pages are files; by default they are in memory.

    Attributes:
        pages: `[B, H, PAGE_TOKENS, R]` each, page-locked with `pin_memory`; without, a page that is alone may be
            shorter.
        pending: what GPUs may still do with the pages.
        usage: which token each slot holds, where there is a limit. Without one slot and position are the same.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        *,
        max_tokens: int | None = None,
        eviction: str = "counter",
        num_protected: int = 0,
        folder: Path | None = None,
    ):
        self.pending = PendingWork()
        self.batch_size, self.num_heads = parts[0].shape[:2]
        self.dims = [part.shape[3] for part in parts]
        self.dtype, self.device = parts[0].dtype, parts[0].device
        self.pin_memory = is_gpu(self.device)
        # States without data, on which caches are sized, have pages without
        self._host = torch.device("meta" if self.device.type == "meta" and not self.pin_memory else "cpu")
        self.max_tokens = max_tokens
        self.disk = None if folder is None or self._host.type == "meta" else DiskPages(folder)
        self.pages: list[torch.Tensor] = []
        # Where the pages lie, as the host knows it and for kernels
        self._addresses: tuple[tuple[int, ...], torch.Tensor] | None = None
        self.num_slots = 0
        self.usage = None
        if max_tokens is not None:
            self.usage = UsageRecord(eviction, num_protected, self.batch_size, self.num_heads, max_tokens)

    @property
    def row_dim(self) -> int:
        """Numbers of a row."""
        return sum(self.dims)

    @property
    def page_tokens(self) -> int:
        """Slots of a page."""
        return self.pages[0].shape[2] if self.pages else PAGE_TOKENS

    @property
    def is_in_order(self) -> bool:
        """Whether a slot is the position of its token."""
        return self.usage is None or self.usage.in_order

    def free_slots(self, count: int) -> int:
        """Tells how many of `count` new tokens would go behind those held."""
        return count if self.max_tokens is None else min(count, self.max_tokens - self.num_slots)

    def append(self, parts: Sequence[torch.Tensor], position: int, padding: torch.Tensor | None) -> list[torch.Tensor]:
        """
        Stores parts `[B, H, tokens, any]` of rows that follow those held, as a whole or, with a `MemoryError`, not at
        all.

        Returns for the tokens that did not go behind those held the slots `[B, H, tokens]` that they took, in order. A
        slot may have been taken more than once, then the later token is in it. Padding at the start of sequences,
        `[B]`, goes first.
        """
        count = parts[0].shape[2]
        free = self.free_slots(count)
        self._grow(self.num_slots + free)
        self._write(self.num_slots, [part[:, :, :free] for part in parts])
        if self.usage is not None:
            self.usage.add(self.num_slots, free, position)
        self.num_slots += free
        taken: list[torch.Tensor] = []
        if self._host.type == "meta":
            # Whose place a token takes changes no size
            return taken
        at_once = max((self.max_tokens or 0) // _REPLACED_AT_ONCE, 1)
        for start in range(free, count, at_once):
            assert self.usage is not None
            self.pending.wait()
            stop = min(start + at_once, count)
            slots = self.usage.replace(stop - start, position + start, padding)
            rows = torch.cat([part[:, :, start:stop] for part in parts], dim=3).to("cpu")
            numbers = slots // PAGE_TOKENS
            for number, page in enumerate(self.pages):
                places = (numbers == number).nonzero(as_tuple=True)
                page[places[0], places[1], slots[places] - number * PAGE_TOKENS] = rows[places]
            taken.append(slots)
        return taken

    def _grow(self, num_slots: int) -> None:
        capacity = sum(page.shape[2] for page in self.pages)
        if num_slots <= capacity:
            return
        num_pages, page_tokens = -(-num_slots // PAGE_TOKENS), PAGE_TOKENS
        if num_pages == 1 and not self.pin_memory:
            page_tokens = min(max(_LEAST_TOKENS, 1 << (num_slots - 1).bit_length()), PAGE_TOKENS)
        kept = [page for page in self.pages if page.shape[2] == page_tokens]
        try:
            new = [self._new_page(page_tokens) for _ in range(num_pages - len(kept))]
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"the host has no memory for {num_slots} tokens of a layer; {self.num_slots} are held and usable. "
                f"With `pool_tokens` set to {max(self.num_slots, 1)} or less, new tokens replace old ones instead"
            ) from error
        if len(kept) < len(self.pages):
            # The first page was short
            new[0][:, :, : self.num_slots] = self.pages[0][:, :, : self.num_slots]
        self.pages = kept + new

    def _new_page(self, page_tokens: int) -> torch.Tensor:
        shape = (self.batch_size, self.num_heads, page_tokens, self.row_dim)
        if self.disk is not None:
            return self.disk.new_page(shape, self.dtype)
        return torch.zeros(shape, dtype=self.dtype, device=self._host, pin_memory=self.pin_memory)

    def _write(self, first: int, parts: Sequence[torch.Tensor]) -> None:
        """Writes parts of rows `[B, H, tokens, any]` into consecutive slots."""
        if self._host.type == "meta":
            return
        # Before anything is written: pages may have to be locked first
        addresses = self.addresses_for(parts[0]) if self.pin_memory else None
        for page, start, stop in self._spans(first, first + parts[0].shape[2]):
            own = [part[:, :, start - first : stop - first] for part in parts]
            slots = slice(start % PAGE_TOKENS, start % PAGE_TOKENS + stop - start)
            if not self.pin_memory:
                for part, columns in zip(own, page[:, :, slots].split(self.dims, dim=3), strict=True):
                    columns.copy_(part)
                self._release(page)
                continue
            rows = torch.cat(own, dim=3)
            if stop - start == PAGE_TOKENS:
                page.copy_(rows, non_blocking=True)
            elif addresses is not None:
                _write_by_kernel(addresses, self.page_tokens, start, rows)
            else:
                for item, head in product(range(self.batch_size), range(self.num_heads)):
                    page[item, head, slots].copy_(rows[item, head], non_blocking=True)
        if self.pin_memory:
            self.pending.note(torch.cuda.current_stream(parts[0].device))

    def addresses_for(self, states: torch.Tensor) -> torch.Tensor | None:
        """
        Lists where the pages lie, `[pages]`, for the kernels of `triton_kernels.gather`, if what comes from the pages
        or goes there is on the device of `states`; `None` if they cannot be used.
        """
        if choose_copy_kernel(states) != "triton":
            return None
        pointers = tuple(page.data_ptr() for page in self.pages)
        if self._addresses is not None and self._addresses[0] == pointers:
            return self._addresses[1]
        if not all(map(_is_readable, self.pages)):
            # A copy of a pool has copies of pages, in ordinary memory
            self.map(lambda tensor: tensor)
            pointers = tuple(page.data_ptr() for page in self.pages)
            if not all(map(_is_readable, self.pages)):
                return None
        # Triton is not everywhere
        from kvcache_plugins.triton_kernels.gather import page_addresses

        self._addresses = pointers, page_addresses(self.pages, states.device)
        return self._addresses[1]

    def _spans(self, first: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Lists the pages that slots from `first` to `stop` lie in, each with its own first and last slot of them."""
        for number in range(first // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            offset = number * PAGE_TOKENS
            yield self.pages[number], max(first, offset), min(stop, offset + PAGE_TOKENS)

    def iter_pages(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """
        Lists everything held, page by page: rows `[B, H, slots, R]`, first slot, slot behind the last. Each is brought
        to `device` when it is its turn; the host waits for none.
        """
        for page, start, stop in self._spans(0, self.num_slots):
            if self.disk is not None and stop < self.num_slots:
                self.disk.expect_page(self.pages[stop // PAGE_TOKENS])
            whole = page
            if self.pin_memory:
                whole = page.to(self.device, non_blocking=True)
                self.pending.note(torch.cuda.current_stream(self.device))
            yield whole[:, :, : stop - start], start, stop
            self._release(page)

    def expect(self, slots: torch.Tensor, count: torch.Tensor) -> None:
        """Has what is on disk of some slots `[B, H, K]`, the first `count` `[B, H]` of them, read ahead."""
        if self.disk is not None and self.pages:
            self.disk.expect(self.pages, slots, count)

    def reading(self) -> AbstractContextManager[None]:
        """Encloses what reads pages where they stand."""
        return nullcontext() if self.disk is None else self.disk.reading(self.pages)

    def _release(self, page: torch.Tensor) -> None:
        if self.disk is not None:
            release(page)

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Copies the rows of slots `[B, H, tokens]` in use, int64, on the host: `[B, H, tokens, R]`."""
        self.pending.wait()
        if self.disk is None:
            return gather_rows(self.pages, slots)
        with self.disk.reading():
            return gather_rows(self.pages, slots, are_mapped=True)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Lists positions of the tokens in slots in use, -1 where there is none, broadcasting to `[B, H, slots]`."""
        if self.usage is None:
            return torch.arange(self.num_slots, device=device)[None, None]
        return self.usage.positions[:, :, : self.num_slots].to(device).long()

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns the positions of the tokens in slots `[B, H, tokens]`."""
        if self.usage is None:
            return slots
        return self.usage.positions.to(slots.device).gather(2, slots).long()

    def truncate(self, length: int) -> None:
        """Forgets the tokens at position `length` and beyond; whole pages without any are given back."""
        if self.usage is not None:
            self.usage.truncate(length)
            if not self.usage.in_order:
                return
        self.num_slots = min(self.num_slots, length)
        num_pages = -(-self.num_slots // PAGE_TOKENS)
        if num_pages < len(self.pages):
            self.pending.wait()
            del self.pages[num_pages:]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it; the result stays in host memory."""
        self.pending.wait()
        self._addresses = None
        self.pages = [self._in_host_memory(function(page)) for page in self.pages]
        if self.usage is not None:
            self.usage.map(function)
        if self.pages:
            self.batch_size = self.pages[0].shape[0]

    def _in_host_memory(self, page: torch.Tensor) -> torch.Tensor:
        if self.disk is not None:
            copied = self.disk.new_page(page.shape, page.dtype).copy_(page)
            release(copied)
            return copied
        return page.pin_memory() if self.pin_memory and not _is_readable(page) else page

    def serve(self, device: torch.device) -> None:
        """Takes rows from another device from now on."""
        self.device, self.pin_memory = device, is_gpu(device)
        if self.pin_memory and self.pages and self.pages[0].shape[2] < PAGE_TOKENS:
            self._grow(PAGE_TOKENS)
        self.map(lambda tensor: tensor)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists part and tensor of everything stored."""
        for page, start, stop in self._spans(0, len(self.pages) * PAGE_TOKENS):
            used = min(max(self.num_slots - start, 0), stop - start)
            yield "pool", page[:, :, :used]
            yield "spare", page[:, :, used:]
        if self.usage is not None:
            for tensor in self.usage.tensors():
                yield "index", tensor
        if self._addresses is not None:
            yield "index", self._addresses[1]

    def host_tensors(self) -> Iterator[torch.Tensor]:
        """Lists what of it stands in host memory."""
        yield from self.pages
        if self.usage is not None:
            yield from self.usage.tensors()

    def __getstate__(self) -> dict[str, object]:
        # Who copies the pages reads them
        self.pending.wait()
        return {**self.__dict__, "_addresses": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.disk is not None:
            # Copies of pages are in memory
            self.pages = [self._in_host_memory(page) for page in self.pages]

    def __del__(self) -> None:
        # PyTorch does not know that kernels use the pages, and would hand their memory to somebody else. A copy that
        # failed half-way has none.
        if "pending" in self.__dict__:
            self.pending.wait()


def _is_readable(page: torch.Tensor) -> bool:
    """Tells whether a GPU can read a page where it stands."""
    return page.device.type == "cuda" or page.is_pinned()


def _write_by_kernel(addresses: torch.Tensor, page_tokens: int, first: int, rows: torch.Tensor) -> None:
    # Triton is not everywhere
    from kvcache_plugins.triton_kernels.gather import write_rows

    slots = torch.arange(first, first + rows.shape[2], device=rows.device).expand(rows.shape[:3])
    with torch.cuda.device_of(rows):
        write_rows(addresses, slots, None, rows, page_tokens)
