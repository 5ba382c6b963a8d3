"""Positions of consecutive tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Positions:
    """
    The positions that consecutive tokens are assumed to have: their indices, counted from behind the padding.

    Attributes:
        first (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every sequence that have no
            position.
    """

    first: int = 0
    padding: torch.Tensor | None = None

    def of(self, count: int, device: torch.device) -> torch.Tensor:
        """List the positions of `count` tokens, `[1 or B, T]`, int64."""
        positions = torch.arange(self.first, self.first + count, dtype=torch.int64, device=device)[None]
        return positions if self.padding is None else positions - self.padding.to(device)[:, None]

    def after(self, count: int) -> "Positions":
        """Return the positions behind the first `count` tokens."""
        return Positions(self.first + count, self.padding)


START = Positions()
