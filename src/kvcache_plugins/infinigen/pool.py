"""Rows of one layer's tokens in host memory: pages that are only ever appended to, and a limit if there is one.

A row holds all that a step fetches of a token of one head, side by side, so that one transfer fetches it: its key and
value as they are, or bytes that a codec made of them. Pages have one size: what is stored does not move when the pool
grows. Only where no GPU uses it, a first page that is alone has but the capacity that its tokens need, and moves to
twice as much. With `max_tokens` the pool stops growing there, each head on its own: a new token then takes the slot of
a victim, and slots no longer stand in the order of positions.

For a GPU pages are page-locked: it writes and reads them while the host goes on. What it was told to do and may not
have done yet is known by events, and the host waits for those before it touches a page itself or gives one back. Where
a part of a page does not lie in one piece PyTorch's copies make the host wait: a kernel writes it, or head by head.

Legend: B batch, H key/value heads, R numbers of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import torch

from kvcache_plugins.kernels.engine import choose_copy_kernel, load_triton
from kvcache_plugins.kernels.tokens import gather_rows


PAGE_TOKENS = 1024
# Of a first page that is not whole
_LEAST_TOKENS = 64
# Of a full pool, the share that may be replaced at once
_REPLACED_AT_ONCE = 8
EVICTIONS = ("counter", "lru", "fifo")
_MAX_COUNT = 255
# Ranks of what goes before any token: padding, and slots whose token was rolled back
_FREE_RANK, _PADDING_RANK = -2, -1


def is_gpu(device: torch.device) -> bool:
    """Tells whether a device works on its own, so that the host must neither wait for it nor run ahead of it."""
    return device.type == "cuda"


class TokenPool:
    """
    Rows of a layer's tokens, `[B, H, slots, R]`, in host memory.

    Rows are like the `parts` `[B, H, any, any]` side by side, none of which is stored. Slots a head are limited by
    `max_tokens`, see `UsageRecord`; `usage` then says which token each slot holds, else that is its position. `pages`
    are `[B, H, PAGE_TOKENS, R]`, page-locked with `pin_memory`.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        max_tokens: int | None = None,
        eviction: str = "counter",
        num_protected: int = 0,
    ):
        # What GPUs were told to do with pages and may not have done
        self._pending: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self.batch_size, self.num_heads = parts[0].shape[:2]
        self.dims = [part.shape[3] for part in parts]
        self.row_dim = sum(self.dims)
        self.dtype, self.device = parts[0].dtype, parts[0].device
        self.pin_memory = is_gpu(self.device)
        # States without data, on which caches are sized, have pages without
        self._host = torch.device("meta" if self.device.type == "meta" and not self.pin_memory else "cpu")
        self.max_tokens = max_tokens
        self.pages: list[torch.Tensor] = []
        # Where the pages lie, as the host knows it and for kernels
        self._addresses: tuple[tuple[int, ...], torch.Tensor] | None = None
        self.num_slots = 0
        self.usage = None
        if max_tokens is not None:
            self.usage = UsageRecord(eviction, num_protected, self.batch_size, self.num_heads, max_tokens)

    @property
    def is_in_order(self) -> bool:
        """Tells whether a slot is the position of its token."""
        return self.usage is None or self.usage.in_order

    def note(self, stream: torch.cuda.Stream) -> None:
        """Adds what a stream has been told so far to what the host waits for."""
        self._pending[stream] = stream.record_event(self._pending.get(stream))

    def wait(self) -> None:
        """Has the host wait for all that GPUs may still do with the pages."""
        while self._pending:
            self._pending.popitem()[1].synchronize()

    def append(
        self, parts: Sequence[torch.Tensor], position: int, padding: torch.Tensor | None
    ) -> tuple[int, list[torch.Tensor]]:
        """
        Stores parts `[B, H, tokens, any]` of rows that follow those held, or, with a `MemoryError`, nothing. Returns
        how many went behind those held, and the slots `[B, H, tokens]` that the others took, in order: the last token
        that took a slot is in it. Padding at the start of sequences, `[B]`, goes first.
        """
        count = parts[0].shape[2]
        free = count if self.max_tokens is None else min(count, self.max_tokens - self.num_slots)
        self._grow(self.num_slots + free)
        self._write(self.num_slots, [part[:, :, :free] for part in parts])
        if self.usage is not None:
            self.usage.add(self.num_slots, free, position)
        self.num_slots += free
        taken: list[torch.Tensor] = []
        if self._host.type == "meta":
            # Whose place a token takes changes no size
            return free, taken
        at_once = max((self.max_tokens or 0) // _REPLACED_AT_ONCE, 1)
        for start in range(free, count, at_once):
            assert self.usage is not None
            self.wait()
            stop = min(start + at_once, count)
            slots = self.usage.replace(stop - start, position + start, padding)
            rows = torch.cat([part[:, :, start:stop] for part in parts], dim=3).to("cpu")
            for page, first, end in self._spans(0, self.num_slots):
                places = ((slots >= first) & (slots < end)).nonzero(as_tuple=True)
                page[places[0], places[1], slots[places] - first] = rows[places]
            taken.append(slots)
        return free, taken

    def _grow(self, num_slots: int) -> None:
        capacity = sum(page.shape[2] for page in self.pages)
        if num_slots <= capacity:
            return
        num_pages, page_tokens = -(-num_slots // PAGE_TOKENS), PAGE_TOKENS
        if num_pages == 1 and not self.pin_memory:
            page_tokens = min(max(_LEAST_TOKENS, 1 << (num_slots - 1).bit_length()), PAGE_TOKENS)
        elif self._host.type == "meta":
            # Nobody looks for a token in a page without data: a long context is sized as fast as a short one
            num_pages, page_tokens = 1, num_pages * PAGE_TOKENS
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
                continue
            rows = torch.cat(own, dim=3)
            if stop - start == PAGE_TOKENS:
                page.copy_(rows, non_blocking=True)
            elif addresses is not None:
                numbers = torch.arange(start, stop, dtype=torch.int64, device=rows.device).expand(rows.shape[:3])
                with torch.cuda.device_of(rows):
                    load_triton().write_rows(addresses, numbers, None, rows, PAGE_TOKENS)
            else:
                for item, head in product(range(self.batch_size), range(self.num_heads)):
                    page[item, head, slots].copy_(rows[item, head], non_blocking=True)
        if self.pin_memory:
            self.note(torch.cuda.current_stream(parts[0].device))

    def addresses_for(self, states: torch.Tensor) -> torch.Tensor | None:
        """Lists where the pages lie, for kernels on the device of `states`; `None` if these cannot be used."""
        if choose_copy_kernel(states) != "triton":
            return None
        pointers = tuple(page.data_ptr() for page in self.pages)
        if self._addresses is None or self._addresses[0] != pointers:
            self._addresses = pointers, load_triton().page_addresses(self.pages, states.device)
        return self._addresses[1]

    def _spans(self, first: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Lists the pages of slots from `first` to `stop`, each with its first and the one behind its last of them."""
        for number in range(first // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            offset = number * PAGE_TOKENS
            yield self.pages[number], max(first, offset), min(stop, offset + PAGE_TOKENS)

    def iter_pages(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Lists rows `[B, H, slots, R]` by page, on `device`, with first slot and the one behind the last."""
        for page, start, stop in self._spans(0, self.num_slots):
            whole = page
            if self.pin_memory:
                whole = page.to(self.device, non_blocking=True)
                self.note(torch.cuda.current_stream(self.device))
            yield whole[:, :, : stop - start], start, stop

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Has the host copy the rows `[B, H, tokens, R]` of slots in use, `[B, H, tokens]`, to where these are."""
        self.wait()
        return gather_rows(self.pages, slots.to("cpu")).to(slots.device)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Lists positions of the tokens in slots in use, -1 where there is none, broadcasting to `[B, H, slots]`."""
        if self.usage is None:
            return torch.arange(self.num_slots, dtype=torch.int64, device=device)[None, None]
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
            self.wait()
            del self.pages[num_pages:]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it; the result stays in host memory."""
        self.wait()
        self._addresses = None
        self.pages = [self._in_host_memory(function(page)) for page in self.pages]
        if self.usage is not None:
            self.usage.map(function)
        if self.pages:
            self.batch_size = self.pages[0].shape[0]

    def _in_host_memory(self, page: torch.Tensor) -> torch.Tensor:
        is_locked = not self.pin_memory or page.device.type == "cuda" or page.is_pinned()
        return page if is_locked else page.pin_memory()

    def serve(self, device: torch.device) -> None:
        """Takes rows from another device from now on."""
        self.device, self.pin_memory = device, is_gpu(device)
        if self.pin_memory and self.pages and self.pages[0].shape[2] < PAGE_TOKENS:
            self._grow(PAGE_TOKENS)
        self.map(lambda tensor: tensor)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists part and tensor of everything stored."""
        for number, page in enumerate(self.pages):
            used = min(max(self.num_slots - number * PAGE_TOKENS, 0), page.shape[2])
            yield "pool", page[:, :, :used]
            yield "spare", page[:, :, used:]
        if self.usage is not None:
            yield "index", self.usage.positions
            yield "index", self.usage.usage
        if self._addresses is not None:
            yield "index", self._addresses[1]

    def __getstate__(self) -> dict[str, object]:
        # Who copies the pages reads them
        self.wait()
        return {**self.__dict__, "_addresses": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Copies of pages are in ordinary memory
        self.pages = [self._in_host_memory(page) for page in self.pages]

    def __del__(self) -> None:
        # PyTorch, which does not know that kernels use the pages, would give their memory away. A copy that failed
        # half-way has none.
        if "_pending" in self.__dict__:
            self.wait()


class UsageRecord:
    """
    Notes positions of the tokens in a pool's slots `[B, H, slots]`, -1 where there is none, and their use.

    The policy is `"counter"` (out goes the token that was fetched least often; all counts of a head are halved when
    one saturates), `"lru"` (the one whose last fetch is longest ago) or `"fifo"` (the oldest). Ties go to the oldest;
    the first `num_protected` tokens of every item stay. Other than in the paper's code a victim's slot starts anew.
    """

    def __init__(self, policy: str, num_protected: int, batch_size: int, num_heads: int, num_slots: int):
        self.policy, self.num_protected = policy, num_protected
        self.positions = torch.full((batch_size, num_heads, num_slots), -1, dtype=torch.int32, device="cpu")
        # Fetches, or the step of the last one; of `"fifo"` nothing is noted
        dtype = torch.int32 if policy == "lru" else torch.uint8
        self.usage = torch.zeros(batch_size, num_heads, num_slots, dtype=dtype, device="cpu")
        self.num_steps = 0
        self.num_evicted = 0
        # Whether slots still stand in the order of positions
        self.in_order = True

    def add(self, first_slot: int, count: int, position: int) -> None:
        """Notes tokens from `position` on that went into free slots at the end."""
        slots = slice(first_slot, first_slot + count)
        self.positions[:, :, slots] = torch.arange(position, position + count, dtype=torch.int32, device="cpu")
        self.usage[:, :, slots] = self._usage_of_new_tokens(first_slot)

    def replace(self, count: int, position: int, padding: torch.Tensor | None) -> torch.Tensor:
        """
        Chooses victims for `count` tokens from `position` on and notes the new tokens in their slots; returns these,
        distinct, `[B, H, count]`, those of the oldest victims first.
        """
        num_slots = self.positions.shape[2]
        first = 0 if padding is None else padding.to("cpu")[:, None, None]
        # Padding goes first, sinks go last
        rank = self.usage.long().masked_fill(self.positions < first, _PADDING_RANK)
        rank = rank.masked_fill(self.positions < 0, _FREE_RANK)
        is_sink = (self.positions >= first) & (self.positions < first + self.num_protected)
        rank = rank.masked_fill(is_sink, torch.iinfo(torch.int32).max)
        victims = (rank * 2**31 + self.positions).topk(count, dim=2, largest=False).indices
        self.num_evicted += int((rank.gather(2, victims) > _PADDING_RANK).sum())
        self.in_order = False
        new = torch.arange(position, position + count, dtype=torch.int32, device="cpu")
        self.usage.scatter_(2, victims, self._usage_of_new_tokens(num_slots).expand(*victims.shape))
        self.positions.scatter_(2, victims, new.expand(*victims.shape))
        return victims

    def _usage_of_new_tokens(self, num_slots: int) -> torch.Tensor:
        """Tells a new token's usage, `[B, H, 1]`: the average, or now; with none it would be the next victim."""
        if self.policy == "lru":
            return torch.full((*self.usage.shape[:2], 1), self.num_steps, dtype=torch.int32, device="cpu")
        if num_slots == 0:
            return torch.zeros(*self.usage.shape[:2], 1, dtype=torch.uint8, device="cpu")
        return self.usage[:, :, :num_slots].float().mean(dim=2, keepdim=True).round().to(torch.uint8)

    def touch(self, slots: torch.Tensor, valid: torch.Tensor) -> None:
        """Notes that tokens in those slots `[B, H, tokens]` that are valid were fetched; valid slots are distinct."""
        self.num_steps += 1
        if self.policy == "fifo":
            return
        if self.policy == "lru":
            before = self.usage.gather(2, slots)
            self.usage.scatter_(2, slots, torch.where(valid, self.num_steps, before).to(torch.int32))
            return
        saturated = (self.usage == _MAX_COUNT).any(dim=2, keepdim=True)
        self.usage = torch.where(saturated, self.usage // 2, self.usage)
        self.usage.scatter_add_(2, slots, valid.to(torch.uint8))

    def truncate(self, length: int) -> None:
        """Frees the slots of tokens at position `length` and beyond."""
        self.positions.masked_fill_(self.positions >= length, -1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self.positions, self.usage = function(self.positions), function(self.usage)
