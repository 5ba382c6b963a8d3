"""Prompts that may be padded, and greedy decoding of them, for tests of steps that are replayed."""

from collections.abc import Callable

import pytest
import torch
from transformers import Cache, PreTrainedModel


def _prompts(batch_size: int, length: int, padding: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 96, (batch_size, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _generate(model: PreTrainedModel, cache: Cache, inputs: dict[str, torch.Tensor], num_tokens: int) -> torch.Tensor:
    return model.generate(**inputs, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False)


@pytest.fixture(scope="session")
def prompts() -> Callable[..., dict[str, torch.Tensor]]:
    """`prompts(batch_size, length, padding)`: ids and a mask that hides the first tokens of the first one."""
    return _prompts


@pytest.fixture(scope="session")
def generate() -> Callable[[PreTrainedModel, Cache, dict[str, torch.Tensor], int], torch.Tensor]:
    """`generate(model, cache, inputs, num_tokens)`: the tokens of greedy decoding."""
    return _generate
