"""Steps that are recorded and replayed, in Triton's interpreter: tokens and contents are those of the cache as it is."""

import copy
import os

import pytest
import torch

from kvcache_plugins import GEARCache, create_cache
from kvcache_plugins.gear.fixed_storage import FixedBuffer


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="steps are recorded in Triton's interpreter here")
# By preset: tokens of the prompt and decoded ones, and options with which chunks are short
CASES = {
    "gear": (45, 11, {"residual_length": 4}),
    "gear-t16": (81, 6, {"residual_length": 3}),
    "gear-2bit": (70, 11, {"residual_length": 8, "q_group_size": 8}),
    "kivi-2bit": (67, 11, {"residual_length": 8, "q_group_size": 8}),
    "gear-k4v3": (66, 10, {"residual_length": 8, "q_group_size": 8}),
}


@pytest.fixture(autouse=True)
def triton_kernels(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")


def prompts(batch_size, length):
    return torch.randint(3, 96, (batch_size, length), generator=torch.Generator().manual_seed(length))


def generate(model, cache, ids, num_tokens, mask=None):
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1
    )


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=1)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_cache(name, model, monkeypatch):
    length, num_tokens, options = CASES[name]
    ids = prompts(1, length)
    cache = create_cache(name, model, **options)
    with cache.captured_steps(model, num_tokens) as steps:
        got = generate(model, cache, ids, num_tokens)
    print(steps.num_recorded, steps.num_replayed, steps.num_others, cache.stats())
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "auto")
    assert torch.equal(got, generate(model, create_cache(name, model, **options), ids, num_tokens))
    assert steps.num_recorded == 1
