"""The interface of whatever codes tokens one by one: a layer keeps rows of bytes, and a codec says what they mean.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
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
        """Lists the positions of `count` tokens, `[1 or B, T]`, int64."""
        positions = torch.arange(self.first, self.first + count, device=device)[None]
        return positions if self.padding is None else positions - self.padding.to(device)[:, None]

    def after(self, count: int) -> "Positions":
        """Returns the positions behind the first `count` tokens."""
        return Positions(self.first + count, self.padding)


START = Positions()


class Codec(ABC):
    """
    Codes every token of a head by itself, as a row of as many bytes.

    Attributes:
        has_kernels (`bool`): whether there are kernels for attention over its rows, beside plain PyTorch.
    """

    has_kernels = False

    @property
    @abstractmethod
    def row_sizes(self) -> tuple[int, int]:
        """Bytes of a key and of a value."""

    @abstractmethod
    def encode(
        self, keys: torch.Tensor, values: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes keys and values `[B, H, T, D]` of any floating dtype as rows `[B, H, T, R]`, uint8."""

    @abstractmethod
    def decode_keys(self, rows: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Decodes rows to keys `[B, H, T, D]`, float32."""

    @abstractmethod
    def decode_values(self, rows: torch.Tensor) -> torch.Tensor:
        """Decodes rows to values `[B, H, T, D]`, float32."""

    def too_large(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor | None:
        """Marks tokens `[B, T]` that rows `[B, H, T, R]` cannot hold, if there may be such."""
        return None

    def check_shapes(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raises a `ValueError` if states `[B, H, T, D]` are not of the model that it is for."""
        return None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Lists what a cache holds of it."""
        return iter(())

    def shared_tensors(self) -> Iterator[torch.Tensor]:
        """Lists what all caches of a model share, on every device."""
        return iter(())

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Codec":
        """Returns the codec with `function` applied to every tensor that has a row for each sequence of the batch."""
        return self

    @property
    def kernel_kind(self) -> Hashable:
        """Equal for codecs that run the same kernels over states of the same sizes."""
        return type(self)
