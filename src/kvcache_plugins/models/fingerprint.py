"""Digests of a model and of a config, so that a file made with one is not used with another."""

import hashlib
import json
from collections.abc import Iterator

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .layer_config import configs_of_layers


_SAMPLES_PER_PARAMETER = 8
# Fields that decide on the shapes and the meaning of keys and values; a missing field counts as `None`
_CONFIG_FIELDS = (
    *("model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("layer_types", "sliding_window", "vocab_size", "rope_parameters", "rope_theta"),
)


def fingerprint(model: PreTrainedModel) -> str:
    """
    Digest the model's type, rotary settings, parameter names, shapes and dtypes, a few weights of each, and adapters
    of PEFT that are switched off.
    """
    digest = hashlib.sha256()
    config = model.config.get_text_config(decoder=True).to_dict()
    settings = [config.get(key) for key in ("model_type", "rope_parameters", "rope_theta")]
    digest.update(json.dumps(settings, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        # Offloaded weights are not loaded for this
        if not parameter.is_meta:
            digest.update(_samples(parameter).numpy().tobytes())
    for name, adapters in _partial_adapters(model):
        digest.update(f"{name} {adapters}".encode())
    return digest.hexdigest()


def _partial_adapters(model: PreTrainedModel) -> Iterator[tuple[str, list[str]]]:
    """Yield the layers of PEFT that do not use all adapters they have, with those that they use."""
    for name, module in model.named_modules():
        parts = getattr(module, "adapter_layer_names", ())
        available = {adapter for part in parts for adapter in getattr(module, part)}
        is_off = bool(available) and module.disable_adapters
        used = set() if is_off else available.intersection(module.active_adapters if available else ())
        if used != available:
            yield name, sorted(used)


def weight_samples(model: PreTrainedModel) -> torch.Tensor:
    """Return a few weights of every parameter, concatenated, float32; NaN for offloaded ones."""
    return torch.cat([_samples(each) for each in model.parameters()])


def _samples(parameter: torch.Tensor) -> torch.Tensor:
    samples = parameter.detach().flatten()[:: max(parameter.numel() // _SAMPLES_PER_PARAMETER, 1)]
    unknown = torch.full(samples.shape, torch.nan, dtype=torch.float32, device="cpu")
    return unknown if samples.is_meta else samples.float().cpu()


def config_fingerprint(config: PreTrainedConfig) -> str:
    """Digest a text model's type, sizes and rotary settings. Weights have no part in it."""
    layers = configs_of_layers(config.get_text_config(decoder=True))
    fields = []
    for key in _CONFIG_FIELDS:
        values = [getattr(layer_config, key, None) for layer_config in layers]
        fields.append(values[0] if all(each == values[0] for each in values) else values)
    return hashlib.sha256(json.dumps(fields, default=str).encode()).hexdigest()
