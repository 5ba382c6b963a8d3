"""Attention of every GEAR preset over what it stores, by Triton's kernels: on a GPU all, in the interpreter a few."""

import functools

import pytest
import torch
from kernel_cases import DEVICE, needs_triton

from kvcache_plugins import create_cache
from kvcache_plugins.eval.benchmarks.step import llama, random_model
from kvcache_plugins.eval.gpu import DTYPE, random_tokens
from kvcache_plugins.eval.kernel_check import require_close_layers
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import describe_caches
from kvcache_plugins.transform_coding.calibration import calibrate_transform


pytestmark = needs_triton
ON_GPU = DEVICE.type == "cuda"
INTERPRETED = ("transform", "calibrated-16", "gear-2bit")
# Tiles of KVarN, a peer, are for plain PyTorch
OURS = [
    entry.name for entry in describe_caches() if str(entry.factory).endswith((":GEARCache", ":TransformCodingCache"))
]
PRESETS = [name for name in OURS if not name.startswith("kvarn")]
# A prompt, decoded tokens at once that the update after them compresses, and one more
SIZES, TOKENS = (
    ((1000, 1024, 1024, 2, 8, 2, 4096), (600, 64, 1)) if ON_GPU else ((128, 64, 64, 1, 4, 2, 1024), (70, 64, 1))
)


@functools.cache
def make_model():
    return random_model(llama(*SIZES), DTYPE, DEVICE)


@functools.cache
def make_calibration():
    return calibrate_transform(make_model(), [random_tokens(make_model(), 512)[0]], num_draws=1)


def test_presets_are_listed():
    assert len(PRESETS) > 9 and {*INTERPRETED} <= {*PRESETS}


@pytest.mark.parametrize("name", PRESETS if ON_GPU else INTERPRETED)
def test_attention_of_presets_equals_pytorch(name, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    model = make_model()
    cache = create_cache(name, model, **({"calibration": make_calibration()} if name.startswith("calibrated") else {}))
    with torch.inference_mode():
        for count in TOKENS:
            model(random_tokens(model, count), **as_argument(cache), logits_to_keep=1)
        error = require_close_layers(name, cache, model.config.num_attention_heads)
    stats = cache.stats()
    assert error is not None and 0 < error < 5e-3
    assert stats["kernel_fallbacks"] == 0 < stats["fused_calls"]
