"""How far a cache is from the dense one."""

from collections.abc import Callable

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel


@torch.no_grad()
def _divergence(model: PreTrainedModel, cache: Cache, window: torch.Tensor, together: int = 1 << 20) -> float:
    logarithms = []
    prompt, rest = window[None].tensor_split([window.numel() // 2], dim=1)
    for each in (DynamicCache(config=model.config), cache):
        model(prompt, past_key_values=each)
        logits = [model(ids, past_key_values=each).logits[0] for ids in rest.split(together, dim=1)]
        logarithms.append(torch.cat(logits).double().log_softmax(dim=-1))
    dense, coded = logarithms
    return float((dense.exp() * (dense - coded)).sum(dim=-1).mean())


@pytest.fixture(scope="session")
def divergence() -> Callable[..., float]:
    """`divergence(model, cache, window, together)`: mean KL of a window's second half, so many tokens at a time."""
    return _divergence
