"""A buffer of the newest tokens, exact, in front of whatever a layer does with older ones."""

from collections.abc import Callable

import torch


_MIN_CAPACITY = 16


class ExactBuffer:
    """
    The newest tokens, exact: keys and values `[B, H, capacity, D]`, of which the first `length` are in use.

    Capacity doubles up to `limit`, the most that waits in ordinary decoding, and goes beyond only as far as a longer
    update needs.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        capacity = min(max(keys.shape[2], _MIN_CAPACITY), max(limit, keys.shape[2]))
        self.limit = limit
        self._keys = keys.new_zeros(*keys.shape[:2], capacity, keys.shape[3])
        self._values = values.new_zeros(*values.shape[:2], capacity, values.shape[3])
        self.length = 0

    @property
    def keys(self) -> torch.Tensor:
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self._values[:, :, : self.length]

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        total = self.length + keys.shape[2]
        if total > self._keys.shape[2]:
            self._resize(max(total, min(2 * self._keys.shape[2], self.limit)))
        self._keys[:, :, self.length : total] = keys
        self._values[:, :, self.length : total] = values
        self.length = total

    def drop_first(self, count: int) -> None:
        """Forgets the oldest `count` tokens; room beyond the limit that a long update made is given back."""
        keys, values = self.keys[:, :, count:].clone(), self.values[:, :, count:].clone()
        self.length = keys.shape[2]
        if self._keys.shape[2] > max(self.limit, self.length):
            self._resize(max(self.limit, self.length))
        self._keys[:, :, : self.length], self._values[:, :, : self.length] = keys, values

    def drop_last(self, count: int) -> None:
        self.length -= count

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keys, self._values = function(self._keys), function(self._values)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with all their room."""
        return self._keys, self._values

    def _resize(self, capacity: int) -> None:
        used = min(self.length, capacity)
        for name in ("_keys", "_values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, :used] = old[:, :, :used]
            setattr(self, name, new)
