"""Keys and values of one layer in host memory: pages that are only ever appended to, and a limit if there is one.

A row holds the key and the value of a token side by side, so that one transfer fetches both. Pages have one size: what
is stored never moves when the pool grows. With `max_tokens` the pool stops growing there, each head on its own: a new
token then takes the slot of a victim, and slots no longer stand in the order of positions.

Legend: B batch, H key/value heads, D and E head dimensions of keys and values.
"""

from collections.abc import Callable, Iterator

import torch

from .eviction import UsageRecord


PAGE_TOKENS = 1024
# Of a full pool, the share that may be replaced at once
_REPLACED_AT_ONCE = 8


class TokenPool:
    """
    Tokens of a layer, `[B, H, slots, D + E]`, in host memory.

    Args:
        key_states, value_states (`torch.Tensor` of shape `[B, H, any, D]`, `[B, H, any, E]`):
            States whose shapes and dtype the pool takes over; none of them is stored.
        max_tokens (`int`, *optional*):
            Tokens that every head holds at most.
        eviction (`str`, *optional*, defaults to `"counter"`):
            Whose slot a token takes when the pool is full; see `UsageRecord`.
        num_protected (`int`, *optional*, defaults to 0):
            First tokens of every item that are never evicted.

    Attributes:
        pages (`list[torch.Tensor]`): `[B, H, PAGE_TOKENS, D + E]` each, page-locked if the states are on a GPU, which
            then can read them while it computes.
        num_slots (`int`): slots in use.
        usage (`UsageRecord`, *optional*): which token each slot holds, where there is a limit. Without one slot and
            position are the same.
    """

    def __init__(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *,
        max_tokens: int | None = None,
        eviction: str = "counter",
        num_protected: int = 0,
    ):
        self.batch_size, self.num_heads, _, self.key_dim = key_states.shape
        self.row_dim = self.key_dim + value_states.shape[3]
        self.dtype, self.pin_memory = key_states.dtype, key_states.device.type == "cuda"
        self.max_tokens = max_tokens
        self.pages: list[torch.Tensor] = []
        self.num_slots = 0
        self.usage = None
        if max_tokens is not None:
            self.usage = UsageRecord(eviction, num_protected, self.batch_size, self.num_heads, max_tokens)

    def append(
        self, keys: torch.Tensor, values: torch.Tensor, position: int, padding: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """
        Stores tokens that follow those held, as a whole or, without memory, not at all.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, tokens, D]`, `[B, H, tokens, E]`): their states.
            position (`int`): position of the first of them.
            padding (`torch.Tensor` of shape `[B]`, *optional*): padding tokens at the start of each item.

        Returns:
            `list[torch.Tensor]`: for the tokens that did not go behind those held, the slots that they took in order,
            `[B, H, tokens]` each. A slot may have been taken more than once, then the later token is in it.

        Raises:
            MemoryError: if the host has no memory for further pages; what is held stays as it is.
        """
        count = keys.shape[2]
        room = count if self.max_tokens is None else min(count, self.max_tokens - self.num_slots)
        self._grow(self.num_slots + room)
        self._write(self.num_slots, keys[:, :, :room], values[:, :, :room])
        if self.usage is not None:
            self.usage.add(self.num_slots, room, position)
        self.num_slots += room
        taken = []
        at_once = max((self.max_tokens or 0) // _REPLACED_AT_ONCE, 1)
        for start in range(room, count, at_once):
            assert self.usage is not None
            stop = min(start + at_once, count)
            slots = self.usage.replace(stop - start, position + start, padding)
            rows = torch.cat([keys[:, :, start:stop], values[:, :, start:stop]], dim=3).to("cpu")
            for number, places in self._by_page(slots):
                self.pages[number][places[0], places[1], slots[places] - number * PAGE_TOKENS] = rows[places]
            taken.append(slots)
        return taken

    def _grow(self, num_slots: int) -> None:
        missing = -(-max(num_slots - len(self.pages) * PAGE_TOKENS, 0) // PAGE_TOKENS)
        shape = (self.batch_size, self.num_heads, PAGE_TOKENS, self.row_dim)
        try:
            new = [torch.zeros(shape, dtype=self.dtype, pin_memory=self.pin_memory) for _ in range(missing)]
        except (RuntimeError, MemoryError) as error:
            raise MemoryError(
                f"the host has no memory for {num_slots} tokens of a layer; {self.num_slots} are held and usable. "
                f"With `pool_tokens` set to {max(self.num_slots, 1)} or less, new tokens replace old ones instead"
            ) from error
        self.pages.extend(new)

    def _write(self, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """States `[B, H, tokens, D]` into consecutive slots."""
        for page, start, stop in self._stretches(first, first + keys.shape[2]):
            tokens = slice(start - first, stop - first)
            slots = slice(start % PAGE_TOKENS, start % PAGE_TOKENS + stop - start)
            page[:, :, slots, : self.key_dim].copy_(keys[:, :, tokens], non_blocking=self.pin_memory)
            page[:, :, slots, self.key_dim :].copy_(values[:, :, tokens], non_blocking=self.pin_memory)

    def _stretches(self, first: int, stop: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Pages that slots from `first` to `stop` lie in, each with its own first and last slot of them."""
        for number in range(first // PAGE_TOKENS, -(-stop // PAGE_TOKENS)):
            offset = number * PAGE_TOKENS
            yield self.pages[number], max(first, offset), min(stop, offset + PAGE_TOKENS)

    def stretches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
        """Everything held, page by page: keys, values `[B, H, slots, D or E]`, first slot, slot behind the last."""
        for page, start, stop in self._stretches(0, self.num_slots):
            rows = page[:, :, : stop - start]
            yield rows[..., : self.key_dim], rows[..., self.key_dim :], start, stop

    def gather(self, slots: torch.Tensor, items: slice = slice(None)) -> torch.Tensor:
        """
        The rows of some slots.

        Args:
            slots (`torch.Tensor` of shape `[items, H, tokens]`, int64): on the host; none beyond those in use.
            items (`slice`, *optional*): items of the batch that they are slots of; all by default.

        Returns:
            `torch.Tensor` of shape `[items, H, tokens, D + E]` on the host.
        """
        if len(self.pages) == 1:
            return self.pages[0][items].gather(2, slots[..., None].expand(-1, -1, -1, self.row_dim))
        rows = torch.empty(*slots.shape, self.row_dim, dtype=self.dtype, pin_memory=self.pin_memory)
        for number, places in self._by_page(slots):
            rows[places] = self.pages[number][items][places[0], places[1], slots[places] - number * PAGE_TOKENS]
        return rows

    def _by_page(self, slots: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
        """For each page that slots `[B, H, tokens]` lie in: its number, and where in `slots` they stand."""
        numbers = slots // PAGE_TOKENS
        for number in range(len(self.pages)):
            places = (numbers == number).nonzero(as_tuple=True)
            if places[0].numel():
                yield number, places

    def positions(self, device: torch.device) -> torch.Tensor:
        """Positions of the tokens in all slots in use, -1 where there is none, broadcasting to `[B, H, slots]`."""
        if self.usage is None:
            return torch.arange(self.num_slots, device=device)[None, None]
        return self.usage.positions[:, :, : self.num_slots].to(device).long()

    def positions_of(self, slots: torch.Tensor, items: slice) -> torch.Tensor:
        """Positions of the tokens in slots `[items, H, tokens]` of some items."""
        if self.usage is None:
            return slots
        return self.usage.positions[items].to(slots.device).gather(2, slots).long()

    def truncate(self, length: int) -> None:
        """Forgets the tokens at position `length` and beyond; whole pages without any are given back."""
        if self.usage is not None:
            self.usage.truncate(length)
            if not self.usage.in_order:
                return
        self.num_slots = min(self.num_slots, length)
        del self.pages[-(-self.num_slots // PAGE_TOKENS) :]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it; the result stays in host memory."""
        self.pages = [self._in_host_memory(function(page)) for page in self.pages]
        if self.usage is not None:
            self.usage.map(function)
        if self.pages:
            self.batch_size = self.pages[0].shape[0]

    def _in_host_memory(self, page: torch.Tensor) -> torch.Tensor:
        return page.pin_memory() if self.pin_memory and not page.is_pinned() else page

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored."""
        for page, start, stop in self._stretches(0, len(self.pages) * PAGE_TOKENS):
            used = min(max(self.num_slots - start, 0), stop - start)
            yield "pool", page[:, :, :used]
            yield "spare", page[:, :, used:]
        if self.usage is not None:
            for tensor in self.usage.tensors():
                yield "index", tensor
