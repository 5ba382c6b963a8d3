"""Padding at the start of every item of a batch, as far as a mask has shown it."""

import torch


class LeftPadding:
    """
    How many tokens at the start of each item of a sequence are padding. A layer has one and shares it with what it
    holds: what becomes known later, or changes with the batch, is known to all.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is known."""
        self.counts = None

    @property
    def counts(self) -> torch.Tensor | None:
        """Counts padding at the start of every sequence, `[batch_size]`; `None` if none is known of."""
        return self._counts

    @counts.setter
    def counts(self, counts: torch.Tensor | None) -> None:
        self._counts: torch.Tensor | None = counts
        self._longest: int | None = None
        self._shortest: int | None = None

    def shortest(self) -> int:
        """Padding of the item that has least. The host waits for a device only the first time it asks."""
        if self._shortest is None:
            self._shortest = 0 if self.counts is None else int(self.counts.min())
        return self._shortest

    def longest(self) -> int:
        """Padding of the item that has most. The host waits for a device only the first time it asks."""
        if self._longest is None:
            self._longest = 0 if self.counts is None else int(self.counts.max())
        return self._longest

    def first_tokens(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Position of every item's first real token, `[batch_size, 1]`."""
        if self.counts is None:
            return torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        return self.counts.to(device)[:, None]

    def valid_tokens(self, start: int, count: int, device: torch.device) -> torch.Tensor | None:
        """Which of `count` tokens from position `start` on are not padding, `[batch_size, count]`; `None` if all."""
        if self.counts is None or self.longest() <= start:
            return None
        return torch.arange(start, start + count, device=device) >= self.first_tokens(1, device)
