"""A buffer of the newest tokens, exact, in front of whatever a layer does with older ones."""

from collections.abc import Callable

import torch


# Tokens that there is room for beyond those held, at most, and that room grows by
_STEP = 8


class ResidualBuffer:
    """
    The newest tokens, exact: keys and values `[B, H, capacity, D]`, of which the first `length` are in use.

    Capacity grows in small steps, as what is reserved is held too: moving a few tokens costs less than the room would.
    It ends at `limit`, the most that waits in ordinary decoding; a longer update goes beyond only as far as it needs.

    A token may be left where the model made it, for attention to put it in its place: four small operations of PyTorch
    take longer than all else that an update does.

    Attributes:
        storage (two `torch.Tensor` of shape `[B, H, capacity, D]`): keys and values, in which the token that is `left`
            is still to be written.
        capacity (`int`): tokens that there is room for.
        length (`int`): tokens in use, with the one that is `left`.
        left (two `torch.Tensor` of shape `[B, H, 1, D]`, *optional*): key and value of the newest token, if attention
            is to write them; it then says so by `left = None`. Whoever else asks for tokens has them written.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        self.limit, self.length = limit, keys.shape[2]
        self._store(keys, values, min(max(self.length, _STEP), max(limit, self.length)))
        self.left: tuple[torch.Tensor, torch.Tensor] | None = None

    def _store(self, keys: torch.Tensor, values: torch.Tensor, capacity: int | None = None) -> None:
        """Takes keys and values with all their capacity, or copies of them with room for `capacity` tokens."""
        if capacity is not None:
            keys, values = _with_room(keys, capacity), _with_room(values, capacity)
        self.storage, self.capacity = (keys, values), keys.shape[2]

    @property
    def keys(self) -> torch.Tensor:
        return self.tensors()[0][:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self.tensors()[1][:, :, : self.length]

    def append_exactly(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens, with no capacity beyond them, and returns all."""
        self._store(torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2))
        self.length += keys.shape[2]
        return self.storage

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens."""
        self._write_left()
        total = self.length + keys.shape[2]
        if total > self.capacity:
            self._store(self.keys, self.values, max(total, min(-(-total // _STEP) * _STEP, self.limit)))
        for stored, states in zip(self.storage, (keys, values), strict=True):
            stored.narrow(2, self.length, keys.shape[2]).copy_(states)
        self.length = total

    def _write_left(self) -> None:
        if self.left is not None:
            left, self.left = self.left, None
            for stored, states in zip(self.storage, left, strict=True):
                stored[:, :, self.length - 1 : self.length] = states

    def capacity_without(self, count: int) -> int:
        """Tokens that there is room for when the oldest `count` are forgotten."""
        length = self.length - count
        return min(-(-max(length, 1) // _STEP) * _STEP, max(self.limit, length))

    def drop_first(self, count: int) -> None:
        """Forgets the oldest `count` tokens, and gives their capacity back."""
        keys, values, capacity = self.keys[:, :, count:], self.values[:, :, count:], self.capacity_without(count)
        self.length -= count
        self._store(keys, values, capacity)

    def drop_last(self, count: int) -> None:
        self._write_left()
        self.length -= count

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._write_left()
        self._store(*map(function, self.storage))

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with all their capacity."""
        self._write_left()
        return self.storage

    def put_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Has the tokens in use stand in other storage, which may be where they stand."""
        for stored, states in zip((keys, values), (self.keys, self.values), strict=True):
            stored[:, :, : self.length].copy_(states)
        self._store(keys, values)


def _with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of `[B, H, tokens, D]` with room for `capacity` tokens."""
    resized = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    resized[:, :, : states.shape[2]] = states
    return resized
