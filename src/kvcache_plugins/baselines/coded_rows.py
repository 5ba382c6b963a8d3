"""Rows of bytes, one for every token of a head: how they are kept, and what makes them.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


# Share of the rows held that capacity grows by
_GROWTH = 64


class TokenCoder(Protocol):
    """
    Turns every head's token into bytes by itself. States are rotated before they are coded; attention may as well be
    computed over rotated states, with a rotated query.
    """

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """States `[..., D]` rotated, in float32."""

    def rotate_back(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""

    def encode(self, rotated: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, T, R]`, uint8, of rotated states; a `ValueError` if they are too large."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotated states `[B, H, T, D]`, float32."""


@dataclass(eq=False)
class CodedRows:
    """
    Rows of all tokens of a layer, in their order.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        length (`int`): tokens in use.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds rows of tokens that follow; capacity grows little, as what is reserved is held too."""
        total = self.length + keys.shape[2]
        if total > self.keys.shape[2]:
            capacity = max(total, self.length + self.length // _GROWTH)
            self.keys, self.values = (self._with_room(rows, capacity) for rows in (self.keys, self.values))
        self.keys[:, :, self.length : total] = keys
        self.values[:, :, self.length : total] = values
        self.length = total

    def drop_last(self, count: int) -> None:
        """Forgets the newest tokens; their room stays."""
        self.length -= count

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)

    def _with_room(self, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        resized = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
        resized[:, :, : self.length] = rows[:, :, : self.length]
        return resized


def bytes_of_halves(numbers: torch.Tensor) -> torch.Tensor:
    """
    `numbers` `[..., N]` in float16, as bytes `[..., 2 N]`.

    Raises:
        ValueError: if one of them is too large for that.
    """
    halves = numbers.half()
    if not halves.is_meta and not bool(halves.isfinite().all()):
        raise ValueError("keys or values are so large that their scale does not fit into float16 (65504)")
    return halves.contiguous().view(torch.uint8)


def halves_of_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `bytes_of_halves`, in float32."""
    return rows.contiguous().view(torch.float16).float()
