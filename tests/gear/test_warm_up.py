"""`warm_up` runs what a sequence will run, and nobody notices it."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.gear import cache as cache_module
from kvcache_plugins.gear import warm_up
from kvcache_plugins.gear.transform import warm_up as row_warm_up
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.gear.transform.layer import TransformLayer


exercise = warm_up.exercise


@pytest.fixture(autouse=True)
def nothing_warm():
    kept = (warm_up.warm_up_gear, row_warm_up._known_kinds)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


@pytest.mark.parametrize("captured", [False, True], ids=["", "captured"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["gear-2bit", "gear-k3v2", "gear-t22"])
def test_leaves_no_trace(name, padded, captured, tiny_llama):
    cache = create_cache(name, tiny_llama)
    before = torch.get_rng_state()
    cache.warm_up(tiny_llama, padded=padded, captured=captured)
    assert torch.equal(torch.get_rng_state(), before)
    assert cache.get_seq_length() == 0
    assert cache.stats()["attend_calls"] == 0


def test_goes_through_compression_and_attention(tiny_llama, monkeypatch):
    layers = []

    class Layer(cache_module.GEARLayer):
        def __init__(self, *args):
            super().__init__(*args)
            layers.append(self)

    cache = create_cache("gear-k3v2", tiny_llama)
    monkeypatch.setattr(cache_module, "GEARLayer", Layer)
    for _ in range(2):
        cache.warm_up(tiny_llama)
    # A prompt whose sinks stand within its first group, and one whose sinks stand before it; once a process
    assert len(layers) == 2
    for layer in layers:
        assert [block.length for block in layer.blocks] == [128, 64]
        assert layer.stats()["attend_calls"] == 1


@pytest.mark.parametrize("captured", [False, True])
def test_every_length_of_rows_is_warmed_up_once(captured, tiny_llama, random_windows, monkeypatch):
    calibration = calibrate_transform(tiny_llama, random_windows(1, 200), num_draws=1)
    cache = create_cache("gear-c16", tiny_llama, calibration=calibration)
    sizes = {layer.fixed.row_sizes for layer in cache.layers}
    assert len(sizes) > 1
    coded, step_parts = [], []

    def add_rows(self, keys, values, start, add=TransformLayer._add_rows):
        coded.append((keys.shape[3], values.shape[3]))
        add(self, keys, values, start)

    def parts(self, stored, make=TransformLayer.step_parts):
        step_parts.append(self.fixed.row_sizes)
        return make(self, stored)

    monkeypatch.setattr(TransformLayer, "_add_rows", add_rows)
    monkeypatch.setattr(TransformLayer, "step_parts", parts)
    for _ in range(2):
        cache.warm_up(tiny_llama, captured=captured)
    # A prompt and a chunk
    assert sorted(coded) == sorted(2 * list(sizes))
    assert sorted(step_parts) == (sorted(sizes) if captured else [])


def test_options_that_wait_for_long_are_coded_too(tiny_llama, monkeypatch):
    cache, layers = create_cache("gear-t22", tiny_llama, residual_length=200), []
    monkeypatch.setattr(
        row_warm_up, "exercise", lambda layer, *args, **kwargs: (exercise(layer, *args), layers.append(layer))
    )
    cache.warm_up(tiny_llama)
    assert [block.length for block in layers[0].blocks] == [65 + 200]
