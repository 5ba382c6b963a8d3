"""A dense cache that sees the queries which attend to it, as caches need that are made of a prompt's queries too."""

from collections.abc import Collection, Iterator, Mapping

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from .lazy_states import LazyStates
from .lazy_views import View


# As many of the newest as any cache looks at
_NUM_QUERIES = 256


class ListeningLayer(DynamicLayer):
    """
    A dense layer that keeps the newest queries of the last attention over it, if attention is `sdpa`'s; any other
    gets its states and says nothing of queries.

    Attributes:
        queries (`torch.Tensor` of shape `[batch_size, num_heads, at most 256, head_dim]`, *optional*): those.
    """

    has_gradients = False
    attends_by_heads = False

    def __init__(self) -> None:
        super().__init__()
        self.queries: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in new states and returns all, through which attention comes by."""
        states = super().update(key_states, value_states)
        keys, values = (
            LazyStates(self, side, tuple(dense.shape), dense.dtype, dense.device, exact=dense)
            for side, dense in zip(("keys", "values"), states, strict=True)
        )
        return keys, values

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        self.queries = query[:, :, -_NUM_QUERIES:].clone()

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
        raise AssertionError("its states are exact")

    def on_viewed_attention(
        self,
        query: torch.Tensor,
        keys: torch.Tensor | None,
        attn_mask: torch.Tensor | None,
        *,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """Says nothing of queries."""

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        batch_size, num_heads, num_tokens, head_dim = self.materialize(side).shape
        return batch_size, num_heads, num_tokens, head_dim

    def head_scores(self, query: torch.Tensor) -> torch.Tensor | None:
        raise AssertionError("its states are exact")

    def head_sums(self, weights: torch.Tensor) -> torch.Tensor | None:
        raise AssertionError("its states are exact")

    def on_exact_scores(self, query: torch.Tensor, scores: torch.Tensor) -> None:
        """Says nothing of queries."""

    def on_weighted_sum(self, weights: torch.Tensor, by_heads: torch.Tensor | None) -> None:
        """Says nothing of queries."""

    def on_dense_read(self, side: str) -> None:
        """Nothing to be done: it is dense."""

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, Mapping[str, torch.Tensor]]]:
        yield slice(0, self.get_seq_length()), {side: self.materialize(side) for side in sides}

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        raise AssertionError("its states are exact")

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        raise AssertionError("its states are exact")

    def materialize(self, side: str) -> torch.Tensor:
        states = self.keys if side == "keys" else self.values
        assert states is not None
        return states

    def lazy_length(self) -> int:
        return self.get_seq_length()


def listen(cache: DynamicCache, *, of_windows: bool = False) -> None:
    """
    Has the layers of an empty cache that hold all tokens listen; others stay what they are.

    Args:
        cache (`DynamicCache`): the cache.
        of_windows (`bool`, *optional*, defaults to `False`): whether layers of a window listen too, and hold all
            tokens.
    """
    kinds = (DynamicLayer, DynamicSlidingWindowLayer) if of_windows else (DynamicLayer,)
    for index, layer in enumerate(cache.layers):
        if type(layer) in kinds:
            cache.layers[index] = ListeningLayer()
