"""Which layers of a model a method may replace: those of full attention, and of those with a window what it can take.
Other bounded ones stay Transformers' own.

Of layers whose attention runs beside a convolution or a recurrence, as in Falcon-H1, the states of these are small, do
not grow, and stay exact, as Transformers' own code keeps them; keys and values are a method's.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from kvcache_plugins.user_warnings import warn_user

from .lazy_layer import LazyLayer


# Layer types whose state is bounded or empty: Transformers' own layers keep them
_BOUNDED_LAYER_TYPES = {
    *("sliding_attention", "chunked_attention", "reference_sliding_attention", "hybrid_sliding"),
    *("linear_attention", "conv", "mamba", "moe", "mlp", "dummy"),
}
# Full attention, alone or with what stays exact beside it: the keys of an indexer, states of a recurrence
_FULL_LAYER_TYPES = {"full_attention", "indexed_attention", "minimax_m3_sparse", "hybrid"}
# Not in all releases of Transformers
_HYBRID_LAYERS: set[type | None] = {
    getattr(cache_utils, f"LinearAttentionAnd{kind}AttentionLayer", None) for kind in ("Full", "SlidingWindow")
}


def replace_full_attention(
    config: PreTrainedConfig,
    make_layer: Callable[[int], CacheLayerMixin],
    make_windowed: Callable[[int, int], CacheLayerMixin | None] = lambda index, window: None,
) -> list[Any]:
    """
    Makes Transformers' own cache layers for the config of a decoder, with those of full attention replaced by index; a
    `ValueError` if it has layers that hold full-length states of another kind, or none that hold any.

    Args:
        make_windowed (`Callable`, *optional*): Makes the layer of an index whose attention has a window, of so many
            tokens; `None`, as by default, leaves Transformers' own in its place.
    """
    own: list[Any] = list(DynamicCache(config=config).layers)
    layer_types = getattr(config, "layer_types", None) or []
    foreign = sorted(set(layer_types) - _BOUNDED_LAYER_TYPES - _FULL_LAYER_TYPES)
    if foreign:
        raise ValueError(
            f"`config`: layers of type {', '.join(f'`{each}`' for each in foreign)} keep states in a form of their "
            "own, which only Transformers' own cache has: use `DynamicCache(config=config)`"
        )
    if any(type(layer) in _HYBRID_LAYERS and not hasattr(layer, "number_of_states") for layer in own):
        raise ValueError(
            "`config`: layers with attention beside a recurrence are supported with later releases of Transformers: "
            f"{transformers.__version__} keeps the recurrence's states in another form"
        )
    made: dict[int, CacheLayerMixin] = {}
    for index, layer in enumerate(own):
        if isinstance(layer, DynamicSlidingWindowLayer):
            windowed = make_windowed(index, layer.sliding_window)
            made |= {} if windowed is None else {index: windowed}
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
        if type(own[index]) in _HYBRID_LAYERS and isinstance(layer, LazyLayer):
            # Not used yet, it keeps states of convolutions and recurrences too
            layer.__class__ = _hybrid_class(type(layer))
            LinearAttentionLayer.__init__(layer, number_of_states=own[index].number_of_states)  # type: ignore[arg-type]
        # What a cache leaves as it is keeps what belongs to it
        own[index] = own[index] if type(layer) is DynamicLayer else layer
    return own


class HybridLayersMixin(Cache):
    """Mixed into a cache of such layers, before `Cache`."""

    @property
    def is_linear(self) -> list[bool]:
        """As `Cache.is_linear`: layers that have attention beside a recurrence are none of those without."""
        # Not by `super()`: `torch.compile` knows no properties of bases
        return [
            isinstance(layer, LinearAttentionLayer) and not isinstance(layer, CacheLayerMixin) for layer in self.layers
        ]


@cache
def _hybrid_class(base: type[LazyLayer]) -> type[LazyLayer]:
    """Makes a class of layers whose operations on a batch take states of convolutions and recurrences along."""

    class Hybrid(LinearAttentionLayer, base):  # type: ignore[misc, valid-type]
        is_compileable = False
        # What moves or reorders goes by `map_tensors`
        offload, prefetch, reorder_cache = base.offload, base.prefetch, base.reorder_cache

        def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
            if len(args) == 2:
                base.lazy_initialization(self, *args)
            else:
                super().lazy_initialization(**kwargs)

        def _recurrent_tensors(self) -> Iterator[tuple[dict[int, Any], int, torch.Tensor]]:
            for states in (self.conv_states, self.recurrent_states):
                yield from ((states, index, tensor) for index, tensor in states.items() if tensor is not None)

        def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
            base.map_tensors(self, function)
            for states, index, tensor in list(self._recurrent_tensors()):
                states[index] = function(tensor)

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
