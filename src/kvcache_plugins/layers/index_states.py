"""What layers of indexed sparse attention keep beside keys and values: the keys that an indexer picks tokens by.

They are few numbers a token, and decide which tokens are attended to at all: they stay exact.
"""

from abc import ABC
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


class IndexedLayerMixin(ABC):
    """Mixed into a cache layer: what indexed sparse attention asks of it."""

    # `ABC`, as of all layers: so a layer may be given the class of one that keeps recurrent states too

    _index: IndexStates

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """
        Takes in the keys of an indexer, which come before the keys and values of the same tokens, and returns all.

        Args:
            indexer_key_states (`torch.Tensor` of shape `[batch_size, ..., new tokens, index head dim]`): new keys.
        """
        return self._index.append(indexer_key_states)

    # The name that one family has for it
    update_index = update_indexer

    @property
    def has_index(self) -> bool:
        """Whether it holds keys of an indexer."""
        return self._index.keys is not None

    @property
    def indexer_position_ids(self) -> torch.Tensor | None:
        """Positions `[position dims, batch_size, tokens]`, which some models keep with the keys of an indexer."""
        positions = self._index.positions
        return None if positions is None else positions.movedim(0, 1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: torch.Tensor | None) -> None:
        self._index.positions = None if position_ids is None else position_ids.movedim(1, 0)
