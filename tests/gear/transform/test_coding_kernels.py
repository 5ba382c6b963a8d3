"""A cache whose rows kernels code holds the bytes of one whose rows plain PyTorch codes."""

import pytest
import torch
from kernel_cases import DEVICE, needs_triton

from kvcache_plugins import create_cache
from kvcache_plugins.codecs.rows import RowTable
from kvcache_plugins.kernels import engine


pytestmark = needs_triton
# Tokens of the calls: a prompt, more at once than attention has a kernel for, and those that have them coded
CALLS = (80, 21, 17)
# Rows that may differ: where a number lies at a bound to rounding, or a scale between two steps
MOST_DIFFERENT = 0.005


@pytest.fixture
def kernels(monkeypatch):
    """Chooses what codes; what Triton is to code must not come by plain PyTorch."""
    plain = RowTable._encode

    def choose(kernel):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        monkeypatch.setattr(RowTable, "_encode", refuse if kernel == "triton" else plain)

    def refuse(table, numbers):
        raise AssertionError("coded by plain PyTorch")

    return choose


def fill(model, cache, batch_size=2):
    """Caches with the rows of a prompt, with padding, and of the tokens after it."""
    torch.manual_seed(0)
    mask = torch.ones(batch_size, sum(CALLS), dtype=torch.long, device=model.device)
    mask[0, :5] = 0
    first = 0
    with torch.inference_mode():
        for count in CALLS:
            tokens = torch.randint(model.config.vocab_size, (batch_size, count)).to(model.device)
            model(tokens, attention_mask=mask[:, : first + count], past_key_values=cache)
            first += count
    return cache


def check_same_rows(model, make, kernels):
    kernels("torch")
    expected = fill(model, make())
    kernels("triton")
    cache = fill(model, make())
    assert cache.stats()["kernel_fallbacks"] == 0
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        numbers = [each.stats()["tokens_compressed"] for each in (layer, other)]
        # On a GPU the layer stands still: as many of the newest tokens are exact after every call
        assert DEVICE.type == "cuda" or numbers[0] == numbers[1]
        assert min(numbers) >= sum(CALLS[:2]) - 4 - layer.packing.residual_length
        first = layer.blocks[0].start
        for own, rows in zip(stored_rows(layer), stored_rows(other), strict=True):
            own, rows = own[:, :, : min(numbers)], rows[:, :, : min(numbers)]
            # What padding is coded as is nobody's
            own[0, :, : 5 - first], rows[0, :, : 5 - first] = 0, 0
            assert float((own != rows).any(dim=-1).float().mean()) < MOST_DIFFERENT


def stored_rows(layer):
    """Rows of keys and of values."""
    sides = ([(b.keys, b.values)[side][:, :, : b.length] for b in layer.blocks] for side in range(2))
    return [torch.cat(blocks, dim=2) for blocks in sides]


def make_cache(name, model):
    # Layers that stand still have no recent rows, of more bytes
    return create_cache(name, model, recent_length=0)


@pytest.mark.parametrize(
    "name", ["gear", *(pytest.param(f"gear-t{bits}", marks=pytest.mark.long) for bits in (16, 22, 30))]
)
def test_rows_are_those_of_pytorch(name, tiny_model, kernels):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    check_same_rows(model, lambda: make_cache(name, model), kernels)


def test_a_trellis_is_left_to_pytorch(tiny_model, kernels):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    kernels("triton")
    with pytest.raises(AssertionError, match="plain PyTorch"):
        fill(model, create_cache("gear-t16:quantizer=trellis", model))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tensors on the CPU are Triton's in its interpreter alone")
def test_the_choice(monkeypatch):
    states = torch.randn(1, 1, 1, 8)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    assert engine.choose_coding_kernel(states, 8) == "triton"
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    assert engine.choose_coding_kernel(states, 8) == "torch"
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    assert engine.choose_coding_kernel(states.to("meta"), 8) == "torch"
