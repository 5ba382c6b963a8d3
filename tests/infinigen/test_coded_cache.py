"""`InfiniGenGEARCache` as a whole: options, what it attends to, and what it costs."""

import pytest
import torch
from decoding import EVERYTHING, assert_same, decode_logits, tokens
from transformers import DynamicCache

from kvcache_plugins import InfiniGenCache, InfiniGenGEARCache


@pytest.mark.each_value
@pytest.mark.parametrize("pool_tokens", [None, 150])
@pytest.mark.parametrize("architecture", ["llama", "llama-mha", "llama-mqa", "gemma3-hybrid"])
def test_everything_fetched_is_attention_over_all_codes(architecture, pool_tokens, tiny_model) -> None:
    """Single tokens, which choose, against the same tokens at once, which attend to everything page by page."""
    model = tiny_model(architecture)
    prompt, steps = tokens(330, 2), tokens(9, 2, seed=1)
    with InfiniGenGEARCache(model, pool_tokens=pool_tokens, **EVERYTHING) as cache:
        chosen = decode_logits(model, cache, prompt, steps)
    assert (cache.stats()["tokens_evicted"] > 0) is (pool_tokens is not None)
    with InfiniGenGEARCache(model, pool_tokens=pool_tokens, **EVERYTHING) as cache, torch.no_grad():
        model(prompt, past_key_values=cache)
        expected = model(steps, past_key_values=cache).logits
    assert cache.stats()["exact_calls"]
    assert_same(chosen[:, 1:], expected, 2e-3)


def test_eight_bits_are_nearly_dense(tiny_model) -> None:
    model, prompt, steps = tiny_model("llama"), tokens(330, 2), tokens(80, 2, seed=1)
    expected = decode_logits(model, DynamicCache(config=model.config), prompt, steps)
    errors = []
    for nbits in (8, 4, 2):
        with InfiniGenGEARCache(model, key_nbits=nbits, value_nbits=nbits, **EVERYTHING) as cache:
            errors.append((decode_logits(model, cache, prompt, steps) - expected).abs().max().item())
    assert errors[0] < 0.05 * errors[2] and errors == sorted(errors)
    # Decoded tokens have moved on into rows too
    assert cache.layers[0].pool.num_slots == 330 - 32 + 64


def test_bytes_are_a_fraction_of_infinigens(tiny_model) -> None:
    model, prompt, steps = tiny_model("llama"), tokens(900), tokens(4, seed=1)
    options = {"share": 0.1, "full_layers": ()}
    caches = [InfiniGenCache(model, **options), InfiniGenGEARCache(model, **options)]
    for cache in caches:
        decode_logits(model, cache, prompt, steps)
    plain, coded = (cache.stats() for cache in caches)
    assert plain["tokens_fetched"] == coded["tokens_fetched"]
    # 13 bytes of codes and a scale, instead of 64 numbers in float32
    assert coded["bytes_fetched"] / plain["bytes_fetched"] == 14 / 256
    assert caches[1].memory().total_bytes < caches[0].memory().total_bytes / 5


@pytest.mark.parametrize("length, padding", [(75, 8), (64, 1), (130, 66), (150, 81)])
def test_a_padded_row_is_as_alone(length, padding, tiny_model) -> None:
    """The host makes room for as many tokens as the batch is long, and fewer of them are real."""
    model, prompt, steps = tiny_model("llama"), tokens(length), tokens(4, seed=1)
    mask = (torch.arange(length) >= padding).long()[None]
    with InfiniGenGEARCache(model, **EVERYTHING) as cache:
        logits = decode_logits(model, cache, prompt, steps, mask)
    with InfiniGenGEARCache(model, **EVERYTHING) as cache:
        assert_same(logits, decode_logits(model, cache, prompt[:, padding:], steps), 1e-3)
