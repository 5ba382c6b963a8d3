"""What a layer that stores blocks asks of them, and of its options."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch


class BufferConfig(Protocol):
    """What is asked of the options of a layer."""

    @property
    def residual_length(self) -> int:
        """Decoded tokens that wait in exact form."""


class StoredBlock(Protocol):
    """Consecutive tokens, compressed."""

    start: int
    length: int

    @property
    def keys(self) -> object:
        """What is stored of one side: another object where it stands elsewhere."""

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens, as many as can be dropped."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""

    def give_room(self, num_tokens: int) -> None:
        """Moves to storage with room for so many tokens in all, and no less than are in use."""

    def room(self) -> int:
        """For how many tokens in all there is room."""


BlockT = TypeVar("BlockT", bound=StoredBlock)
