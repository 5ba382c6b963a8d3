"""What stays on the accelerator of the keys in the pool, so that their scores can be told without fetching them.

Two ways, told apart by measured fidelity against bytes, not by what the paper chose: `scoring_codes` has all columns
in a few bits, `scoring_columns` the paper's partial key cache.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch


class ScoringStates:
    """Base of both: rows `[B, H, capacity, ...]` that grow, and are written anew where tokens are replaced."""

    # By which factor, and how many rows beside, room grows that is used up
    growth: ClassVar[tuple[float, int]] = (1.25, 64)

    def __init__(self) -> None:
        self.length = 0
        self._rows: dict[str, torch.Tensor] = {}

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of keys `[B, H, tokens, D]`."""
        raise NotImplementedError

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """
        Products of queries and keys but for what is the same for all keys.

        Args:
            query (`torch.Tensor` of shape `[B, H, G, D]`): queries, float32.

        Returns:
            `torch.Tensor` of shape `[B, H, G, N]`, float32.
        """
        raise NotImplementedError

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        """What was told from the first tokens, `[B, H, ...]`."""
        raise NotImplementedError

    def append(self, keys: torch.Tensor) -> None:
        """Adds the rows of keys `[B, H, tokens, D]` that follow."""
        self.length = self._append_rows(self.encode(keys), self.length)

    def _append_rows(self, encoded: dict[str, torch.Tensor], used: int) -> int:
        """Writes rows `[B, H, new, ...]` behind the first `used`, with more room if need be; how many are there."""
        total = used + next(iter(encoded.values())).shape[2]
        for name, new in encoded.items():
            rows = self._rows.get(name)
            if rows is None or rows.shape[2] < total:
                factor, least = self.growth
                capacity = total if rows is None else max(total, int(factor * rows.shape[2]) + least)
                grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
                if rows is not None:
                    grown[:, :, :used] = rows[:, :, :used]
                rows = self._rows[name] = grown
            rows[:, :, used:total] = new
        return total

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes the rows of keys `[B, H, tokens, D]` into slots `[B, H, tokens]`."""
        for name, new in self.encode(keys).items():
            rows = self._rows[name]
            index = slots.to(rows.device).reshape(*slots.shape, *[1] * (rows.dim() - 3)).expand_as(new)
            rows.scatter_(2, index, new)

    def rewrite(self, keys: torch.Tensor) -> None:
        """Writes the rows of all keys `[B, H, N, D]` anew."""
        for name, new in self.encode(keys).items():
            self._rows[name][:, :, : self.length] = new

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on."""
        self.length = min(self.length, length)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self._rows = {name: function(rows) for name, rows in self._rows.items()}
        for name, tensor in self.fitted_tensors().items():
            setattr(self, name, function(tensor))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored."""
        for rows in self._rows.values():
            yield "scoring", rows[:, :, : self.length]
            yield "spare", rows[:, :, self.length :]
        for tensor in self.fitted_tensors().values():
            yield "scoring", tensor
