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
    take longer than all else that an update does. See `leave`.

    While nothing is compressed, attention is over all tokens as they are. They then lie in the same tensors, those
    that are not the buffer's in front, and grow as a dense cache does: see `append_to_all`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        capacity = min(max(keys.shape[2], _STEP), max(limit, keys.shape[2]))
        self.limit = limit
        self._keys = keys.new_zeros(*keys.shape[:2], capacity, keys.shape[3])
        self._values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
        self.length = 0
        # Tokens in front that are not the buffer's
        self.num_in_front = 0
        # The newest token, if it is still to be written
        self.left: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def keys(self) -> torch.Tensor:
        self._write_left()
        return self._keys[:, :, self.num_in_front : self.num_in_front + self.length]

    @property
    def values(self) -> torch.Tensor:
        self._write_left()
        return self._values[:, :, self.num_in_front : self.num_in_front + self.length]

    def put_in_front(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes tokens `[B, H, tokens, D]` into the same tensors, in front of its own."""
        self.separate()
        pairs = ((keys, self.keys), (values, self.values))
        self._keys, self._values = (torch.cat([front.to(own.dtype), own], dim=2) for front, own in pairs)
        self.num_in_front = keys.shape[2]

    def in_front(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Those tokens, as views."""
        count = self.num_in_front
        return self._keys.narrow(2, 0, count), self._values.narrow(2, 0, count)

    def separate(self) -> None:
        """Gives the tokens in front back to whoever has put them there."""
        if self.num_in_front:
            self._keys, self._values = self.keys.clone(), self.values.clone()
            self.num_in_front = 0

    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens in use, with those in front."""
        self._write_left()
        held = self.num_in_front + self.length
        if held == self._keys.shape[2]:
            return self._keys, self._values
        return self._keys[:, :, :held], self._values[:, :, :held]

    def append_to_all(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds tokens, with no room beyond them, and returns all, with those in front."""
        held_keys, held_values = self.everything()
        self._keys = torch.cat((held_keys, keys), dim=2)
        self._values = torch.cat((held_values, values), dim=2)
        self.length += keys.shape[2]
        return self._keys, self._values

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens; there may be none in front."""
        self._write_left()
        total = self.length + keys.shape[2]
        if total > self._keys.shape[2]:
            self._resize(max(total, min(-(-total // _STEP) * _STEP, self.limit)))
        self._keys.narrow(2, self.length, keys.shape[2]).copy_(keys)
        self._values.narrow(2, self.length, keys.shape[2]).copy_(values)
        self.length = total

    def leave(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """
        Adds a token `[B, H, 1, D]` without writing it, if there is room: as `left` it is there for attention that
        writes it into `room()` itself, and then says so by `left = None`. Whoever else asks for tokens has it written.

        Returns:
            Whether it was added.
        """
        held = self._keys
        # They are read by address, by the dtypes and shapes of what is held
        is_like = keys.dtype is held.dtype and values.dtype is self._values.dtype
        is_like = is_like and keys.is_contiguous() and values.is_contiguous()
        if self.left is not None or self.length >= held.shape[2] or not is_like:
            return False
        self.left, self.length = (keys, values), self.length + 1
        return True

    def room(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with all their room, in which the newest token may be still to be written."""
        return self._keys, self._values

    def _write_left(self) -> None:
        if self.left is not None:
            (keys, values), self.left = self.left, None
            self._keys[:, :, self.length - 1 : self.length] = keys
            self._values[:, :, self.length - 1 : self.length] = values

    def drop_first(self, count: int) -> None:
        """Forgets the oldest `count` tokens, and gives their room back."""
        keys, values = self.keys[:, :, count:], self.values[:, :, count:]
        self.length, self.num_in_front = keys.shape[2], 0
        capacity = min(-(-max(self.length, 1) // _STEP) * _STEP, max(self.limit, self.length))
        self._keys, self._values = (_with_room(states, capacity) for states in (keys, values))

    def released(self) -> "ResidualBuffer | None":
        """What is left of it when all of its tokens are stored elsewhere: nothing, as the next ones make another."""
        return None

    def drop_last(self, count: int) -> None:
        self._write_left()
        self.length -= count

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._write_left()
        self.separate()
        self._keys, self._values = function(self._keys), function(self._values)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with all their room."""
        self._write_left()
        if self.num_in_front:
            return self._keys[:, :, self.num_in_front :], self._values[:, :, self.num_in_front :]
        return self._keys, self._values

    def _resize(self, capacity: int) -> None:
        self._keys, self._values = (_with_room(states, capacity) for states in (self.keys, self.values))


def _with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of `[B, H, tokens, D]` with room for `capacity` tokens."""
    resized = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    resized[:, :, : states.shape[2]] = states
    return resized
