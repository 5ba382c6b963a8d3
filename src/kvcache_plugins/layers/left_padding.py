"""Left padding of a layer's sequences."""

import torch


class LeftPadding:
    """
    Number of padding tokens at the start of each sequence. A layer shares one object with everything it holds, so that
    a later change reaches all.

    Args:
        given_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): the prompt's padding mask, for
            attention implementations that do not show it to the cache.

    Attributes:
        counts (`torch.Tensor` of shape `[batch_size]`, *optional*): the numbers; `None` until a mask has shown them.
        is_shown (`bool`): True if attention has shown if there is padding.
    """

    def __init__(self, given_mask: torch.Tensor | None = None) -> None:
        self._given_mask = given_mask
        self.clear()

    def clear(self) -> None:
        """Forget everything but the given mask."""
        self.is_shown = False
        self.set(None)

    def set(self, counts: torch.Tensor | None) -> None:
        """Replace the counts; `None` if they are unknown."""
        self.counts = counts
        self._ends: tuple[int, int] | None = None
        self._total = 0

    def given_counts(self, device: torch.device) -> torch.Tensor | None:
        """Return the counts of the given mask, if there is one and neither attention nor a caller has shown them."""
        if self._given_mask is None or self.is_shown or self.counts is not None:
            return None
        return (self._given_mask.to(device).cumsum(dim=1) == 0).sum(dim=1)

    def ends(self) -> tuple[int, int]:
        """Smallest and largest count. The first call after a change waits for the device."""
        if self._ends is None:
            counts = self.counts
            self._ends = (0, 0) if counts is None else (int(counts.min()), int(counts.max()))
            self._total = 0 if counts is None else int(counts.sum())
        return self._ends

    def total(self) -> int:
        """Sum of all counts; see `ends`."""
        self.ends()
        return self._total

    def first_tokens(self, batch_size: int, device: torch.device) -> torch.Tensor:
        """Position of every sequence's first real token, `[batch_size, 1]`."""
        if self.counts is None:
            return torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        return self.counts.to(device)[:, None]

    def valid_tokens(self, start: int, count: int, device: torch.device) -> torch.Tensor | None:
        """Mark tokens that are no padding, `[batch_size, count]` from position `start` on; `None` if all are none."""
        if self.counts is None or self.ends()[1] <= start:
            return None
        tokens = torch.arange(start, start + count, dtype=torch.int64, device=device)
        return tokens >= self.first_tokens(1, device)
