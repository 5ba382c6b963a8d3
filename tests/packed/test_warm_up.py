"""Kernel checks: a wrong output is not timed, and NaN is wrong; `warm_up` runs the kernels of a sequence, and
changes nothing else.
"""

import os

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import create_cache
from kvcache_plugins.eval.kernel_check import MismatchError, plain_pytorch, require_close, require_close_layers
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.packed import warm_up
from kvcache_plugins.transform_coding.calibration import calibrate_transform


def test_error_is_relative_to_the_output():
    expected = torch.full((4, 4), 100.0)
    assert require_close("x", expected + 0.01, expected) == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize("wrong", [1.01, float("nan"), float("inf")], ids=str)
def test_a_wrong_output_raises(wrong):
    with pytest.raises(MismatchError, match="x is wrong by .*: not timed"):
        require_close("x", torch.full((4,), wrong), torch.ones(4))


def test_plain_pytorch_is_restored_after_its_block(monkeypatch):
    name = "KVCACHE_PLUGINS_KERNELS"
    monkeypatch.delenv(name, raising=False)
    with pytest.raises(KeyError), plain_pytorch():
        assert os.environ[name] == "torch"
        raise KeyError
    assert name not in os.environ
    monkeypatch.setenv(name, "compiled")
    with plain_pytorch():
        assert os.environ[name] == "torch"
    assert os.environ[name] == "compiled"


def filled(name):
    cache = create_cache(name)
    for index in range(2):
        cache.update(torch.randn(2, 2, 70, 64), torch.randn(2, 2, 70, 64), index)
    return cache


def test_every_layer_is_checked(monkeypatch):
    cache = filled("gear-2bit")
    error = require_close_layers("gear-2bit", cache, num_query_heads=4)
    assert error is not None and error < 1e-3
    assert cache.stats()["fused_calls"] == 2
    attend = CompressedLayer.attend

    def wrong_in_the_second(self, query, *args, **kwargs):
        output = attend(self, query, *args, **kwargs)
        is_wrong = self.layer_idx == 1 and os.environ.get("KVCACHE_PLUGINS_KERNELS") != "torch"
        return output * 1.1 if is_wrong else output

    monkeypatch.setattr(CompressedLayer, "attend", wrong_in_the_second)
    with pytest.raises(MismatchError, match="gear-2bit, layer 1"):
        require_close_layers("gear-2bit", cache, num_query_heads=4)


def test_checks_of_layers_leave_no_trace():
    """A layer that has no table yet would make it of the queries too."""
    cache, short = filled("transform-22"), create_cache("transform-22")
    short.update(torch.randn(1, 2, 40, 64), torch.randn(1, 2, 40, 64), 0)
    error = require_close_layers("transform-22", cache, num_query_heads=4)
    assert error is not None and error < 1e-3
    assert cache.stats()["fused_calls"] == 2
    assert require_close_layers("transform-22", short, num_query_heads=4) is not None
    assert short.layers[0].state().moments is None


def test_a_dense_cache_has_nothing_to_check():
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 8, 64), torch.randn(1, 2, 8, 64), 0)
    assert require_close_layers("dynamic", cache, num_query_heads=4) is None


@pytest.fixture(autouse=True)
def nothing_warm():
    warm_up._KNOWN_KINDS.clear()
    yield
    warm_up._KNOWN_KINDS.clear()


@pytest.fixture
def exercised(monkeypatch):
    """Layers that were taken through a sequence."""
    layers, exercise = [], warm_up.exercise

    def noting(layer, *args, **kwargs):
        exercise(layer, *args, **kwargs)
        layers.append(layer)

    monkeypatch.setattr(warm_up, "exercise", noting)
    return layers


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["gear-2bit", "gear-k4v3", "transform-22"])
def test_warm_up_leaves_no_trace(name, padded, tiny_llama):
    cache = create_cache(name, tiny_llama)
    before = torch.get_rng_state()
    cache.warm_up(tiny_llama, padded=padded)
    assert torch.equal(torch.get_rng_state(), before)
    assert cache.get_seq_length() == 0
    assert cache.stats()["attend_calls"] == 0


def test_warm_up_runs_packing_and_attention(tiny_llama, exercised):
    for _ in range(2):
        create_cache("gear-k4v3", tiny_llama).warm_up(tiny_llama)
    # A prompt whose sinks stand within its first group, and one whose sinks stand before it; once a process
    assert [[block.length for block in layer.storage.segments] for layer in exercised] == [[128, 64], [128, 64]]
    assert all(layer.stats()["attend_calls"] == 3 for layer in exercised)


def test_every_length_of_rows_is_warmed_up_once(tiny_llama, random_windows, exercised):
    calibration = calibrate_transform(tiny_llama, random_windows(1, 200), num_draws=1)
    cache = create_cache("calibrated-16", tiny_llama, calibration=calibration)
    sizes = {layer.policy.shared_codec.row_sizes for layer in cache.layers}
    assert len(sizes) > 1
    for _ in range(2):
        cache.warm_up(tiny_llama)
    assert sorted(layer.codec.row_sizes for layer in exercised) == sorted(sizes)
    # A prompt and a chunk
    assert all(layer.stats()["chunks_compressed"] == 2 for layer in exercised)


def test_warm_up_packs_with_long_buffers_too(tiny_llama, exercised):
    cache = create_cache("transform-22", tiny_llama, residual_length=200)
    cache.warm_up(tiny_llama)
    assert [block.length for block in exercised[0].storage.segments] == [319, 96]
