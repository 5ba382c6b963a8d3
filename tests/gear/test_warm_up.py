"""`warm_up` runs what a sequence will run, and nobody notices it."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.gear import warm_up
from kvcache_plugins.gear.transform.calibration import calibrate_transform


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
@pytest.mark.parametrize("name", ["gear-2bit", "gear-k4v3", "gear-t22"])
def test_leaves_no_trace(name, padded, tiny_llama):
    cache = create_cache(name, tiny_llama)
    before = torch.get_rng_state()
    cache.warm_up(tiny_llama, padded=padded)
    assert torch.equal(torch.get_rng_state(), before)
    assert cache.get_seq_length() == 0
    assert cache.stats()["attend_calls"] == 0


def test_goes_through_packing_and_attention(tiny_llama, exercised):
    cache = create_cache("gear-k4v3", tiny_llama)
    for _ in range(2):
        cache.warm_up(tiny_llama)
    # A prompt whose sinks stand within its first group, and one whose sinks stand before it; once a process
    assert [[block.length for block in layer.blocks] for layer in exercised] == [[128, 64], [128, 64]]
    assert all(layer.stats()["attend_calls"] == 2 for layer in exercised)


def test_every_length_of_rows_is_warmed_up_once(tiny_llama, random_windows, exercised):
    calibration = calibrate_transform(tiny_llama, random_windows(1, 200), num_draws=1)
    cache = create_cache("gear-c16", tiny_llama, calibration=calibration)
    sizes = {layer.packing.fixed.row_sizes for layer in cache.layers}
    assert len(sizes) > 1
    for _ in range(2):
        cache.warm_up(tiny_llama)
    assert sorted(layer.codec.row_sizes for layer in exercised) == sorted(sizes)
    # A prompt and a chunk
    assert all(layer.stats()["chunks_compressed"] == 2 for layer in exercised)


def test_options_that_wait_for_long_are_coded_too(tiny_llama, exercised):
    cache = create_cache("gear-t22", tiny_llama, residual_length=200)
    cache.warm_up(tiny_llama)
    assert [block.length for block in exercised[0].blocks] == [383, 32]
