"""Threads that generate with one model at once, each with a cache of its own, say what each says alone; caches that
come and go leave nothing behind: no hooks on the model, no tensors, not themselves.
"""

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from decoding import decode_logits, tokens
from transformers import PreTrainedModel

from kvcache_plugins.registry import create_cache


NUM_THREADS = 4
NUM_STEPS = 20
# One of each kind
NAMES = (
    "transform",
    "gear-2bit",
    "infinigen",
    "infinigen-transform",
    "h2o",
    "turboquant-3bit",
)


@pytest.fixture(scope="module")
def model(tiny_model) -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=4)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Python gives threads turns far more often than by default, between any two steps of a forward pass."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def decode(model: PreTrainedModel, name: str, batch_size: int, ready: threading.Barrier | None = None) -> torch.Tensor:
    """Logits of a prompt's last token and of every step after it, of a batch that its size tells."""
    prompt, steps = (tokens(count, batch_size, batch_size) for count in (90 + 10 * batch_size, NUM_STEPS))
    cache = create_cache(name, model)
    if ready is not None:
        ready.wait()
    return decode_logits(model, cache, prompt, steps)


def decode_together(model: PreTrainedModel, names: list[str]) -> list[torch.Tensor]:
    """Decodes batches of 1, 2, ... sequences, each in a thread and with the cache that is named."""
    ready = threading.Barrier(len(names), timeout=300)
    with ThreadPoolExecutor(len(names)) as threads:
        sizes = range(1, len(names) + 1)
        return list(threads.map(lambda name, size: decode(model, name, size, ready), names, sizes))


@pytest.mark.parametrize("name", NAMES)
def test_every_cache_in_a_thread_generates_as_alone(
    name: str, model: PreTrainedModel, frequent_switches: None
) -> None:
    alone = [decode(model, name, number + 1) for number in range(NUM_THREADS)]
    together = decode_together(model, [name] * NUM_THREADS)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_sixteen_threads_may_share_a_model(model: PreTrainedModel) -> None:
    names = ["transform", "gear-2bit", "h2o", "dynamic"] * 4
    alone = [decode(model, name, number + 1) for number, name in enumerate(names)]
    assert all(torch.equal(*pair) for pair in zip(alone, decode_together(model, names), strict=True))


def test_different_caches_do_not_disturb_each_other(model: PreTrainedModel, frequent_switches: None) -> None:
    names = ["infinigen-paper", "dynamic", "infinigen-transform", "h2o"]
    alone = [decode(model, name, number + 1) for number, name in enumerate(names)]
    # Hooks come and go while others generate
    for _ in range(3):
        together = decode_together(model, names)
        assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def num_hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("name", ["transform", "h2o", "infinigen", "infinigen-transform", "infinigen-paper"])
def test_many_cycles_leave_no_memory(name: str, tiny_model) -> None:
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
        # Tables of rotations, and all else that is made once, are made in the first cycles
        if cycle in (2, 11):
            gc.collect()
            counts[cycle] = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
    assert all(reference() is None for reference in gone)
    assert counts[2] == counts[11]


@pytest.mark.parametrize("name", ["h2o", "infinigen"])
def test_a_failed_forward_leaves_no_state(name: str, tiny_model) -> None:
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
