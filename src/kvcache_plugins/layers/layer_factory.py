"""Cache layers for a model's config: some are a method's own, and the others Transformers'.

A method may replace layers of full attention, and layers of windowed attention if it can take them; other bounded
layers stay Transformers' own. In hybrid layers, such as Falcon-H1's, attention runs beside a convolution or a
recurrence. The states of these are small and do not grow: Transformers' own code keeps them exact, and a method keeps
the keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvcache_plugins.models.layer_config import configs_of_layers
from kvcache_plugins.user_warnings import warn_user

from .lazy_layer import LazyLayer


# Layer types whose state is bounded or empty: Transformers' own layers keep them
_BOUNDED_LAYER_TYPES = {
    *("sliding_attention", "chunked_attention", "reference_sliding_attention", "hybrid_sliding"),
    *("linear_attention", "conv", "mamba", "moe", "mlp", "dummy"),
}
# Full attention, alone or beside what stays exact: the keys of an indexer, the states of a recurrence
_FULL_LAYER_TYPES = {"full_attention", "indexed_attention", "minimax_m3_sparse", "hybrid"}
# Transformers' own hybrid layers, and the class of their keys and values
_ATTENTION_CLASSES: dict[type, type] = {
    LinearAttentionAndFullAttentionLayer: DynamicLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: DynamicSlidingWindowLayer,
}


def replace_full_attention(
    config: PreTrainedConfig,
    make_layer: Callable[[int], CacheLayerMixin],
    make_windowed: Callable[[int, int], CacheLayerMixin | None] = lambda index, window: None,
) -> list[Any]:
    """
    Make Transformers' own cache layers for a decoder's config, and replace those of full attention.

    Args:
        make_layer (`Callable`): makes the layer of an index; a plain `DynamicLayer` leaves Transformers' own.
        make_windowed (`Callable`, *optional*): makes the layer of an index whose attention has a window of some
            tokens; `None`, the default, leaves Transformers' own.

    Raises:
        ValueError: if the model has layers that hold full-length states of another kind, or none that hold any.
    """
    own: list[Any] = list(DynamicCache(config=config).layers)
    layer_types = getattr(config, "layer_types", None) or []
    foreign = sorted(set(layer_types) - _BOUNDED_LAYER_TYPES - _FULL_LAYER_TYPES)
    if foreign:
        raise ValueError(
            f"`config`: layers of type {', '.join(f'`{each}`' for each in foreign)} keep states in a form of their "
            "own, which only Transformers' own cache has: use `DynamicCache(config=config)`"
        )
    made: dict[int, CacheLayerMixin] = {}
    for index, layer in enumerate(own):
        if isinstance(layer, DynamicSlidingWindowLayer):
            windowed = make_windowed(index, layer.sliding_window)
            if windowed is not None:
                made[index] = windowed
        elif isinstance(layer, DynamicLayer):
            made[index] = make_layer(index)
    if not made:
        windows = sorted({layer.sliding_window for layer in own if isinstance(layer, DynamicSlidingWindowLayer)})
        if not windows:
            raise ValueError(
                "`config`: none of the model's layers has attention that keeps keys and values: there is nothing that "
                "the method could be applied to"
            )
        warn_user(
            f"`config`: all layers of the model attend to a window of {', '.join(map(str, windows))} tokens, and stay "
            "Transformers' own: nothing is compressed or dropped"
        )
    for index, layer in made.items():
        if type(layer) is DynamicLayer:
            # Transformers' own may have more than that
            continue
        if type(own[index]) in _ATTENTION_CLASSES and isinstance(layer, LazyLayer):
            own[index] = _hybrid_class(type(layer))(layer, own[index].number_of_states)
        else:
            own[index] = layer
    return own


class HybridLayer(LinearAttentionLayer):
    """
    Base of layers of attention beside a convolution or a recurrence.

    Attributes:
        attention_class (`type`): the class that keeps keys and values.
    """

    attention_class: ClassVar[type[LazyLayer]]


def attention_class(layer: object) -> type:
    """Return the class that keeps a layer's keys and values: its own, or that of the attention in a hybrid layer."""
    kind = type(layer)
    return kind.attention_class if issubclass(kind, HybridLayer) else _ATTENTION_CLASSES.get(kind, kind)


def key_value_heads(config: PreTrainedConfig) -> frozenset[int]:
    """List the numbers of key/value heads that a decoder's config names; none if states are of another form."""
    heads: set[int] = set()
    for layer_config in configs_of_layers(config):
        fields = layer_config.to_dict()
        # Latent attention caches what all query heads share
        if fields.get("kv_lora_rank") is not None or not isinstance(fields.get("num_key_value_heads"), int):
            return frozenset()
        for name, value in fields.items():
            # Some models name other numbers for some of their layers
            if "key_value_heads" in name or "kv_heads" in name:
                heads.update(each for each in (value if isinstance(value, list | tuple) else [value]) if each)
    return frozenset(heads)


@cache
def _hybrid_class(base: type[LazyLayer]) -> Callable[[LazyLayer, int], LazyLayer]:
    """Make the class of hybrid layers whose keys and values are kept by layers of class `base`."""

    class Hybrid(HybridLayer, base):  # type: ignore[misc, valid-type]
        is_compileable = False
        attention_class = base
        # These move or reorder tensors, so they have to call `map_tensors`
        offload = base.offload
        prefetch = base.prefetch
        reorder_cache = base.reorder_cache

        def __init__(self, layer: LazyLayer, number_of_states: int):
            """Take over an unused layer of class `base`, and add states of convolutions and recurrences."""
            super().__init__(number_of_states=number_of_states)
            self.__dict__.update(layer.__dict__)

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            if len(args) == 2:
                base.lazy_initialization(self, *args)
            else:
                super().lazy_initialization(**kwargs)

        def _recurrent_tensors(self) -> Iterator[tuple[dict[int, Any], int, torch.Tensor]]:
            for states in (self.conv_states, self.recurrent_states):
                yield from ((states, index, tensor) for index, tensor in states.items() if tensor is not None)

        def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            # First, as the others are as they were if anything is raised
            mapped = [(states, index, function(tensor)) for states, index, tensor in self._recurrent_tensors()]
            base.map_tensors(self, function)
            for states, index, tensor in mapped:
                states[index] = tensor

        def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield from base.named_tensors(self)
            yield from (("recurrent", tensor) for _, _, tensor in self._recurrent_tensors())

        def reset(self) -> None:
            super().reset()
            base.reset(self)

        def crop(self, tokens_to_remove: int) -> None:
            super().crop(tokens_to_remove)
            base.crop(self, tokens_to_remove)

    Hybrid.__name__ = Hybrid.__qualname__ = f"Hybrid{base.__name__}"
    return Hybrid
