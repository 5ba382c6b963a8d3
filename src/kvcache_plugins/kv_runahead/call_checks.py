"""What a rank can tell of its own call, before it asks the others."""

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .wire import HOP_NBITS


def check_prompt(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, hop_nbits: int | None
) -> None:
    """Raises a `ValueError` for what no rank could prefill."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        raise ValueError(f"`model` has to be a decoder of Transformers but is a {type(model).__name__}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"`input_ids` has to be of shape [batch_size, length], both at least 1, but is {tuple(input_ids.shape)}"
        )
    if hop_nbits is not None and hop_nbits not in HOP_NBITS:
        raise ValueError(f"`hop_nbits` has to be one of {HOP_NBITS} or `None` but is {hop_nbits}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has to have the shape of `input_ids`, {tuple(input_ids.shape)}, but has "
            f"{tuple(attention_mask.shape)}"
        )
    if not bool((attention_mask.bool().cumsum(dim=1) > 0).eq(attention_mask.bool()).all()):
        raise ValueError("`attention_mask` has to be 0 for padding on the left, and 1 for every token behind it")


def check_cache(cache: Cache | None, model: PreTrainedModel, num_slices: int) -> Cache:
    """
    The cache to fill: the user's, or a `DynamicCache`.

    Raises:
        ValueError: if it is no cache, not empty, or cannot be filled by ranks that each see a part of the prompt.
    """
    if cache is None:
        return DynamicCache(config=model.config.get_text_config(decoder=True))
    if not isinstance(cache, Cache):
        raise ValueError(f"`past_key_values` has to be a `Cache` of Transformers but is a {type(cache).__name__}")
    if cache.get_seq_length() > 0:
        raise ValueError(f"`past_key_values` has to be empty but holds {cache.get_seq_length()} tokens")
    make_layer: Any = cache.layer_class_to_replicate
    layers: list[Any] = cache.layers or [make_layer()]
    if num_slices > 1 and any(getattr(layer, "needs_prompt_attention", False) for layer in layers):
        raise ValueError(
            f"`past_key_values`: a `{type(cache).__name__}` with these options chooses what it keeps by the attention "
            "of the whole prompt, of which the last rank sees its own slice only"
        )
    return cache
