"""What lazy states ask of the layer that they belong to."""

from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

import torch

from .lazy_views import View


class StatesSource(Protocol):
    """See `LazyLayer`, which says what each is."""

    has_gradients: bool
    attends_by_heads: bool

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        """Attention of `query` over everything the layer holds."""

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        """Attention as of the token before."""

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

    def attend_views(
        self,
        query: torch.Tensor,
        keys: View,
        values: View,
        attn_mask: torch.Tensor | None,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor | None:
        """Attention over views of what is stored."""

    def on_viewed_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """Called after attention over views of the states."""

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        """The shape that the dense states of one side have."""

    def head_scores(self, query: torch.Tensor) -> torch.Tensor | None:
        """Products of queries with all keys, by heads."""

    def head_sums(self, weights: torch.Tensor) -> torch.Tensor | None:
        """Sums of all values, by heads."""

    def on_exact_scores(self, query: torch.Tensor, scores: torch.Tensor) -> None:
        """Called after attention that is written out has multiplied queries with exact keys."""

    def on_weighted_sum(self, weights: torch.Tensor, by_heads: torch.Tensor | None) -> None:
        """Called after attention that is written out has summed up the values."""

    def on_dense_read(self, side: str) -> None:
        """Called when something other than attention has made one side dense."""
