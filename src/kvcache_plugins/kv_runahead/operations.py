"""Operations and bytes of a model, counted from its shapes."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModel, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationCounts:
    """
    Floating-point operations of a prefill.

    Attributes:
        per_token (`int`): of a token, attention to all tokens aside.
        projections (`int`): the part of that until keys and values are known.
        per_pair (`int`): of a query and a key.
    """

    per_token: int
    projections: int
    per_pair: int


def count_operations(model: PreTrainedModel | PreTrainedConfig) -> OperationCounts:
    """Operations of a model's decoder, see `CostModel.of_shapes`."""
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):
            model = AutoModel.from_config(model)
    decoder = model.get_decoder()
    config = decoder.config.get_text_config(decoder=True)
    num_heads = config.num_attention_heads
    num_key_value_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    linear = _count_linear_weights(decoder, getattr(config, "num_experts_per_tok", None) or 1)
    layers = DynamicCache(config=config).layers
    projections = len(layers) * config.hidden_size * (num_heads + 2 * num_key_value_heads) * head_dim
    num_full = sum(type(layer) is DynamicLayer for layer in layers)
    windows = sum(getattr(layer, "sliding_window", 0) for layer in layers)
    # A multiplication and an addition for every channel of a key, and of a value
    attention = 4 * num_heads * head_dim
    return OperationCounts(
        per_token=2 * linear + attention * windows, projections=2 * projections, per_pair=attention * num_full
    )


def bytes_of_token(model: PreTrainedModel | PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in one layer."""
    config = (model if isinstance(model, PreTrainedConfig) else model.config).get_text_config(decoder=True)
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * num_heads * head_dim * dtype.itemsize)


def _count_linear_weights(decoder: nn.Module, num_active_experts: int) -> int:
    """Weights that every token is multiplied with."""
    count = 0
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            # Not of the weight: packed in a few bits it has another shape
            count += module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count += module.weight.numel()
    # `[experts, ., .]`
    return count + sum(
        parameter[0].numel() * num_active_experts for parameter in decoder.parameters() if parameter.ndim == 3
    )
