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
        # Told by weights: until a decode step has shown that the model hides from it what its prompt hid
        self.is_doubted = False

    @property
    def counts(self) -> torch.Tensor | None:
        """Those numbers, `[batch_size]`; `None` if no padding is known of."""
        return self._counts

    @counts.setter
    def counts(self, counts: torch.Tensor | None) -> None:
        self._counts: torch.Tensor | None = counts
        self._longest: int | None = None

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

    def learn(self, weights: torch.Tensor, batch_size: int, length: int) -> bool:
        """
        Tells the padding of a prompt by its attention's weights: all is hidden from rows of padding alike, so they
        attend to nothing, or to everything in equal shares, what comes after them included.

        Args:
            weights (`torch.Tensor` of shape `[..., queries, tokens]`): the weights, items first.
            batch_size, length (`int`): items and tokens of the prompt.

        Returns:
            `bool`: whether they are those of a whole prompt; nothing is told from others.
        """
        is_square = weights.dim() >= 3 and weights.shape[-2:] == (length, length)
        if length < 2 or not is_square or weights.numel() % (batch_size * length * length):
            return False
        weights = weights.detach().reshape(batch_size, -1, length, length)
        own, other = weights.diagonal(dim1=-2, dim2=-1), weights[..., -1].clone()  # [B, H, T]
        # After the last row's token there is none; before it there is padding, if any at all
        other[..., -1] = weights[..., -1, 0]
        is_real = ~((own == other) | own.isnan()).all(dim=1)
        padding = (is_real.cumsum(dim=1) == 0).sum(dim=1)
        if bool(padding.any()):
            self.counts, self.is_doubted = padding, True
        return True

    def let_through(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[B, H, G, Q, T]`, finite for padding as long as it has to show whether the model hides it itself."""
        real = self.valid_tokens(0, scores.shape[4], scores.device) if self.is_doubted else None
        return scores if real is None else scores.masked_fill(~real[:, None, None, None], 0)

    def check_hidden(self, weights: torch.Tensor, batch_size: int, start: int, layer_idx: int) -> None:
        """
        Args:
            weights (`torch.Tensor` of shape `[..., queries, tokens]`): of a new token, for items and tokens from
                position `start` on.

        Raises:
            ValueError: if they are of what was padding in the prompt, and is not stored.
        """
        self.is_doubted = False
        real = self.valid_tokens(start, weights.shape[-1], weights.device)
        if real is None or weights.numel() % (batch_size * weights.shape[-1]):
            return
        weights = weights.detach().reshape(batch_size, -1, weights.shape[-1])
        if bool((weights.masked_fill(real[:, None], 0) != 0).any()):
            raise ValueError(
                f"layer {layer_idx} of the model attends to padding when it decodes, which it hid from its prompt and "
                "which is not stored: give it prompts of one length"
            )
