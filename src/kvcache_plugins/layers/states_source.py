"""What lazy states ask of the layer that they belong to."""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch


class StatesSource(Protocol):
    """See `LazyLayer`, which says what each is."""

    has_gradients: bool

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        """Attention of `query` over everything the layer holds."""

    def materialize(self, side: str) -> torch.Tensor:
        """All `"keys"` or `"values"`, dense."""

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, Mapping[str, torch.Tensor]]]:
        """Both or one of them, dense, some tokens at a time."""

    def lazy_length(self) -> int:
        """Tokens that the newest lazy states report."""

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        """Called after attention over exact states."""

    def on_viewed_attention(self, attn_mask: torch.Tensor | None, *, is_causal: bool) -> None:
        """Called after attention over views of the states."""

    def on_weighted_sum(self, weights: torch.Tensor) -> None:
        """Called after attention that is written out has summed up the values."""

    def on_dense_read(self, side: str) -> None:
        """Called when something other than attention has made one side dense."""
