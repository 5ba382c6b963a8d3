"""Caches under `torch.autocast`, whose keys and values differ in dtype, and in and out of `torch.inference_mode`."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache, list_caches
from kvcache_plugins.layers.lazy_states import LazyLayer


Context = Callable[[], AbstractContextManager[object]]
# One of each kind; all names are tried in `make test-long`
KINDS = (
    "gear",
    "gear-4bit",
    "gear-c16",
    "gear-t16:quantizer=trellis",
    "infinigen",
    "infinigen-gear",
    "h2o",
    "llamacpp-q4_0",
)
NAMES = [*KINDS, *(pytest.param(name, marks=pytest.mark.long) for name in list_caches() if name not in KINDS)]
PROMPT, STEPS = 150, 25


@pytest.fixture
def model(tiny_model: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    return tiny_model("llama")


def make(name: str, model: PreTrainedModel) -> Cache:
    if name == "dynamic":
        return DynamicCache(config=model.config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = create_cache(name, model)
        except (ValueError, ImportError) as error:
            pytest.skip(f"this model or machine cannot have it: {error}")
    if not any(isinstance(layer, LazyLayer) for layer in made.layers):
        pytest.skip("Transformers' own cache, which may not be used so")
    return made


def run(model: PreTrainedModel, cache: Cache, contexts: list[Context]) -> torch.Tensor:
    """Logits of a prompt of two rows, and of single tokens, as many in each further context."""
    tokens = torch.randint(1, 128, (2, PROMPT + STEPS * len(contexts)), generator=torch.Generator().manual_seed(0))
    logits, at = [], 0
    for number, context in enumerate(contexts):
        lengths = [1] * STEPS if number else [PROMPT]
        with context():
            for length in lengths:
                logits.append(model(tokens[:, at : at + length], past_key_values=cache).logits[:, -1].float())
                at += length
    return torch.stack([each.detach().clone() for each in logits])


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return ((logits - expected).square().mean() / expected.var()).sqrt().item()


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_autocast(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    autocast = partial(torch.autocast, "cpu", dtype)
    contexts = [autocast, autocast, torch.no_grad, autocast]
    with torch.no_grad():
        dense, plain = (run(model, make("dynamic", model), each) for each in (contexts, [torch.no_grad] * 4))
        own, own_plain = (run(model, make(name, model), each) for each in (contexts, [torch.no_grad] * 4))
    assert own.isfinite().all()
    # A choice of tokens, or a code, may be another one where numbers are rounded
    assert error(own, dense) < 1.3 * error(own_plain, plain) + 3 * error(dense, plain) + 0.01


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(model: PreTrainedModel, name: str) -> None:
    inside, outside = torch.inference_mode, torch.no_grad
    for contexts in ([inside, outside, nullcontext, inside], [outside, inside, outside, inside]):
        cache = make(name, model)
        logits = run(model, cache, contexts)
        torch.testing.assert_close(logits, run(model, make(name, model), [outside] * 4), atol=1e-4, rtol=1e-4)
        with outside():
            cache.reorder_cache(torch.tensor([1, 0]))
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
