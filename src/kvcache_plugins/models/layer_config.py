"""The config of a decoder within a model's, and configs whose layers differ: one layer's own, all head dimensions."""

import copy

from transformers import PreTrainedConfig


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model's text decoder, whose `num_hidden_layers` are the decoder's."""
    config = config.get_text_config(decoder=True)
    # A name that Transformers does not take for the decoder's
    num_layers = getattr(config, "num_decoder_layers", None) if config.is_encoder_decoder else None
    if num_layers is not None:
        config = copy.deepcopy(config)
        config.num_hidden_layers = num_layers
    return config


def has_own_layers(config: PreTrainedConfig) -> bool:
    """Whether layers differ in more than their type."""
    return bool(getattr(config, "is_heterogeneous", False))


def head_dims(config: PreTrainedConfig) -> set[int]:
    """The head dimensions that keys and values have in some layer; none where a config does not say."""
    dims = set()
    for layer in config.per_layer_config if has_own_layers(config) else [config]:
        # Latent attention caches what is smaller than a head
        if getattr(layer, "kv_lora_rank", None) is not None:
            continue
        num_heads = getattr(layer, "num_attention_heads", None)
        dim = getattr(layer, "head_dim", None)
        if dim is None and num_heads:
            dim = layer.hidden_size // num_heads
        if isinstance(dim, int):
            dims.add(dim)
    return dims
