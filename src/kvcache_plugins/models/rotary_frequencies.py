"""Frequencies of a model's rotary position embedding, from its config."""

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .layer_config import config_of_layer, heads_of


# Types with a function of Transformers. Frequencies of the first ones are the same for texts of any length; `dynamic`
# changes them beyond the length of the training, and `longrope` has others for longer texts
_TYPES = {"linear", "llama3", "yarn", "proportional", "dynamic", "longrope"}


def rotary_frequencies(config: PreTrainedConfig, layer_idx: int, *, is_long: bool = False) -> tuple[float, ...] | None:
    """
    Return the radians a token by which a layer rotates each pair of channels; `None` if it rotates none, or the config
    does not say. If `is_long`, return those of texts that are longer than the training's, where they are others from
    the first token on, and `None` everywhere else.
    """
    layer_config = config_of_layer(config, layer_idx)
    parameters = getattr(layer_config, "rope_parameters", None)
    layer_type = None
    layer_types = getattr(layer_config, "layer_types", None)
    if isinstance(parameters, dict) and layer_types and layer_types[layer_idx] in parameters:
        layer_type = layer_types[layer_idx]
        parameters = parameters[layer_type]
    if not isinstance(parameters, dict):
        return None
    rope_type = parameters.get("rope_type", "default")
    if is_long and rope_type != "longrope":
        return None
    if rope_type == "default":
        base = parameters.get("rope_theta")
        if base is None:
            return None
        # Multi-head latent attention rotates some channels alone, as a head of their own
        head_dim = getattr(layer_config, "qk_rope_head_dim", None) or heads_of(layer_config).dim
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
        # Models have them in float32
        return tuple((1.0 / base**exponents).float().tolist())
    if rope_type not in _TYPES or rope_type not in ROPE_INIT_FUNCTIONS:
        return None
    compute = ROPE_INIT_FUNCTIONS[rope_type]
    length = parameters["original_max_position_embeddings"] + 1 if is_long else None
    # These functions make some tensors on the default device instead of the given one
    with torch.device("cpu") as device:
        frequencies: torch.Tensor = compute(layer_config, device, seq_len=length, layer_type=layer_type)[0]
    return tuple(frequencies.tolist())
