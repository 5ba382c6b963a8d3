"""Which layers of a model a method may replace: those of full attention. Bounded ones stay Transformers' own."""

from collections.abc import Callable
from typing import Any

from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


# Layer types whose state is bounded or empty: Transformers' own layers keep them
_BOUNDED_LAYER_TYPES = {
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
    "conv",
    "mamba",
    "moe",
    "mlp",
    "dummy",
}


def replace_full_attention(config: PreTrainedConfig, make_layer: Callable[[int], CacheLayerMixin]) -> list[Any]:
    """
    Transformers' own cache layers for a model, those of full attention replaced.

    Args:
        config (`PreTrainedConfig`):
            The config of the (decoder of the) model.
        make_layer (`Callable[[int], CacheLayerMixin]`):
            Makes the layer of an index.

    Raises:
        ValueError: if the model has no layer of full attention, or layers that hold full-length states of another
        kind, or an encoder.
    """
    if config.is_encoder_decoder:
        raise ValueError(
            "`config` has an encoder, and what is attended to across would be stored among a layer's own tokens. "
            "`EncoderDecoderCache(GEARCache(), DynamicCache())` keeps them apart, with a cache that needs no config"
        )
    own: list[Any] = list(DynamicCache(config=config).layers)
    layer_types = getattr(config, "layer_types", None) or [
        "full_attention" if type(layer) is DynamicLayer else "sliding_attention" for layer in own
    ]
    unsupported = set(layer_types) - _BOUNDED_LAYER_TYPES - {"full_attention"}
    full = [index for index, layer in enumerate(own) if type(layer) is DynamicLayer]
    if unsupported or not full:
        raise ValueError(
            "`config` has to have layers of type `full_attention`, which the method replaces, and beside them only "
            f"{sorted(_BOUNDED_LAYER_TYPES)}, but its layer types are {sorted(set(layer_types))}"
        )
    for index in full:
        own[index] = make_layer(index)
    return own
