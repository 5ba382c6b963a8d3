"""Which layers of a model a method may replace: those of full attention. Bounded ones stay Transformers' own."""

import warnings
from collections.abc import Callable
from typing import Any

import transformers
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from .lazy_layer import LazyLayer
from .recurrent_states import with_recurrent_states


# Layer types whose state is bounded or empty: Transformers' own layers keep them
_BOUNDED_LAYER_TYPES = {
    "sliding_attention",
    "chunked_attention",
    "reference_sliding_attention",
    "hybrid_sliding",
    "linear_attention",
    "conv",
    "mamba",
    "moe",
    "mlp",
    "dummy",
}
# Full attention, alone or with what stays exact beside it: the keys of an indexer, states of a recurrence
_FULL_LAYER_TYPES = {"full_attention", "indexed_attention", "minimax_m3_sparse", "hybrid"}
# Not in all releases of Transformers
_HYBRID_LAYER: type | None = getattr(cache_utils, "LinearAttentionAndFullAttentionLayer", None)


def replace_full_attention(config: PreTrainedConfig, make_layer: Callable[[int], CacheLayerMixin]) -> list[Any]:
    """
    Transformers' own cache layers for a model, those of full attention replaced.

    Args:
        config (`PreTrainedConfig`):
            The config of the (decoder of the) model.
        make_layer (`Callable[[int], CacheLayerMixin]`):
            Makes the layer of an index.

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
    if any(_is_hybrid(layer) and not hasattr(layer, "number_of_states") for layer in own):
        raise ValueError(
            "`config`: layers with attention beside a recurrence are supported with later releases of Transformers: "
            f"{transformers.__version__} keeps the recurrence's states in another form"
        )
    full = [index for index, layer in enumerate(own) if _is_full(layer)]
    if not full:
        _warn_of_bounded(own)
    for index in full:
        layer = make_layer(index)
        if _is_hybrid(own[index]) and isinstance(layer, LazyLayer):
            layer = with_recurrent_states(layer, own[index].number_of_states)
        # What a cache leaves as it is keeps what belongs to it
        own[index] = own[index] if type(layer) is DynamicLayer else layer
    return own


def _is_hybrid(layer: Any) -> bool:
    return _HYBRID_LAYER is not None and type(layer) is _HYBRID_LAYER


def _is_full(layer: Any) -> bool:
    is_bounded = isinstance(layer, DynamicSlidingWindowLayer)
    return isinstance(layer, DynamicLayer) and not is_bounded


def _warn_of_bounded(own: list[Any]) -> None:
    """
    Raises:
        ValueError: if there is no attention at all.
    """
    windows = sorted({layer.sliding_window for layer in own if isinstance(layer, DynamicSlidingWindowLayer)})
    if not windows:
        raise ValueError(
            "`config`: none of the model's layers has attention that keeps keys and values: there is nothing that the "
            "method could be applied to"
        )
    warnings.warn(
        f"`config`: all layers of the model attend to a window of {', '.join(map(str, windows))} tokens, and stay "
        "Transformers' own: nothing is compressed or dropped",
        stacklevel=4,
    )
