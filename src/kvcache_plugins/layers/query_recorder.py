"""Dense layers that record queries, for caches that are fitted to a prompt's queries and states."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.kernels.attention_call import AttentionCall

from .lazy_kv import make_lazy_kv


# Largest number of queries that a cache is fitted to
_NUM_QUERIES = 256


class DenseLayer(DynamicLayer):
    """
    A dense layer for any attention to all tokens, with an indexer that selects tokens or without.

    Attributes:
        indexer_keys (`torch.Tensor` of shape `[batch_size, tokens, index head dim]`, *optional*): keys of the indexer.
        indexer_position_ids (`torch.Tensor`, *optional*): positions of these keys, of models with 3D positions.
    """

    indexer_keys: torch.Tensor | None = None
    indexer_position_ids: torch.Tensor | None = None

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append keys of an indexer, before the keys and values of the same tokens, and return all."""
        held = self.indexer_keys
        self.indexer_keys = indexer_key_states if held is None else torch.cat([held, indexer_key_states], dim=-2)
        return self.indexer_keys


class QueryRecordingLayer(DenseLayer):
    """
    A dense layer that keeps the newest queries of the last attention over it.

    Attributes:
        queries (`torch.Tensor` of shape `[batch_size, num_heads, at most 256, head_dim]`, *optional*): `None` until
            attention over lazy states was computed.
        scale (`float`, *optional*): factor of their scores; `None` for the usual one, `head_dim**-0.5`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries: torch.Tensor | None = None
        self.scale: float | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See `DynamicLayer.lazy_initialization`; set the dtype that lazy states report."""
        super().lazy_initialization(key_states, value_states)
        self.dtype = key_states.dtype

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new states, and return all of them as lazy ones, so that attention calls this layer."""
        keys, values = states = super().update(key_states, value_states)
        own: Any = self
        return make_lazy_kv(own, keys.shape, values.shape, keys.shape[2], keys.dtype, keys.device, states)

    def on_exact_attention(self, call: AttentionCall) -> None:
        """Keep the newest queries, unless they attend to projections of what is stored."""
        if call.project is None:
            self.queries = call.query[:, :, -_NUM_QUERIES:].clone()
            self.scale = call.scale

    def note_dense_read(self, side: str) -> None:
        """Do nothing: the layer is dense."""

    def states_shape(self, side: str) -> torch.Size:
        """Return the shape of one side."""
        states = self.keys if side == "keys" else self.values
        assert states is not None
        return states.shape


def record_queries(cache: DynamicCache, *, of_windows: bool = False) -> None:
    """Replace layers of an empty cache that hold all tokens; on request windowed ones too, which then hold all."""
    kinds = (DynamicLayer, DynamicSlidingWindowLayer) if of_windows else (DynamicLayer,)
    for index, layer in enumerate(cache.layers):
        if type(layer) in kinds:
            cache.layers[index] = QueryRecordingLayer()
