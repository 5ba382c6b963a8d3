"""Padding of a whole chunk, block or sequence: it is stored nowhere, and nothing is read of it."""

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import create_cache


# With options with which nothing is lost; one for each kind of codec
EXACT = {
    "infinigen": {"alpha": float("inf"), "max_fetch_ratio": 1.0, "full_layers": ()},
    "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
}
NAMES = [*EXACT, "transform", "gear-4bit", "gear-2bit", "kivi-2bit", "kvarn-k4v4", "llamacpp-q8_0", "turboquant-4bit"]
# Tokens of a prompt, how many of them are real, and tokens of a chunk
CHUNKS = [(256, 60, 64), (128, 20, 64), (12, 3, 4)]


def read(model, cache, input_ids, mask, chunk):
    """Logits `[B, vocabulary]` of the token behind a prompt that is read in chunks."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    options = {"past_key_values": cache, "attention_mask": mask, "position_ids": positions}
    length = mask.shape[1]
    for start in [*range(0, length - 1, chunk), length - 1]:
        part = slice(start, min(start + chunk, length - 1) if start < length - 1 else length)
        options |= {"attention_mask": mask[:, : part.stop], "position_ids": positions[:, part]}
        logits = model(input_ids[:, part], **options).logits[:, -1]
    return logits


def divergence(expected, logits):
    expected, logits = expected.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    return float((expected.exp() * (expected - logits)).sum(dim=-1).mean())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("length", "num_real", "chunk"), CHUNKS)
@torch.no_grad()
def test_chunks_of_padding_change_nothing(length, num_real, chunk, name, tiny_llama):
    input_ids, mask = torch.randint(3, 128, (2, length + 1)), torch.ones(2, length + 1, dtype=torch.long)
    mask[0, : length - num_real] = 0
    mask[1, : length - num_real - 1] = 0
    cache = create_cache(name, tiny_llama, **EXACT.get(name, {}))
    logits = read(tiny_llama, cache, input_ids, mask, chunk)
    real = slice(length - num_real - 1, None)
    # Without the columns that are padding of all
    alone = create_cache(name, tiny_llama, **EXACT.get(name, {}))
    expected = read(tiny_llama, alone, input_ids[:, real], mask[:, real], chunk)
    dense = read(tiny_llama, DynamicCache(), input_ids[:, real], mask[:, real], chunk)
    if name in EXACT:
        assert torch.allclose(logits, dense, atol=1e-4)
    else:
        assert divergence(dense, logits) <= 1.5 * divergence(dense, expected) + 0.02
    if name in ("transform", "gear-4bit", "gear-2bit", "kivi-2bit", "kvarn-k4v4"):
        # Others pack tokens before attention shows that they are padding, or nothing
        starts = [block.start for layer in cache.layers for block in layer.storage.segments if block.length]
        assert all(start >= length - num_real - 1 for start in starts)


@pytest.mark.parametrize("chunk", [64, 200])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_sequence_of_padding_does_not_change_the_others(chunk, name, tiny_llama):
    input_ids, mask = torch.randint(3, 128, (2, 151)), torch.ones(2, 151, dtype=torch.long)
    mask[0] = 0
    cache, alone = (create_cache(name, tiny_llama, **EXACT.get(name, {})) for _ in range(2))
    logits = read(tiny_llama, cache, input_ids, mask, chunk)
    expected = read(tiny_llama, alone, input_ids[1:], mask[1:], chunk)
    assert logits.isfinite().all()
    assert torch.allclose(logits[1:], expected, atol=1e-3)
