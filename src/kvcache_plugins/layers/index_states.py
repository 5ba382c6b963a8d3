"""Keys of an indexer, by which layers of sparse attention pick tokens, kept beside keys and values.

They are few numbers a token, and decide which tokens are attended to at all: they stay exact.
"""

from collections.abc import Callable, Iterator

import torch


class IndexStates:
    """
    Keys of an indexer `[batch_size, ..., tokens, index head dim]`, and positions of tokens
    `[batch_size, position dims, tokens]`, where the model asks for them to be kept. Both grow by what is appended.
    """

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.positions: torch.Tensor | None = None

    def append(self, keys: torch.Tensor) -> torch.Tensor:
        """All keys, the new ones among them."""
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], dim=-2)
        return self.keys

    def drop_last(self, count: int) -> None:
        if self.keys is not None:
            self.keys = self.keys[..., : max(self.keys.shape[-2] - count, 0), :]
        if self.positions is not None:
            self.positions = self.positions[..., : max(self.positions.shape[-1] - count, 0)]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.keys = None if self.keys is None else function(self.keys)
        self.positions = None if self.positions is None else function(self.positions)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (tensor for tensor in (self.keys, self.positions) if tensor is not None)
