"""Rows of bytes of consecutive tokens, one row for every head of a token, with room to grow.

Legend: B batch, H heads, R bytes of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


# Share of the rows held that capacity grows by: little, as spare room is held too and moving is cheap
_GROWTH = 64


@dataclass(eq=False)
class TokenRows:
    """
    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        length (`int`): tokens in use.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int

    def append(self, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
        """Adds rows of tokens that follow; capacity does not grow beyond `most` tokens before it is needed."""
        total = self.length + keys.shape[2]
        if total > self.keys.shape[2]:
            capacity = self.length + self.length // _GROWTH
            self.resize(max(total, capacity if most is None else min(capacity, most)))
        self.keys[:, :, self.length : total] = keys
        self.values[:, :, self.length : total] = values
        self.length = total

    def resize(self, capacity: int) -> None:
        """Gives the tokens in use, or the first of them, room of their own, for `capacity` tokens."""
        self.length = min(self.length, capacity)
        self.keys, self.values = (self._resized(rows, capacity) for rows in (self.keys, self.values))

    def reserve(self, num_tokens: int) -> None:
        """Moves to storage for `num_tokens` in all, and no less than are in use."""
        self.resize(max(num_tokens, self.length))

    def capacity(self) -> int:
        """Counts the tokens in all that fit into the storage."""
        return self.keys.shape[2]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)

    def _resized(self, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        resized = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
        resized[:, :, : self.length] = rows[:, :, : self.length]
        return resized
