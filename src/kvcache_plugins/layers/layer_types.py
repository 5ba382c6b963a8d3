"""Which layers of a model a method may replace: those of full attention, and of those with a window what it can take.
Other bounded ones stay Transformers' own."""

from collections.abc import Callable
from typing import Any

import transformers
from transformers import DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from kvcache_plugins.user_warnings import warn_user

from .lazy_states import LazyLayer
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
_HYBRID_LAYERS: set[type | None] = {
    getattr(cache_utils, f"LinearAttentionAnd{kind}AttentionLayer", None) for kind in ("Full", "SlidingWindow")
}


def replace_full_attention(
    config: PreTrainedConfig,
    make_layer: Callable[[int], CacheLayerMixin],
    make_windowed: Callable[[int, int], CacheLayerMixin | None] = lambda index, window: None,
) -> list[Any]:
    """
    Transformers' own cache layers for a model, those of full attention replaced.

    Args:
        config (`PreTrainedConfig`):
            The config of the (decoder of the) model.
        make_layer (`Callable[[int], CacheLayerMixin]`):
            Makes the layer of an index.
        make_windowed (`Callable[[int, int], CacheLayerMixin | None]`, *optional*):
            Makes the layer of an index whose attention has a window, of so many tokens; `None` leaves Transformers'
            own in its place, which is the default.

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
    if any(type(layer) in _HYBRID_LAYERS and not hasattr(layer, "number_of_states") for layer in own):
        raise ValueError(
            "`config`: layers with attention beside a recurrence are supported with later releases of Transformers: "
            f"{transformers.__version__} keeps the recurrence's states in another form"
        )
    full = [index for index, layer in enumerate(own) if _is_full(layer)]
    windowed = {
        index: make_windowed(index, layer.sliding_window)
        for index, layer in enumerate(own)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    made = {index: make_layer(index) for index in full}
    made |= {index: layer for index, layer in windowed.items() if layer is not None}
    if not made:
        _warn_of_bounded(own)
    for index, layer in made.items():
        if type(own[index]) in _HYBRID_LAYERS and isinstance(layer, LazyLayer):
            layer = with_recurrent_states(layer, own[index].number_of_states)
        # What a cache leaves as it is keeps what belongs to it
        own[index] = own[index] if type(layer) is DynamicLayer else layer
    return own


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
    warn_user(
        f"`config`: all layers of the model attend to a window of {', '.join(map(str, windows))} tokens, and stay "
        "Transformers' own: nothing is compressed or dropped"
    )
