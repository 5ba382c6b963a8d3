"""Caches on pretrained models: what tiny random ones cannot show."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import H2OCache, InfiniGenCache, create_cache
from kvcache_plugins.layers.compressed_layer import CompressedLayer


TEXT = Path(__file__).resolve().parents[2] / "LICENSE"
PREFIX = 200
EVERYTHING = {"alpha": float("inf"), "max_fetch_ratio": 1.0, "speculate": True}
NUM_NEW = 8


def generate(model, batch, cache):
    options = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    return model.generate(**batch, past_key_values=cache, **options)


@pytest.mark.parametrize(
    "lengths", [pytest.param((200,), marks=pytest.mark.long), (200, 131, 47)], ids=["one", "left-padded"]
)
@pytest.mark.parametrize("name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_everything_fetched_says_the_same(name, lengths, licence_batch, request) -> None:
    model, _ = request.getfixturevalue(name)
    # To Gemma another text
    batch = licence_batch(*lengths)
    with InfiniGenCache(model, **EVERYTHING) as cache:
        output = generate(model, batch, cache)
    expected = generate(model, batch, DynamicCache(config=model.config))
    assert torch.equal(output.sequences, expected.sequences)
    logits, expected_logits = (torch.stack(each.logits) for each in (output, expected))
    torch.testing.assert_close(logits, expected_logits, atol=1e-4, rtol=0)
    stats = cache.stats()
    assert stats["speculated_calls"] == stats["selected_calls"] == (NUM_NEW - 1) * stats["layers_offloaded"]
    assert stats["dense_reads"] == 0


@pytest.mark.long
def test_a_tenth_of_the_tokens_is_enough(smollm2, licence_ids, divergence) -> None:
    model, sizes = smollm2[0], (licence_ids[:, :1300], 1, 1300 - 32)
    with InfiniGenCache(model, max_fetch_ratio=0.15, track_hits=True) as cache:
        kl = divergence(model, cache, *sizes)
    stats = cache.stats()
    share = stats["tokens_fetched"] / stats["tokens_fetchable"]
    assert 0.05 < share < 0.12
    # Expected queries choose what the true ones would have chosen
    assert stats["hits"] > 0.7 * stats["hits_possible"]
    h2o = divergence(model, H2OCache(model.config, heavy_ratio=share / 2, recent_ratio=share / 2), *sizes)
    assert kl < min(0.03, h2o / 3)


@pytest.mark.slow
@pytest.mark.parametrize("model_name", ["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def test_decoding_is_near_a_dense_cache(model_name, request, divergence):
    model, tokenizer = request.getfixturevalue(model_name)
    token_ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, : PREFIX + 12]
    kl = {}
    for name, bound in (("gear-t16", 0.15), ("gear-t30", 0.01)):
        cache = create_cache(name, model)
        # One token after another
        kl[name] = divergence(model, cache, token_ids, 1, PREFIX)
        assert 0 < kl[name] < bound
        layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
        # The layout of the rotary embedding is told from keys alone
        assert {layer.codec.rope.name for layer in layers} == {"half-split"}
        assert sum(block.length for block in layers[0].blocks) > PREFIX
    assert kl["gear-t30"] < kl["gear-t16"] / 4
