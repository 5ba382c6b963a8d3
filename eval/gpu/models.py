"""Models of any size with random weights, for what is timed on a GPU."""

from collections.abc import Mapping

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel


DTYPE = torch.bfloat16


def build_llama(fields: Mapping[str, int], device: torch.device, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """A Llama of any size with random weights, made on the device: nothing is downloaded or copied."""
    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
