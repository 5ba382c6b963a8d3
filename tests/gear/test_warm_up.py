"""`warm_up` runs what a sequence will run, and nobody notices it."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.gear import cache as cache_module
from kvcache_plugins.gear import warm_up


@pytest.fixture(autouse=True)
def nothing_warm():
    warm_up.warm_up_gear.cache_clear()
    yield
    warm_up.warm_up_gear.cache_clear()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ["gear-2bit", "gear-k3v2", "gear-t22"])
def test_leaves_no_trace(name, padded, tiny_llama):
    cache = create_cache(name, tiny_llama)
    before = torch.get_rng_state()
    cache.warm_up(tiny_llama, padded=padded)
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
