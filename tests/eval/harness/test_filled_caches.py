"""Caches filled with states answer as those that read the tokens, and hold as many as they should."""

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.eval.harness.filled_caches import fill_cache, read_states
from kvcache_plugins.registry import parse_cache_spec


@pytest.mark.parametrize("name", ["dynamic", "gear-k4v3", "infinigen:share=1,max_fetch_ratio=1"])
def test_filled_with_what_was_read_once_it_answers_as_if_it_had_read(name, tiny_llama):
    token_ids = torch.randint(3, 128, (1, 130))
    name, options = parse_cache_spec(name)
    read, filled = (create_cache(name, tiny_llama, **options) for _ in range(2))
    fill_cache(filled, read_states(tiny_llama, token_ids), 130)
    with torch.inference_mode():
        tiny_llama(token_ids, past_key_values=read)
        expected, logits = (tiny_llama(token_ids[:, :1], past_key_values=cache).logits for cache in (read, filled))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("context", [1, 63, 200])
def test_states_are_repeated_for_longer_contexts(context, tiny_llama):
    states = read_states(tiny_llama, torch.randint(3, 128, (1, 63)))
    cache = create_cache("dynamic", tiny_llama)
    fill_cache(cache, states, context, batch_size=3)
    keys, values = cache.layers[-1].keys, cache.layers[-1].values
    assert keys.shape[0] == 3 and keys.shape[2] == values.shape[2] == cache.get_seq_length() == context
    last = (context - 1) % 63
    assert torch.equal(keys[2, :, -1], states[-1][0][0, :, last])
    assert torch.equal(values[0, :, -1], states[-1][1][0, :, last])


@pytest.mark.parametrize("name", ["gear-k4v3", "gear-t22"])
def test_items_of_a_batch_answer_alike(name, tiny_llama):
    cache = create_cache(name, tiny_llama)
    fill_cache(cache, read_states(tiny_llama, torch.randint(3, 128, (1, 64))), 256, batch_size=2)
    with torch.inference_mode():
        logits = tiny_llama(torch.tensor([[5], [5]]), past_key_values=cache).logits
    torch.testing.assert_close(logits[0], logits[1])
    assert cache.stats()["tokens_compressed"] > 0
