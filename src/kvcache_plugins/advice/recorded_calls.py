"""What the layers of a model hand to a cache for one token, to be handed to another cache for as many as asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument

from .models_without_weights import NO_DATA_ERRORS


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """
    What a layer handed to the cache.

    Attributes:
        method (`str`): of the cache.
        tensors (`tuple[torch.Tensor, ...]`): its first arguments, the batch being their first dimension.
        token_dim (`int`, *optional*): the dimension of their tokens; `None` of states that tokens are summed up in.
        options (`dict`): its keywords.
    """

    method: str
    tensors: tuple[torch.Tensor, ...]
    token_dim: int | None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> tuple[object, ...]:
        return self.method, tuple((tuple(each.shape), each.dtype) for each in self.tensors), str(self.options)

    def repeat(self, cache: Cache, layer_idx: int, batch_size: int, num_tokens: int) -> None:
        """The same for a batch of so many tokens."""
        given = []
        for tensor in self.tensors:
            shape = [batch_size, *tensor.shape[1:]]
            if self.token_dim is not None:
                shape[self.token_dim] = num_tokens
            given.append(tensor.new_empty(shape))
        is_first = self.method == "update" and cache.get_seq_length(layer_idx) == 0
        getattr(cache, self.method)(*given, layer_idx, **self.options)
        layer = cache.layers[layer_idx]
        if self.method != "update" or not isinstance(layer, LazyLayer):
            return
        # As attention does. Its queries have as many heads as the keys here: none are stored.
        if is_first:
            layer.on_exact_attention(given[0], None, is_causal=True, scale=None)
        elif layer.stores_attention:
            layer.attend(given[0], None, is_causal=False, scale=None)


class _ListeningCache(DynamicCache):
    """A dense cache that notes what it is handed, by layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.calls: list[list[RecordedCall]] = [
            [] for _ in range(config.get_text_config(decoder=True).num_hidden_layers)
        ]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.calls[layer_idx].append(RecordedCall("update", (key_states, value_states), 2))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> Any:
        self.calls[layer_idx].append(RecordedCall("update_indexer", (indexer_key_states,), 1))
        return super().update_indexer(indexer_key_states, layer_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.calls[layer_idx].append(RecordedCall("update_conv_state", (conv_states,), None, _options(args, kwargs)))
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.calls[layer_idx].append(
            RecordedCall("update_recurrent_state", (recurrent_states,), None, _options(args, kwargs))
        )
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)


def _options(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a call, of which only the state's number can come by position."""
    return {**dict(zip(("state_idx",), args, strict=True)), **kwargs} if args else kwargs


@torch.no_grad()
def record_calls(model: PreTrainedModel) -> list[list[RecordedCall]]:
    """What every layer of a model hands to its cache for one token."""
    cache, padding = _ListeningCache(model.config), getattr(model.config, "pad_token_id", None)
    try:
        # Some models look for padding in what they are given
        model.config.pad_token_id = None
        model(torch.zeros(1, 1, dtype=torch.long, device="meta"), **as_argument(cache), use_cache=True)
    except NO_DATA_ERRORS as error:
        raise ValueError(f"`model`: a `{type(model).__name__}` does not run without data: {error}") from error
    finally:
        model.config.pad_token_id = padding
    if not any(cache.calls):
        raise ValueError(f"`model`: a `{type(model).__name__}` hands nothing to a cache")
    return cache.calls
