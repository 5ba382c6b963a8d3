"""Configs of a model's decoder and of the decoder's layers.

A layer may have its own value of any field. Reading that field from the decoder's config then raises, also in a
`getattr` with a default. So fields of a layer are read from the layer's own config alone. Such a variable is called
`layer_config`, and a test finds reads from other variables.
"""

import copy
from typing import NamedTuple

from transformers import PreTrainedConfig


class Heads(NamedTuple):
    """Numbers of query heads and of key/value heads of a layer, and the head dimension."""

    num_query: int
    num_key_value: int
    dim: int


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a model's text decoder, with the decoder's `num_hidden_layers`."""
    config = config.get_text_config(decoder=True)
    # Some encoder-decoder models have this field, which Transformers does not read
    num_layers = getattr(config, "num_decoder_layers", None) if config.is_encoder_decoder else None
    if num_layers not in (None, config.num_hidden_layers):
        config = copy.deepcopy(config)
        config.num_hidden_layers = num_layers
    return config


def config_of_layer(config: PreTrainedConfig, layer_idx: int) -> PreTrainedConfig:
    """Return the config of a decoder's layer: the decoder's with the layer's own values."""
    return config.per_layer_config[layer_idx] if _has_own_layers(config) else config


def configs_of_layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configs of a decoder's layers in order, or the decoder's alone if no layer has values of its own."""
    return list(config.per_layer_config) if _has_own_layers(config) else [config]


def _has_own_layers(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "is_heterogeneous", False))


def heads_of(layer_config: PreTrainedConfig) -> Heads:
    """Return the heads of a layer's attention."""
    num_heads = layer_config.num_attention_heads
    head_dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // num_heads
    return Heads(num_heads, getattr(layer_config, "num_key_value_heads", None) or num_heads, head_dim)


def count_query_heads(layer_config: PreTrainedConfig) -> int:
    """Return the query heads of a layer; 1 if its config has no number of them."""
    found = getattr(layer_config, "num_attention_heads", None)
    return found if isinstance(found, int) else 1


def head_dims(config: PreTrainedConfig) -> set[int]:
    """Return the head dimensions of keys and values over all layers of a decoder, as far as its config has them."""
    dims = set()
    for layer_config in configs_of_layers(config):
        # Latent attention caches states that are smaller than a head
        if getattr(layer_config, "kv_lora_rank", None) is not None:
            continue
        num_heads = getattr(layer_config, "num_attention_heads", None)
        dim = getattr(layer_config, "head_dim", None)
        if dim is None and num_heads:
            dim = layer_config.hidden_size // num_heads
        if isinstance(dim, int):
            dims.add(dim)
    return dims
