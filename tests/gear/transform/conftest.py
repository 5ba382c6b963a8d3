"""How far a cache is from the dense one."""

from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel


@torch.no_grad()
def _divergence(model: PreTrainedModel, cache: Cache, window: torch.Tensor) -> float:
    logarithms = []
    for each in (DynamicCache(config=model.config), cache):
        half = window.numel() // 2
        model(window[None, :half], past_key_values=each)
        logarithms.append(model(window[None, half:], past_key_values=each).logits[0].double().log_softmax(dim=-1))
    dense, coded = logarithms
    return float((dense.exp() * (dense - coded)).sum(dim=-1).mean())


@pytest.fixture(scope="session")
def divergence() -> Callable[[PreTrainedModel, Cache, torch.Tensor], float]:
    """`divergence(model, cache, window)`: mean KL to the dense cache of a window's second half."""
    return _divergence
