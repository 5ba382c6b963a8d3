"""A cache whose rows kernels code holds the bytes of one whose rows plain PyTorch codes."""

import pytest
import torch
from kernel_cases import DEVICE, needs_triton

from kvcache_plugins import create_cache
from kvcache_plugins.kernels import engine, reference


pytestmark = needs_triton
# On a GPU as many of the newest tokens are exact after every call
STANDS_STILL = DEVICE.type == "cuda"
# Tokens of the calls: a prompt, more at once than attention has a kernel for, and those that have them coded
CALLS = (80, 21, 17)
# Rows that may differ: where a number lies at a bound to rounding, or a scale between two steps
MOST_DIFFERENT = 0.005


@pytest.fixture
def kernels(monkeypatch):
    """Chooses what codes; what Triton is to code must not come by plain PyTorch."""
    plain = reference.encode_rows

    def choose(kernel):
        monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", kernel)
        monkeypatch.setattr(reference, "encode_rows", refuse if kernel == "triton" else plain)

    def refuse(*_):
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


def stored_rows(layer):
    """List first tokens, key rows and value rows of blocks, joined, as a static layer has other blocks."""
    blocks = [
        (each.start, *(rows[:, :, : each.length] for rows in (each.keys, each.values)))
        for each in layer.storage.segments
    ]
    return (
        [(blocks[0][0], *(torch.cat([b[side] for b in blocks], dim=2) for side in (1, 2)))] if STANDS_STILL else blocks
    )


@pytest.mark.parametrize(
    "name", ["transform", *(pytest.param(f"transform-{bits}", marks=pytest.mark.long) for bits in (16, 22, 30))]
)
def test_rows_equal_pytorch(name, tiny_model, kernels):
    model = tiny_model("llama", num_hidden_layers=1).to(DEVICE)
    # Nor are there recent rows then, of more bytes
    options = {"recent_length": 0} if STANDS_STILL else {}
    kernels("torch")
    expected = fill(model, create_cache(name, model, **options))
    kernels("triton")
    cache = fill(model, create_cache(name, model, **options))
    assert cache.stats()["kernel_fallbacks"] == 0
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        least = sum(CALLS[:2]) - 4 - (layer.policy.residual_length if STANDS_STILL else layer.policy.num_kept)
        numbers = [each.stats()["tokens_compressed"] for each in (layer, other)]
        assert min(numbers) >= least and (STANDS_STILL or numbers[0] == numbers[1])
        for block, known in zip(stored_rows(layer), stored_rows(other), strict=True):
            assert block[0] == known[0]
            for own, rows in zip(block[1:], known[1:], strict=True):
                own, rows = own[:, :, : min(numbers)].clone(), rows[:, :, : min(numbers)].clone()
                # Codes of padding mean nothing
                own[0, :, : 5 - block[0]], rows[0, :, : 5 - block[0]] = 0, 0
                assert float((own != rows).any(dim=-1).float().mean()) < MOST_DIFFERENT


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tensors on the CPU are Triton's in its interpreter alone")
def test_kernels_are_chosen_by_device_and_setting(monkeypatch):
    states = torch.randn(1, 1, 1, 8)
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "triton")
    assert engine.choose_coding_kernel(states, 8) == "triton"
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "torch")
    assert engine.choose_coding_kernel(states, 8) == "torch"
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    assert engine.choose_coding_kernel(states.to("meta"), 8) == "torch"
