"""Which token of a full pool gives way to a new one, for every head of every item on its own.

`counter` and `lru` are the policies of InfiniGen's paper. In its released code neither forgets whom it has evicted
already, so that the same token is chosen again and again; here a victim's slot is overwritten and starts anew.
"""

from collections.abc import Callable

import torch


EVICTIONS = ("counter", "lru", "fifo")
_MAX_COUNT = 255
# Ranks of what goes before any token: padding, and slots whose token was rolled back
_FREE_RANK, _PADDING_RANK = -2, -1


class UsageRecord:
    """
    Positions of the tokens in a pool's slots `[B, H, slots]`, -1 where there is none, and what is known of their use.

    The policy is `"counter"` (out goes the token that was fetched least often; all counts of a head are halved when
    one saturates), `"lru"` (the one whose last fetch is longest ago) or `"fifo"` (the oldest). Ties go to the oldest.
    The first `num_protected` tokens of every item, attention sinks, stay.
    """

    def __init__(self, policy: str, num_protected: int, batch_size: int, num_heads: int, num_slots: int):
        self.policy, self.num_protected = policy, num_protected
        self.positions = torch.full((batch_size, num_heads, num_slots), -1, dtype=torch.int32)
        # Fetches, or the step of the last one
        dtype = torch.uint8 if policy == "counter" else torch.int32
        self.usage = None if policy == "fifo" else torch.zeros(batch_size, num_heads, num_slots, dtype=dtype)
        self.num_steps = 0
        self.num_evicted = 0
        # Whether slots still stand in the order of positions
        self.in_order = True

    def add(self, first_slot: int, count: int, position: int) -> None:
        """Notes tokens from `position` on that went into free slots at the end."""
        slots = slice(first_slot, first_slot + count)
        self.positions[:, :, slots] = torch.arange(position, position + count, dtype=torch.int32)
        if self.usage is not None:
            self.usage[:, :, slots] = self._usage_of_new_tokens(first_slot)

    def replace(self, count: int, position: int, padding: torch.Tensor | None) -> torch.Tensor:
        """
        Chooses victims for `count` tokens from `position` on and notes the new tokens in their slots; returns these,
        distinct, `[B, H, count]`, those of the oldest victims first.
        """
        num_slots = self.positions.shape[2]
        first = 0 if padding is None else padding.to("cpu")[:, None, None]
        rank = torch.zeros_like(self.positions, dtype=torch.int64) if self.usage is None else self.usage.long()
        # Padding goes first, sinks go last
        rank = rank.masked_fill(self.positions < first, _PADDING_RANK).masked_fill(self.positions < 0, _FREE_RANK)
        is_sink = (self.positions >= first) & (self.positions < first + self.num_protected)
        rank = rank.masked_fill(is_sink, torch.iinfo(torch.int32).max)
        victims = (rank * 2**31 + self.positions).topk(count, dim=2, largest=False).indices
        self.num_evicted += int((rank.gather(2, victims) > _PADDING_RANK).sum())
        self.in_order = False
        new = torch.arange(position, position + count, dtype=torch.int32)
        if self.usage is not None:
            usage = self._usage_of_new_tokens(num_slots)
            self.usage.scatter_(2, victims, usage.expand(*victims.shape))
        self.positions.scatter_(2, victims, new.expand(*victims.shape))
        return victims

    def _usage_of_new_tokens(self, num_slots: int) -> torch.Tensor:
        """
        What a token starts with, `[B, H, 1]`: the average of its head, or now. A token that started with nothing would
        be the next victim, before any attention could have asked for it.
        """
        assert self.usage is not None
        if self.policy == "lru":
            return torch.full((*self.usage.shape[:2], 1), self.num_steps, dtype=torch.int32)
        if num_slots == 0:
            return torch.zeros(*self.usage.shape[:2], 1, dtype=torch.uint8)
        return self.usage[:, :, :num_slots].float().mean(dim=2, keepdim=True).round().to(torch.uint8)

    def touch(self, slots: torch.Tensor, valid: torch.Tensor) -> None:
        """Notes that tokens in those slots `[B, H, tokens]` that are valid were fetched; valid slots are distinct."""
        self.num_steps += 1
        if self.usage is None:
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
        self.positions = function(self.positions)
        if self.usage is not None:
            self.usage = function(self.usage)

    def tensors(self) -> list[torch.Tensor]:
        """Lists all tensors."""
        return [self.positions] if self.usage is None else [self.positions, self.usage]
