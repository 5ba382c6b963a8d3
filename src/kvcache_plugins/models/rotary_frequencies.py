"""The rotary position embedding of a model's layers, from its config."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvcache_plugins.formats.rotary import NOT_ROTATED, RotaryEmbedding

from .layer_config import config_of_layer, heads_of


# Types with a function of Transformers. Frequencies of the first ones are the same for texts of any length; `dynamic`
# changes them beyond the length of the training, and `longrope` has others for longer texts
_TYPES = {"linear", "llama3", "yarn", "proportional", "dynamic", "longrope"}


# Models that turn pairs the other way
_REVERSED = {"nanochat"}
# GPT-J and CodeGen have no parameters but the number of channels
_DEFAULT_BASE = 10000.0


def rotary_embedding(config: PreTrainedConfig, layer_idx: int) -> RotaryEmbedding:
    """Return the rotary embedding of a layer; one without frequencies if it has none, or the config does not say."""
    layer_config = config_of_layer(config, layer_idx)
    parameters = getattr(layer_config, "rope_parameters", None)
    layer_type = None
    layer_types = getattr(layer_config, "layer_types", None)
    if isinstance(parameters, dict) and layer_types and layer_types[layer_idx] in parameters:
        layer_type = layer_types[layer_idx]
        parameters = parameters[layer_type]
    if not isinstance(parameters, dict):
        rotated = getattr(layer_config, "rotary_dim", None)
        return NOT_ROTATED if rotated is None else RotaryEmbedding(_geometric(_DEFAULT_BASE, rotated))
    rope_type = parameters.get("rope_type", "default")
    longer: tuple[float, ...] = ()
    if rope_type == "default":
        frequencies = _default_frequencies(layer_config, parameters)
    elif rope_type in _TYPES and rope_type in ROPE_INIT_FUNCTIONS:
        frequencies = _computed_frequencies(layer_config, rope_type, layer_type)
        if rope_type == "longrope":
            length = parameters["original_max_position_embeddings"] + 1
            longer = _computed_frequencies(layer_config, rope_type, layer_type, length)
    else:
        return NOT_ROTATED
    if layer_config.model_type in _REVERSED:
        frequencies = tuple(-each for each in frequencies)
    return RotaryEmbedding(frequencies, longer, has_sections="mrope_section" in parameters)


def _default_frequencies(layer_config: PreTrainedConfig, parameters: dict[str, Any]) -> tuple[float, ...]:
    base = parameters.get("rope_theta")
    if base is None:
        return ()
    # Multi-head latent attention rotates some channels alone, as a head of their own
    head_dim = getattr(layer_config, "qk_rope_head_dim", None) or heads_of(layer_config).dim
    return _geometric(base, int(head_dim * parameters.get("partial_rotary_factor", 1.0)))


def _geometric(base: float, num_channels: int) -> tuple[float, ...]:
    exponents = torch.arange(0, num_channels, 2, dtype=torch.float64, device="cpu") / num_channels
    # Models have them in float32
    return tuple((1.0 / base**exponents).float().tolist())


def _computed_frequencies(
    layer_config: PreTrainedConfig, rope_type: str, layer_type: str | None, length: int | None = None
) -> tuple[float, ...]:
    """Compute frequencies by Transformers' function of a type, for texts of a length."""
    # These functions make some tensors on the default device instead of the given one
    with torch.device("cpu") as device:
        compute = ROPE_INIT_FUNCTIONS[rope_type]
        frequencies: torch.Tensor = compute(layer_config, device, seq_len=length, layer_type=layer_type)[0]
    return tuple(frequencies.tolist())
