"""The attention modules of a decoder, and what their attributes say of how they make queries.

Families of models share the names of attributes; what is known to make attention differ from products of keys and
queries is listed here, so that it can be refused.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


PROJECTION_NAMES = ("q_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")
_COMPRESSED_NAMES = ("q_a_proj", "kv_a_proj_with_mqa")
# Positions that a module looks up itself: nothing that its caller could be asked for
_OWN_POSITION_NAMES = ("rotary_emb", "embed_positions", "rotary_dim")
# Layers without rotary embedding in models that have one. Others say so by `use_rope`, or get no position embeddings.
_IS_WITHOUT_ROTARY: dict[str, Callable[[Any], bool]] = {
    "afmoe": lambda module: not module.is_local_attention,
    "cohere2": lambda module: module.sliding_window is None,
    "cohere2_moe": lambda module: module.sliding_window is None and not module.force_rope,
    "exaone4": lambda module: module.sliding_window is not None and not module.is_sliding,
    "exaone_moe": lambda module: module.sliding_window is not None and not module.is_sliding,
    "kolibri1": lambda module: module.sliding_window is not None and not module.is_sliding,
}


def find_attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """
    The self-attention modules of a model's text decoder by their `layer_idx`, in that order.

    Layers of hybrid models that have no attention, or a linear one, are not in it. That a module is found does not say
    that `QueryProjection` takes it.

    Args:
        model (`PreTrainedModel`): a decoder model, or a multimodal one that has a decoder.

    Raises:
        ValueError: if the model is an encoder-decoder, has no such modules, or several with the same index.
    """
    if model.config.is_encoder_decoder:
        raise ValueError(f"`{type(model).__name__}` has an encoder: only the attention of decoders is known")
    layer_types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or {}
    found: dict[int, nn.Module] = {}
    for layer_idx, module in _self_attention_modules(model.get_decoder()):
        if layer_types and layer_types[layer_idx] == "linear_attention":
            continue
        if found.setdefault(layer_idx, module) is not module:
            raise ValueError(
                f"two attention modules of `{type(model).__name__}` have the `layer_idx` {layer_idx}: "
                f"a `{type(found[layer_idx]).__name__}` and a `{type(module).__name__}`"
            )
    if not found:
        raise ValueError(
            f"`{type(model).__name__}` has no attention modules with a `layer_idx` and one of the query projections "
            f"{_quoted(PROJECTION_NAMES)}"
        )
    return dict(sorted(found.items()))


def _self_attention_modules(decoder: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for module in decoder.modules():
        layer_idx = getattr(module, "layer_idx", None)
        is_cross = getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__
        if isinstance(layer_idx, int) and not is_cross and first_of(module, PROJECTION_NAMES + _COMPRESSED_NAMES):
            yield layer_idx, module


def reason_to_refuse(module: nn.Module, config: PreTrainedConfig, parameters: set[str]) -> str | None:
    """What is known to make attention differ from products of keys and queries of this input, if anything does."""
    if first_of(module, _COMPRESSED_NAMES) is not None:
        return "makes its queries and keys of a compressed part (multi-head latent attention)"
    if first_of(module, PROJECTION_NAMES) is None:
        return f"has none of the query projections {_quoted(PROJECTION_NAMES)}"
    # Bloom and MPT have no option to do without; Falcon has
    if {"alibi", "position_bias"} & parameters and getattr(config, "alibi", True):
        return "adds positions to attention scores (ALiBi), which queries do not hold"
    if first_of(module, ("rel_logits_proj",)) is not None:
        return "adds relative positions to attention scores, which queries do not hold"
    if "position_embeddings" not in parameters and first_of(module, _OWN_POSITION_NAMES) is not None:
        return "looks up positions itself: it takes no `position_embeddings`"
    rope_parameters = getattr(config, "rope_parameters", None) or {}
    if "attention_scaling" in parameters or rope_parameters.get("llama_4_scaling_beta") is not None:
        return "scales its queries by their positions, which position embeddings do not tell"
    if first_of(module, ("sinks",)) is not None:
        return "has attention sinks (`sinks`): probabilities do not follow from queries and keys alone"
    softcap = first_of(module, ("attn_logit_softcapping",))
    if softcap is not None and config._attn_implementation != "sdpa":
        return f"caps attention scores: `attn_logit_softcapping` has to be `None`, but is {softcap}"
    return None


def calling_module() -> nn.Module | None:
    """The innermost module that is calling; `None` if there is none, or `torch.compile` has made what calls."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        caller = frame.f_locals.get("self")
        if isinstance(caller, nn.Module):
            return caller
    return None


def is_without_rotary(module: nn.Module, config: PreTrainedConfig) -> bool:
    """Whether a module rotates nothing, though its model has position embeddings."""
    rule = _IS_WITHOUT_ROTARY.get(config.model_type)
    return not getattr(module, "use_rope", True) if rule is None else rule(module)


def first_of(module: nn.Module, names: tuple[str, ...]) -> Any:
    """The first of these attributes that a module has and that is not `None`."""
    return next((value for name in names if (value := getattr(module, name, None)) is not None), None)


def _quoted(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)
