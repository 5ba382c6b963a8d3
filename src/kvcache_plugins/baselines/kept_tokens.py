"""Storage for tokens of which more and more are dropped, other ones in every head.

A token stands in a slot. A slot whose token is dropped is free, and the next token goes there: a decode step moves one
token's states instead of all. So slots are in no order, and every one says which position of the sequence it holds.
Where many tokens are dropped at once, as after a prompt, the others are moved together.

Legend: B batch, H key/value heads, S slots, D head dim.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F


FREE = -1
"""Position of a slot without a token."""


class KeptTokens:
    """
    Keeps `keys`, `values` `[B, H, S, D]`, `positions` `[B, H, S]` (`FREE` for none) and `weights` `[B, H, S]` so far.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor):
        self.keys, self.values, self.positions, self.weights = keys, values, positions.to(torch.int32), weights.float()
        # Slots with a token, at most, of any item and head
        self._num_used = keys.shape[2]

    @property
    def num_slots(self) -> int:
        """Slots of every item and head, the free ones included."""
        return self.positions.shape[2]

    def count(self) -> torch.Tensor:
        """Counts the tokens of every item and head, `[B, H]`."""
        return (self.positions != FREE).sum(dim=2)

    def is_within(self, budget: int) -> bool:
        """Tells whether no item and head has more tokens than `budget`."""
        return self._num_used <= budget

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Adds the tokens `[B, H, new tokens, D]` from position `start` on, without weights so far."""
        num_new = keys.shape[2]
        self._num_used += num_new
        if (missing := self._num_used - self.num_slots) > 0:
            self.map(lambda tensor: F.pad(tensor, (*[0, 0] * (tensor.dim() - 3), 0, missing), value=FREE))
        # Free slots are the ones of the lowest position; the minimum is found faster than the least of one
        if num_new == 1:
            slots = self.positions.argmin(dim=2, keepdim=True)  # [B, H, 1]
        else:
            slots = self.positions.topk(num_new, dim=2, largest=False, sorted=False).indices  # [B, H, new tokens]
        new = torch.arange(start, start + num_new, dtype=torch.int32, device=slots.device)
        self.positions.scatter_(2, slots, new.expand(slots.shape))
        self.weights.scatter_(2, slots, 0.0)
        for stored, states in ((self.keys, keys), (self.values, values)):
            stored.scatter_(2, slots[..., None].expand(states.shape), states)

    def keep(
        self,
        budget: int | torch.Tensor,
        recent_start: int | torch.Tensor,
        first_real: int | torch.Tensor,
        *,
        max_budget: int,
    ) -> None:
        """
        Drops all but the newest tokens, from position `recent_start` on, and those with the largest weights, to a
        `budget` an item, at most `max_budget`; before `first_real` none is kept. All are `[B, 1, 1]` or numbers.
        """
        wanted = self.positions >= first_real
        recent = self.positions >= recent_start
        scores = self.weights.masked_fill(recent, torch.inf).masked_fill(~wanted, -torch.inf)
        # Stable, so that equal weights are told apart in the same way whatever stands beside an item
        slots = scores.sort(dim=2, descending=True, stable=True).indices
        kept = (torch.arange(self.num_slots, device=slots.device) < budget) & wanted.gather(2, slots)
        # Moving tokens together pays where an eighth of the slots would be free
        if self.num_slots > max_budget + max_budget // 8 + 8:
            slots, kept = slots[:, :, :max_budget], kept[:, :, :max_budget]
            self.map(lambda tensor: tensor.gather(2, _as_index(slots, tensor)))
            self.positions.masked_fill_(~kept, FREE)
        else:
            self.positions.masked_fill_(~torch.zeros_like(wanted).scatter_(2, slots, kept), FREE)
        self._num_used = min(self._num_used, max_budget)

    def drop_from(self, position: int) -> None:
        """Drops the tokens from `position` on."""
        self.positions.masked_fill_(self.positions >= position, FREE)
        self._num_used = int(self.count().amax())

    def dense(self, side: str, length: int) -> torch.Tensor:
        """Returns `"keys"` or `"values"` `[B, H, length, D]` at their positions, zeros where there is none."""
        states: torch.Tensor = getattr(self, side)
        dense = states.new_zeros(*states.shape[:2], length + 1, states.shape[3])
        # What is free goes where it is cut off
        index = torch.where(self.positions == FREE, length, self.positions).long()
        return dense.scatter_(2, _as_index(index, states), states)[:, :, :length]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)
        self.positions, self.weights = function(self.positions), function(self.weights)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields part and tensor of everything stored, beginning with the keys."""
        yield from (("kept", states) for states in (self.keys, self.values))
        yield from (("index", numbers) for numbers in (self.positions, self.weights))


def _as_index(slots: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return slots if tensor.dim() == 3 else slots[..., None].expand(*slots.shape, tensor.shape[3])
