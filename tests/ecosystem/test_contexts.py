"""Caches under `torch.autocast`, whose keys and values differ in dtype, and in and out of `torch.inference_mode`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import list_caches


Context = Callable[[], AbstractContextManager[object]]
Maker = Callable[[str, PreTrainedModel], Cache]
# One of each kind; all names are tried in `make test-long`
KINDS = (
    "gear",
    "gear-4bit",
    "gear-t16:quantizer=trellis",
    "infinigen",
    "infinigen-gear",
    "h2o",
    "llamacpp-q4_0",
)
# Transformers' own, which may not be used so
OTHERS = ("dynamic", "offloaded", "fp8", "quanto-2bit", "quanto-4bit", "hqq-2bit", "hqq-4bit")
NAMES = [
    *KINDS,
    *(pytest.param(name, marks=pytest.mark.long) for name in list_caches() if name not in (*KINDS, *OTHERS)),
]
PROMPT, STEPS = 150, 25


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
def test_autocast(tiny_llama: PreTrainedModel, name: str, dtype: torch.dtype, make_any: Maker) -> None:
    model = tiny_llama
    autocast = partial(torch.autocast, "cpu", dtype)
    contexts = [autocast, autocast, torch.no_grad, autocast]
    with torch.no_grad():
        dense, plain = (
            run(model, DynamicCache(config=model.config), each) for each in (contexts, [torch.no_grad] * 4)
        )
        own, own_plain = (run(model, make_any(name, model), each) for each in (contexts, [torch.no_grad] * 4))
    assert own.isfinite().all()
    # A choice of tokens, or a code, may be another one where numbers are rounded
    assert error(own, dense) < 1.3 * error(own_plain, plain) + 3 * error(dense, plain) + 0.01


@pytest.mark.filterwarnings("ignore:the whole cache is fetched")
@pytest.mark.parametrize("name", NAMES)
def test_inference_mode(tiny_llama: PreTrainedModel, name: str, make_any: Maker) -> None:
    model = tiny_llama
    inside, outside = torch.inference_mode, torch.no_grad
    expected = run(model, make_any(name, model), [outside] * 4)
    for contexts in ([inside, outside, nullcontext, inside], [outside, inside, outside, inside]):
        cache = make_any(name, model)
        logits = run(model, cache, contexts)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        with outside():
            cache.reorder_cache(torch.tensor([1, 0]))
            model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
