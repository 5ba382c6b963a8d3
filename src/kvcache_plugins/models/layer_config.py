"""The config of a decoder within a model's, and the configs of its layers.

Transformers lets a layer have a value of its own for any field, and then refuses to read the field from the decoder's
config, by an error that no default of `getattr` helps against. So fields that say something of a layer are read from a
layer's config alone, which is called `layer_config` everywhere: a test looks for others in the source.
"""

import copy
from typing import NamedTuple

from transformers import PreTrainedConfig


class Heads(NamedTuple):
    """Numbers of a layer's query heads and key/value heads, and the head dimension."""

    num_query: int
    num_key_value: int
    dim: int


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's text decoder, whose `num_hidden_layers` are the decoder's."""
    config = config.get_text_config(decoder=True)
    # A name that Transformers does not take for the decoder's
    num_layers = getattr(config, "num_decoder_layers", None) if config.is_encoder_decoder else None
    if num_layers not in (None, config.num_hidden_layers):
        config = copy.deepcopy(config)
        config.num_hidden_layers = num_layers
    return config


def config_of_layer(config: PreTrainedConfig, layer_idx: int) -> PreTrainedConfig:
    """The config of a layer of a decoder: the decoder's, with what the layer has of its own."""
    return config.per_layer_config[layer_idx] if _has_own_layers(config) else config


def configs_of_layers(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The configs of a decoder's layers in order; the decoder's alone if no layer has anything of its own."""
    return list(config.per_layer_config) if _has_own_layers(config) else [config]


def _has_own_layers(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "is_heterogeneous", False))


def heads_of(layer_config: PreTrainedConfig) -> Heads:
    """The heads of a layer's attention."""
    num_heads = layer_config.num_attention_heads
    head_dim = getattr(layer_config, "head_dim", None) or layer_config.hidden_size // num_heads
    return Heads(num_heads, getattr(layer_config, "num_key_value_heads", None) or num_heads, head_dim)


def head_dims(config: PreTrainedConfig) -> set[int]:
    """The head dimensions that keys and values have in some layer of a decoder; none where a config does not say."""
    dims = set()
    for layer_config in configs_of_layers(config):
        # Latent attention caches what is smaller than a head
        if getattr(layer_config, "kv_lora_rank", None) is not None:
            continue
        num_heads = getattr(layer_config, "num_attention_heads", None)
        dim = getattr(layer_config, "head_dim", None)
        if dim is None and num_heads:
            dim = layer_config.hidden_size // num_heads
        if isinstance(dim, int):
            dims.add(dim)
    return dims
