"""H2O on a pretrained model: heavy hitters are what a random model does not have."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from kvcache_plugins import H2OCache, create_cache


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
PREFIX, SCORED = 300, 64


@pytest.fixture(scope="module")
def token_ids(smollm2):
    _, tokenizer = smollm2
    return tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids


@torch.inference_mode()
def decoded(model, token_ids, cache):
    """Log-probabilities after every scored token, in chunks that drop tokens between them."""
    logits = [model(token_ids[:, :PREFIX], past_key_values=cache, logits_to_keep=1).logits]
    chunks = token_ids[:, PREFIX : PREFIX + SCORED].split(16, dim=1)
    logits.extend(model(chunk, past_key_values=cache).logits for chunk in chunks)
    return F.log_softmax(torch.cat(logits, dim=1).float(), dim=-1)


def test_distance_from_dense_falls_with_the_budget(smollm2, token_ids):
    model, _ = smollm2
    expected = decoded(model, token_ids, DynamicCache())
    distances = {}
    for ratio in (0.05, 0.1, 0.25):
        cache = H2OCache(model.config, heavy_ratio=ratio, recent_ratio=ratio)
        logits = decoded(model, token_ids, cache)
        distances[ratio] = F.kl_div(logits, expected, log_target=True, reduction="sum").item() / (SCORED + 1)
        # The last chunk is still whole
        assert 0 < cache.stats()["tokens_kept"] <= 30 * (2 * ratio * (PREFIX + SCORED) + 16)
    assert 0 < distances[0.25] < distances[0.1] < distances[0.05] < 2


def test_padded_row_continues_as_it_does_alone(smollm2, token_ids):
    model, tokenizer = smollm2
    lengths = (230, 90)
    input_ids = torch.full((len(lengths), max(lengths)), tokenizer.eos_token_id)
    mask = torch.zeros_like(input_ids)
    for item, length in enumerate(lengths):
        input_ids[item, -length:] = token_ids[0, 200 * item : 200 * item + length]
        mask[item, -length:] = 1
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    cache = create_cache("h2o", model)
    together = model.generate(input_ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.stats()["layers_dropping"] == 30
    assert cache.stats()["dense_reads"] == 0
    assert cache.memory().compression_ratio > 2
    for item, length in enumerate(lengths):
        alone = model.generate(
            input_ids[item : item + 1, -length:], past_key_values=create_cache("h2o", model), **options
        )
        assert torch.equal(together[item, -16:], alone[0, -16:])
    # It says something, and not the same again and again
    assert len(set(together[0, -16:].tolist())) > 8
