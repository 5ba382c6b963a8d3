"""Rows of one layer's tokens in host memory: pages to which rows are only ever appended, and an optional limit.

A row holds all that a step fetches of one token and head, side by side, so that one transfer fetches it: key and value
as they are, or the bytes into which a codec encoded them. All pages have one size, so stored rows do not move when the
pool grows. The one exception is a single first page that no GPU uses: its capacity doubles with its tokens. With
`max_tokens` the pool stops growing there, for each head on its own: a new token then takes the slot of a victim, and
slots are no longer in the order of positions.

Pages are page-locked for a GPU: it writes and reads them while the host goes on. Events mark the work that may be
under way, and the host waits for them before it touches or frees a page itself. PyTorch's copies make the host wait if
a part of a page is not contiguous: there a kernel writes it, or each head is copied separately.

Legend: B batch, H key/value heads, R numbers of a row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch

from kvcache_plugins.kernels.current_device import on_device_of
from kvcache_plugins.kernels.engine import choose_copy_kernel, load_triton
from kvcache_plugins.kernels.selective_attention import gather_rows


PAGE_TOKENS = 1024
# Least capacity of a first page that is not whole
_LEAST_TOKENS = 64
# Share of a full pool that may be replaced at once, as its reciprocal
_REPLACED_AT_ONCE = 8
EVICTIONS = ("counter", "lru", "fifo")
_MAX_COUNT = 255
# Ranks of slots that are replaced before any real token: rolled back ones, and padding
_FREE_RANK = -2
_PADDING_RANK = -1


def is_gpu(device: torch.device) -> bool:
    """Return whether a device works asynchronously, so that the host must not wait for it in a step."""
    return device.type == "cuda"


class TokenPool:
    """
    Rows of a layer's tokens, `[B, H, slots, R]`, in host memory.

    Args:
        parts (`Sequence[torch.Tensor]`, each of shape `[B, H, any, any]`): parts of rows, side by side; an example for
            sizes, dtype and device, not stored.
        max_tokens (`int`, *optional*): limit of slots a head.
        eviction, num_protected: see `UsageRecord`.

    Attributes:
        pages (`list[torch.Tensor]`, each of shape `[B, H, PAGE_TOKENS, R]`): storage, page-locked with `pin_memory`.
        num_slots (`int`): slots in use.
        num_tokens (`int`): tokens of the sequence that were stored so far, evicted ones included.
        usage (`UsageRecord`, *optional*): token of each slot, with `max_tokens`; else a slot is its token's position.
        version (`int`): raised by whatever adds, moves or drops tokens. Plans are of one version.
        was_attended (`bool`): True if a step that could be planned has attended to this version.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        max_tokens: int | None = None,
        eviction: str = "counter",
        num_protected: int = 0,
    ):
        # Last event of each stream that uses the pages
        self._events: dict[torch.cuda.Stream, torch.cuda.Event] = {}
        self.batch_size, self.num_heads = parts[0].shape[:2]
        self.dims = [part.shape[3] for part in parts]
        self.row_dim = sum(self.dims)
        self.dtype = parts[0].dtype
        self.device = parts[0].device
        self.pin_memory = is_gpu(self.device)
        # Caches are sized on states without data, whose pages have no data either
        self._host = torch.device("meta" if self.device.type == "meta" and not self.pin_memory else "cpu")
        self.max_tokens = max_tokens
        self.version = 0
        self.was_attended = False
        self._set_pages([])
        self.num_slots = 0
        self.num_tokens = 0
        self.usage: UsageRecord | None = None
        if max_tokens is not None:
            self.usage = UsageRecord(eviction, num_protected, self.batch_size, self.num_heads, max_tokens)

    def _set_pages(self, pages: list[torch.Tensor]) -> None:
        self.pages = pages
        # Addresses of the pages for kernels, on their device
        self._addresses: torch.Tensor | None = None

    def raise_version(self) -> None:
        """Invalidate all plans, which are of the version before."""
        self.version += 1
        self.was_attended = False

    @property
    def is_in_order(self) -> bool:
        """True if a slot is the position of its token."""
        return self.usage is None or self.usage.in_order

    @property
    def num_evicted(self) -> int:
        """Tokens that others have replaced, of all sequences and heads."""
        return 0 if self.usage is None else self.usage.num_evicted

    def record_event(self, stream: torch.cuda.Stream) -> None:
        """Have `synchronize` wait for the work that a stream has got so far."""
        self._events[stream] = stream.record_event(self._events.get(stream))

    def synchronize(self) -> None:
        """Have the host wait for all work of GPUs on the pages."""
        while self._events:
            self._events.popitem()[1].synchronize()

    def append(self, parts: Sequence[torch.Tensor], padding: torch.Tensor | None) -> tuple[int, list[torch.Tensor]]:
        """
        Store parts of rows `[B, H, tokens, any]` of the tokens that follow; with a `MemoryError`, store nothing.

        `padding` `[B]` counts the padding at the start of sequences, which is evicted first.

        Returns:
            `tuple[int, list[torch.Tensor]]`: tokens that got slots behind those in use, and slots
            `[B, H, tokens]` that the other tokens took from victims, in order; a slot that is taken twice holds the
            later token.
        """
        self.raise_version()
        count = parts[0].shape[2]
        position = self.num_tokens
        num_appended = count if self.max_tokens is None else min(count, self.max_tokens - self.num_slots)
        self._grow(self.num_slots + num_appended)
        self._write(self.num_slots, [part[:, :, :num_appended] for part in parts])
        if self.usage is not None:
            self.usage.add(self.num_slots, num_appended, position)
        self.num_slots += num_appended
        self.num_tokens += count
        taken: list[torch.Tensor] = []
        if self._host.type == "meta":
            # Sizes do not depend on the victims
            return num_appended, taken
        at_once = 1 if self.usage is None else self.usage.most_replaced
        for start in range(num_appended, count, at_once):
            assert self.usage is not None
            self.synchronize()
            stop = min(start + at_once, count)
            slots = self.usage.replace(stop - start, position + start, padding)
            rows = torch.cat([part[:, :, start:stop] for part in parts], dim=3).to("cpu")
            for page, first, end in self._spans(0, self.num_slots):
                indices = ((slots >= first) & (slots < end)).nonzero(as_tuple=True)
                page[indices[0], indices[1], slots[indices] - first] = rows[indices]
            taken.append(slots)
        return num_appended, taken

    def _grow(self, num_slots: int) -> None:
        capacity = sum(page.shape[2] for page in self.pages)
        if num_slots <= capacity:
            return
        num_pages = -(-num_slots // PAGE_TOKENS)
        page_tokens = PAGE_TOKENS
        if num_pages == 1 and not self.pin_memory:
            page_tokens = min(max(_LEAST_TOKENS, 1 << (num_slots - 1).bit_length()), PAGE_TOKENS)
        elif self._host.type == "meta":
            # One page without data represents all, so that a long context is sized as fast as a short one
            page_tokens = num_pages * PAGE_TOKENS
            num_pages = 1
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
        self._set_pages(kept + new)

    def _new_page(self, page_tokens: int) -> torch.Tensor:
        shape = (self.batch_size, self.num_heads, page_tokens, self.row_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self._host, pin_memory=self.pin_memory)

    def _write(self, first: int, parts: Sequence[torch.Tensor]) -> None:
        """Write parts of rows `[B, H, tokens, any]` into consecutive slots."""
        if self._host.type == "meta":
            return
        # Before anything is written, as pages may have to be locked first
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
                all_slots = torch.arange(start, stop, dtype=torch.int64, device=rows.device).expand(rows.shape[:3])
                with on_device_of(rows):
                    load_triton().write_rows(addresses, all_slots, None, rows, PAGE_TOKENS)
            else:
                for sequence, head in product(range(self.batch_size), range(self.num_heads)):
                    page[sequence, head, slots].copy_(rows[sequence, head], non_blocking=True)
        if self.pin_memory:
            self.record_event(torch.cuda.current_stream(parts[0].device))

    def addresses_for(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return addresses of the pages for kernels on the device of `states`; `None` if it has no such kernel."""
        if choose_copy_kernel(states) != "triton":
            return None
        if self._addresses is None:
            self._addresses = load_triton().page_addresses(self.pages, states.device)
        return self._addresses

    def _spans(self, first: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield the pages of the slots from `first` up to `stop`, each with the range of slots that is in it."""
        for number in range(first // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            offset = number * PAGE_TOKENS
            yield self.pages[number], max(first, offset), min(stop, offset + PAGE_TOKENS)

    def iter_pages(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield rows `[B, H, slots, R]` by page, on `device`, with first slot and the one behind the last."""
        for page, start, stop in self._spans(0, self.num_slots):
            whole = page
            if self.pin_memory:
                whole = page.to(self.device, non_blocking=True)
                self.record_event(torch.cuda.current_stream(self.device))
            yield whole[:, :, : stop - start], start, stop

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        """Copy rows `[B, H, tokens, R]` of slots in use, `[B, H, tokens]`, to the slots' device. The host waits."""
        self.synchronize()
        return gather_rows(self.pages, slots.to("cpu")).to(slots.device)

    def positions(self, device: torch.device) -> torch.Tensor:
        """Return positions of all slots' tokens, -1 for a free slot, broadcasting to `[B, H, slots]`."""
        if self.usage is None:
            return torch.arange(self.num_slots, dtype=torch.int64, device=device)[None, None]
        return self.usage.positions[:, :, : self.num_slots].to(device).long()

    def positions_of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the positions of the tokens in slots `[B, H, tokens]`."""
        if self.usage is None:
            return slots
        return self.usage.positions.to(slots.device).gather(2, slots).long()

    def truncate(self, length: int) -> None:
        """Drop tokens at position `length` and beyond, and free pages without any token."""
        self.raise_version()
        if self.usage is not None:
            self.usage.truncate(length)
        self.num_tokens = min(self.num_tokens, length)
        if not self.is_in_order:
            return
        self.num_slots = min(self.num_slots, length)
        num_pages = -(-self.num_slots // PAGE_TOKENS)
        if num_pages < len(self.pages):
            self.synchronize()
            self._set_pages(self.pages[:num_pages])

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by `function` of it; the result stays in host memory."""
        self.raise_version()
        self.synchronize()
        self._set_pages([self._in_host_memory(function(page)) for page in self.pages])
        if self.usage is not None:
            self.usage.map(function)
        if self.pages:
            self.batch_size = self.pages[0].shape[0]

    def _in_host_memory(self, page: torch.Tensor) -> torch.Tensor:
        is_locked = not self.pin_memory or page.device.type == "cuda" or page.is_pinned()
        return page if is_locked else page.pin_memory()

    def move_to_device(self, device: torch.device) -> None:
        """Take rows from another device, and lend them to it, from now on."""
        self.device = device
        self.pin_memory = is_gpu(device)
        if self.pin_memory and self.pages and self.pages[0].shape[2] < PAGE_TOKENS:
            self._grow(PAGE_TOKENS)
        self.map(lambda tensor: tensor)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield memory category and tensor of everything stored."""
        for number, page in enumerate(self.pages):
            used = min(max(self.num_slots - number * PAGE_TOKENS, 0), page.shape[2])
            yield "pool", page[:, :, :used]
            yield "spare", page[:, :, used:]
        if self.usage is not None:
            yield "index", self.usage.positions
            yield "index", self.usage.usage
        if self._addresses is not None:
            yield "index", self._addresses

    def __getstate__(self) -> dict[str, object]:
        # A copy reads the pages
        self.synchronize()
        return {**self.__dict__, "_addresses": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        # Copies of pages are in ordinary memory
        self._set_pages([self._in_host_memory(page) for page in self.pages])

    def __del__(self) -> None:
        # PyTorch does not know that kernels use the pages, and would free them. A copy that failed half-way has no
        # events
        if "_events" in self.__dict__:
            self.synchronize()


class UsageRecord:
    """
    Positions of the tokens in a pool's slots `[B, H, slots]`, -1 for a free slot, and their use.

    The policy is `"counter"` (evict the token that was fetched least often; all counts of a head are halved when one
    saturates), `"lru"` (evict the token whose last fetch is longest ago) or `"fifo"` (evict the oldest). Among equals
    the oldest is evicted; the first `num_protected` tokens of every sequence stay. Unlike in the paper's code, the
    count of a victim's slot starts anew.
    """

    def __init__(self, policy: str, num_protected: int, batch_size: int, num_heads: int, num_slots: int):
        self.policy = policy
        self.num_protected = num_protected
        self.positions = torch.full((batch_size, num_heads, num_slots), -1, dtype=torch.int32, device="cpu")
        # Number of fetches, or the step of the last one; unused for `"fifo"`
        dtype = torch.int32 if policy == "lru" else torch.uint8
        self.usage = torch.zeros(batch_size, num_heads, num_slots, dtype=dtype, device="cpu")
        self.num_steps = 0
        self.num_evicted = 0
        # True if slots are in the order of positions
        self.in_order = True

    @property
    def most_replaced(self) -> int:
        """Tokens that may be replaced at once: a share of the slots, and none that is protected."""
        num_slots = self.positions.shape[2]
        return max(min(num_slots // _REPLACED_AT_ONCE, num_slots - self.num_protected), 1)

    def add(self, first_slot: int, count: int, position: int) -> None:
        """Record tokens from `position` on in free slots at the end."""
        slots = slice(first_slot, first_slot + count)
        self.positions[:, :, slots] = torch.arange(position, position + count, dtype=torch.int32, device="cpu")
        self.usage[:, :, slots] = self._usage_of_new_tokens(first_slot)

    def replace(self, count: int, position: int, padding: torch.Tensor | None) -> torch.Tensor:
        """
        Choose victims for `count` tokens from `position` on, and record the new tokens in their slots.

        Returns:
            `torch.Tensor` of shape `[B, H, count]`: distinct slots, those of the oldest victims first.
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
        """Return a new token's usage `[B, H, 1]`: the average, or the current step; with 0 it would be next to go."""
        if self.policy == "lru":
            return torch.full((*self.usage.shape[:2], 1), self.num_steps, dtype=torch.int32, device="cpu")
        if num_slots == 0:
            return torch.zeros(*self.usage.shape[:2], 1, dtype=torch.uint8, device="cpu")
        return self.usage[:, :, :num_slots].float().mean(dim=2, keepdim=True).round().to(torch.uint8)

    def touch(self, slots: torch.Tensor, valid: torch.Tensor) -> None:
        """Count a fetch of the tokens in those slots `[B, H, tokens]` that are `valid`; these are distinct."""
        self.num_steps += 1
        if self.policy == "fifo":
            return
        if self.policy == "lru":
            # The largest, as filling may repeat a slot that is valid
            steps = torch.where(valid, self.num_steps, 0).to(torch.int32)
            self.usage.scatter_reduce_(2, slots, steps, "amax")
            return
        saturated = (self.usage == _MAX_COUNT).any(dim=2, keepdim=True)
        self.usage = torch.where(saturated, self.usage // 2, self.usage)
        self.usage.scatter_add_(2, slots, valid.to(torch.uint8))

    def truncate(self, length: int) -> None:
        """Free the slots of tokens at position `length` and beyond."""
        self.positions.masked_fill_(self.positions >= length, -1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by `function` of it."""
        self.positions = function(self.positions)
        self.usage = function(self.usage)
