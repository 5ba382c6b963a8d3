"""Tiny random models for the contract: fast, and sharp enough that a wrong key changes the logits."""

from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel


# Measured on `llama` as distances of logits: with 0.1 a lost token of 230 makes 0.1 to 0.2, 2-bit quantization 0.4 and
# another prompt 1.1. With the usual 0.02 attention is all but uniform and lost tokens leave no trace; from 0.2 on 2
# bits are as bad as another prompt.
_SHARP_INIT = 0.1
_SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": _SHARP_INIT,
}


def tiny_models(seed: int = 0) -> dict[str, PreTrainedModel]:
    """
    Random models of two architectures: `llama` (grouped-query attention, full everywhere) and `hybrid` (Gemma 3, a
    layer of full attention between two with a sliding window).

    Args:
        seed (`int`, *optional*, defaults to 0): Seed of the weights. PyTorch's global generator is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        llama = LlamaForCausalLM(
            LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **_SHAPE)
        )
        hybrid = Gemma3ForCausalLM(
            Gemma3TextConfig(
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=24,
                query_pre_attn_scalar=64,
                # Tied, a random model would say the same token again and again
                tie_word_embeddings=False,
                **_SHAPE,
            )
        )
    return {"llama": llama.eval(), "hybrid": hybrid.eval()}
