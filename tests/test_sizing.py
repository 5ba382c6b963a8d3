"""Predicted bytes are those of a real run, for every registered cache, and from the config alone."""

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import create_cache, list_caches, measure_memory, predict_memory, register_cache, registry
from kvcache_plugins.memory import MemoryReport
from kvcache_plugins.registry import parse_cache_spec
from kvcache_plugins.sizing import CacheSizer


# Their quantization asks for numbers in the middle of it
NEEDS_DATA = {"hqq-2bit", "hqq-4bit"}
NEEDS_GPU = {"offloaded"}
SIZED = [name for name in list_caches() if name not in NEEDS_DATA | NEEDS_GPU]


@torch.no_grad()
def run_really(model: PreTrainedModel, spec: str, context: int, batch_size: int = 1, new_tokens: int = 0) -> MemoryReport:
    """A prompt, tokens one by one, and what the cache then holds."""
    name, options = parse_cache_spec(spec)
    cache = create_cache(name, model, **options)
    token_ids = torch.randint(5, 90, (batch_size, context))
    for part in (token_ids[:, : context - new_tokens], *token_ids[:, context - new_tokens :].split(1, dim=1)):
        if part.shape[1]:
            model(part, past_key_values=cache, logits_to_keep=1)
    if "infinigen" in name:
        cache.detach()
    return cache.memory() if hasattr(cache, "memory") else measure_memory(cache)


def assert_predicted(model: PreTrainedModel, sizer: CacheSizer, spec: str, **setting: int) -> None:
    really, predicted = run_really(model, spec, **setting), sizer.measure(spec, **setting)
    # Not within a per cent: to the byte, part by part
    assert {part: size for part, size in predicted.parts.items() if size} == {
        part: size for part, size in really.parts.items() if size
    }
    assert (predicted.dense_bytes, predicted.num_values) == (really.dense_bytes, really.num_values)
    assert sum(predicted.devices.values()) == predicted.total_bytes == really.total_bytes


@pytest.fixture(scope="module")
def tiny_sizer(contract_model: PreTrainedModel) -> CacheSizer:
    return CacheSizer(contract_model, device="cpu")


SETTINGS = [
    pytest.param({"context": 1}, id="one-token"),
    pytest.param({"context": 63, "batch_size": 2}, id="below-a-group"),
    pytest.param({"context": 211, "batch_size": 2}, id="odd"),
    pytest.param({"context": 341, "new_tokens": 141}, id="decoded"),
]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", SIZED)
def test_every_cache_on_a_tiny_model(
    name: str, setting: dict[str, int], contract_model: PreTrainedModel, tiny_sizer: CacheSizer
) -> None:
    if not registry.check_cache(name).is_available:
        pytest.skip("what it needs is not installed")
    assert_predicted(contract_model, tiny_sizer, name, **setting)


OPTIONS = [
    "gear:nbits=3,rank=8,low_rank_recent_ratio=0.3,sparsity=0.05",
    "gear:backbone=per-token,key_nbits=8,value_rank=0,residual_length=32",
    "gear:nbits=2,sparsity=0.0,key_sparsity=0.1,decode_rank=1",
    "infinigen:pool_tokens=100,scoring_nbits=2",
    "infinigen:pool_tokens=100,eviction=lru,recent=8",
    "infinigen:partial_ratio=0.3,eviction=fifo,pool_tokens=50",
    "h2o:grow=false,heavy_ratio=0.3",
]


@pytest.mark.parametrize("spec", OPTIONS)
def test_options_and_many_decoded_tokens(spec: str, contract_model: PreTrainedModel, tiny_sizer: CacheSizer) -> None:
    assert_predicted(contract_model, tiny_sizer, spec, context=398, new_tokens=201, batch_size=2)


REAL = {
    "smollm2": [
        ("gear-2bit", {"context": 333}, "float32"),
        ("gear-4bit", {"context": 301, "new_tokens": 70, "batch_size": 2}, "float32"),
        ("infinigen", {"context": 230, "new_tokens": 37}, "bfloat16"),
        ("h2o", {"context": 259, "new_tokens": 2, "batch_size": 2}, "float32"),
        ("kcvt-4bit", {"context": 127, "new_tokens": 3, "batch_size": 3}, "bfloat16"),
    ],
    # Its sliding windows are of 512 tokens
    "gemma3": [
        ("gear-2bit", {"context": 601}, "float32"),
        ("gear-4bit", {"context": 333, "new_tokens": 66, "batch_size": 2}, "float32"),
        ("infinigen", {"context": 573, "new_tokens": 33}, "bfloat16"),
        ("h2o", {"context": 259, "new_tokens": 2, "batch_size": 2}, "float32"),
        ("dynamic", {"context": 515, "new_tokens": 4}, "bfloat16"),
    ],
}


@pytest.mark.parametrize("name", REAL)
def test_real_models(name: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(name)[0]
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16":
            model = copy.deepcopy(model).to(torch.bfloat16)
        sizer = CacheSizer(model.config, dtype=dtype, device="cpu")
        assert sizer.weights_bytes == sum(parameter.nbytes for parameter in model.parameters())
        for spec, setting, wanted in REAL[name]:
            if wanted == dtype:
                assert_predicted(model, sizer, spec, **setting)
