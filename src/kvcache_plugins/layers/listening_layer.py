"""A dense cache that sees the queries which attend to it, as caches need that are made of a prompt's queries too."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.kernels.attention_call import AttentionCall

from .lazy_states import stored_states


# As many of the newest as any cache looks at
_NUM_QUERIES = 256


class ListeningLayer(DynamicLayer):
    """
    A dense layer that keeps the newest queries of the last attention over it, if attention is `sdpa`'s; any other
    gets its states and says nothing of queries. They are `[batch_size, num_heads, at most 256, head_dim]`.
    """

    has_gradients = False

    def __init__(self) -> None:
        super().__init__()
        self.queries: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """As `DynamicLayer.lazy_initialization`, with the dtype that lazy states ask for."""
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes in new states and returns all, through which attention comes by."""
        keys, values = states = super().update(key_states, value_states)
        own: Any = self
        return stored_states(own, keys.shape, values.shape, keys.shape[2], keys.dtype, keys.device, states)

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Keep the newest queries, if they are of the heads that are stored."""
        if call.project is None:
            self.queries = call.query[:, :, -_NUM_QUERIES:].clone()

    def on_dense_read(self, side: str) -> None:
        """Do nothing: it is dense."""

    def states_shape(self, side: str) -> torch.Size:
        """Tell the shape of one side."""
        states = self.keys if side == "keys" else self.values
        assert states is not None
        return states.shape


def listen(cache: DynamicCache, *, of_windows: bool = False) -> None:
    """Has layers of an empty cache that hold all tokens listen, and those of a window too, which then hold all."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer) if of_windows else (DynamicLayer,)
    for index, layer in enumerate(cache.layers):
        if type(layer) in kinds:
            cache.layers[index] = ListeningLayer()
