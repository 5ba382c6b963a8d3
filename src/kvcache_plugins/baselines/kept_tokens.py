"""Storage for tokens of which more and more are dropped, other ones in every head.

A token stands in a slot. A slot whose token is dropped is free, and the next token goes there: a decode step moves one
token's states instead of all. So slots are in no order, and every one says which position of the sequence it holds.
Where many tokens are dropped at once, as after a prompt, the others are moved together.

Legend: B batch, H key/value heads, S slots, D head dim.
"""

from collections.abc import Callable, Iterator

import torch


FREE = -1
"""Position of a slot without a token."""

_NAMES = ("keys", "values", "positions", "weights")


def _slack(num_slots: int) -> int:
    """Room beyond the slots that are needed: a fraction of them, so that growth is amortised."""
    return num_slots // 8 + 8


class KeptTokens:
    """
    Tokens with the weights that they have gathered.

    Args:
        keys, values (`torch.Tensor` of shape `[B, H, S, D]`): states.
        positions (`torch.Tensor` of shape `[B, H, S]`): position of every token in the sequence, or `FREE`.
        weights (`torch.Tensor` of shape `[B, H, S]`): attention weights that every token has had.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor):
        self._tensors = {
            "keys": keys,
            "values": values,
            "positions": positions.to(torch.int32),
            "weights": weights.float(),
        }
        # Of the slots, those that are looked at; the others are room
        self.num_slots = keys.shape[2]
        # Slots with a token, at most, of any item and head
        self._num_used = keys.shape[2]

    @property
    def keys(self) -> torch.Tensor:
        return self._tensors["keys"][:, :, : self.num_slots]

    @property
    def values(self) -> torch.Tensor:
        return self._tensors["values"][:, :, : self.num_slots]

    @property
    def positions(self) -> torch.Tensor:
        return self._tensors["positions"][:, :, : self.num_slots]

    @property
    def weights(self) -> torch.Tensor:
        return self._tensors["weights"][:, :, : self.num_slots]

    def count(self) -> torch.Tensor:
        """Tokens of every item and head, `[B, H]`."""
        return (self.positions != FREE).sum(dim=2)

    def is_within(self, budget: int) -> bool:
        """Whether no item and head has more tokens than `budget`."""
        return self._num_used <= budget

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Adds the tokens `[B, H, new tokens, D]` from position `start` on, without weights so far."""
        num_new = keys.shape[2]
        self._make_room(self._num_used + num_new)
        # Free slots are the ones of the lowest position; the minimum is found faster than the least of one
        if num_new == 1:
            slots = self.positions.argmin(dim=2, keepdim=True)  # [B, H, 1]
        else:
            slots = self.positions.topk(num_new, dim=2, largest=False, sorted=False).indices  # [B, H, new tokens]
        new = torch.arange(start, start + num_new, dtype=torch.int32, device=slots.device)
        self.positions.scatter_(2, slots, new.expand(slots.shape))
        self.weights.scatter_(2, slots, 0.0)
        for name, states in (("keys", keys), ("values", values)):
            getattr(self, name).scatter_(2, slots[..., None].expand(states.shape), states)
        self._num_used += num_new

    def keep(
        self,
        budget: int | torch.Tensor,
        recent_start: int | torch.Tensor,
        first_real: int | torch.Tensor,
        *,
        max_budget: int,
    ) -> None:
        """
        Drops all but the newest tokens and the ones with the largest weights.

        Args:
            budget (`int` or `torch.Tensor` of shape `[B, 1, 1]`): how many tokens of an item are kept.
            recent_start (`int` or `torch.Tensor` of shape `[B, 1, 1]`): position from which on all are.
            first_real (`int` or `torch.Tensor` of shape `[B, 1, 1]`): position before which none is.
            max_budget (`int`): the largest budget of any item.
        """
        positions = self.positions
        wanted = positions >= first_real
        scores = self.weights.masked_fill(positions >= recent_start, torch.inf).masked_fill(~wanted, -torch.inf)
        # Stable, so that equal weights are told apart in the same way whatever stands beside an item
        slots = scores.sort(dim=2, descending=True, stable=True).indices
        rank = torch.arange(self.num_slots, device=slots.device)
        kept = (rank < budget) & wanted.gather(2, slots)
        if self.num_slots > max_budget + _slack(max_budget):
            self._move_together(slots[:, :, :max_budget], kept[:, :, :max_budget])
        else:
            positions.masked_fill_(~torch.zeros_like(wanted).scatter_(2, slots, kept), FREE)
        self._num_used = min(self._num_used, max_budget)

    def drop_from(self, position: int) -> None:
        """Drops the tokens from `position` on."""
        self.positions.masked_fill_(self.positions >= position, FREE)
        self._num_used = int(self.count().amax())

    def own(self) -> None:
        """Copies states that came from outside, which may be views of more than is needed."""
        self._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}

    def dense(self, side: str, length: int) -> torch.Tensor:
        """`"keys"` or `"values"` `[B, H, length, D]` at their positions, zeros where there is none."""
        states: torch.Tensor = getattr(self, side)
        dense = states.new_zeros(*states.shape[:2], length + 1, states.shape[3])
        # What is free goes where it is cut off
        index = torch.where(self.positions == FREE, length, self.positions).long()
        return dense.scatter_(2, index[..., None].expand(states.shape), states)[:, :, :length]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self._tensors = {name: function(tensor) for name, tensor in self._tensors.items()}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored, beginning with the keys."""
        for name in _NAMES:
            tensor = self._tensors[name]
            yield ("kept" if name in ("keys", "values") else "index"), tensor[:, :, : self.num_slots]
            yield "spare", tensor[:, :, self.num_slots :]

    def _make_room(self, num_slots: int) -> None:
        if num_slots <= self.num_slots:
            return
        if num_slots > self._tensors["keys"].shape[2]:
            for name, old in self._tensors.items():
                shape = (*old.shape[:2], num_slots + _slack(num_slots), *old.shape[3:])
                new = old.new_full(shape, FREE if name == "positions" else 0)
                new[:, :, : self.num_slots] = getattr(self, name)
                self._tensors[name] = new
        self.num_slots = num_slots

    def _move_together(self, slots: torch.Tensor, kept: torch.Tensor) -> None:
        """Leaves `slots` `[B, H, S]` alone, of which those that are not `kept` are free."""
        for name in ("keys", "values"):
            states: torch.Tensor = getattr(self, name)
            index = slots[..., None].expand(*slots.shape, states.shape[3])
            self._tensors[name] = states.gather(2, index)
        self._tensors["weights"] = self.weights.gather(2, slots)
        self._tensors["positions"] = self.positions.gather(2, slots).masked_fill_(~kept, FREE)
        self.num_slots = slots.shape[2]
