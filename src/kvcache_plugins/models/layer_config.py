"""Configs whose layers differ: one layer's own, and the head dimensions of all."""

from transformers import PreTrainedConfig


def layer_config(config: PreTrainedConfig, layer_idx: int) -> PreTrainedConfig:
    """The config as one layer has it; the same for all layers where they do not differ, or cannot in this release."""
    return config.per_layer_config[layer_idx] if has_own_layers(config) else config


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
