"""Caches that come and go leave nothing behind: no hooks on the model, no tensors, not themselves."""

import gc
import weakref

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_plugins.registry import create_cache


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("name", ["gear", "h2o", "infinigen", "infinigen-gear", "infinigen-paper"])
def test_many_cycles_leave_nothing(name: str, tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    before, prompt = num_hooks(model), torch.randint(3, 128, (2, 100))
    gone, counts = [], {}
    for cycle in range(12):
        cache = create_cache(name, model)
        model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == 103
        gone.extend(weakref.ref(each) for each in (cache, *cache.layers))
        del cache
        assert num_hooks(model) == before
        # What is made once, as tables of rotations, is made in the first cycles
        if cycle in (2, 11):
            counts[cycle] = num_tensors()
    assert all(reference() is None for reference in gone)
    assert counts[2] == counts[11]


@pytest.mark.parametrize("name", ["h2o", "infinigen"])
def test_a_pass_that_fails_leaves_nothing(name: str, tiny_model) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    before, cache = num_hooks(model), create_cache(name, model)

    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"), torch.no_grad():
        model(torch.randint(3, 128, (1, 50)), past_key_values=cache)
    handle.remove()
    reference = weakref.ref(cache)
    del cache
    gc.collect()
    assert reference() is None
    assert num_hooks(model) == before
