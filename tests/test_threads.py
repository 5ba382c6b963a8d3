"""Threads that generate with one model at once, each with a cache of its own, say what each says alone."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from decoding import decode_logits, tokens
from transformers import PreTrainedModel

from kvcache_plugins.registry import create_cache


NUM_THREADS = 4
NUM_STEPS = 20
# One of each kind
NAMES = ("gear", "gear-2bit", "gear-t16:quantizer=trellis", "infinigen", "infinigen-gear", "h2o", "turboquant-3bit")


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
    ready = threading.Barrier(len(names))
    results: list[torch.Tensor | None] = [None] * len(names)
    errors: list[Exception] = []

    def work(number: int) -> None:
        try:
            results[number] = decode(model, names[number], number + 1, ready)
        except Exception as error:  # noqa: BLE001 (told by the thread that tests)
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return [result for result in results if result is not None]


@pytest.mark.parametrize("name", NAMES)
def test_every_cache_says_what_it_says_alone(name: str, model: PreTrainedModel, frequent_switches: None) -> None:
    alone = [decode(model, name, number + 1) for number in range(NUM_THREADS)]
    together = decode_together(model, [name] * NUM_THREADS)
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_different_caches_do_not_disturb_each_other(model: PreTrainedModel, frequent_switches: None) -> None:
    names = ["infinigen-paper", "dynamic", "infinigen-gear", "h2o"]
    alone = [decode(model, name, number + 1) for number, name in enumerate(names)]
    # Hooks come and go while others generate
    for _ in range(3):
        together = decode_together(model, names)
        assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
