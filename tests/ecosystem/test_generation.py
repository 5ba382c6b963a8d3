"""Ways to call `generate` beyond those of the contract, and what a mistake in the call leads to."""

import functools

import pytest
import torch

from kvcache_plugins import create_cache
from kvcache_plugins.contract.subject import RECORDS_PAST
from kvcache_plugins.models.cache_argument import as_argument


def test_inputs_embeds(cache_name, tiny_llama, make_cache, prompt, generate):
    expected = generate(tiny_llama, prompt(), make_cache(cache_name, tiny_llama))
    embeds = tiny_llama.get_input_embeddings()(prompt())
    cache = make_cache(cache_name, tiny_llama)
    tokens = tiny_llama.generate(inputs_embeds=embeds, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert torch.equal(tokens, expected)


@pytest.mark.skipif(not RECORDS_PAST, reason="this release of Transformers sets a `cache_implementation` of its own")
def test_the_assistant_has_a_cache_of_its_own(cache_name, tiny_model, make_cache, prompt, generate):
    model, assistant = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1 + (cache_name == "infinigen"))
    with torch.no_grad():
        assistant.lm_head.weight += 0.02 * torch.randn(assistant.lm_head.weight.shape)
    expected = generate(model, prompt(15))
    own = make_cache(cache_name, assistant)
    # `generate` has no argument for it
    assistant.generate = functools.partial(assistant.generate, **as_argument(own))
    tokens = generate(model, prompt(15), assistant_model=assistant)
    assert torch.equal(tokens, expected)
    assert own.get_seq_length() > 15


def test_another_batch_is_refused_and_nothing_lost(cache_name, tiny_llama, make_cache, prompt):
    cache, untouched = (make_cache(cache_name, tiny_llama) for _ in range(2))
    with torch.no_grad():
        for each in (cache, untouched):
            tiny_llama(prompt(), past_key_values=each)
        with pytest.raises(ValueError, match="`past_key_values` holds 1 sequences of 100 tokens, but got states of 2"):
            tiny_llama(prompt(5, num_rows=2), past_key_values=cache)
        # A single token, of which a cache may have chosen ahead what it attends to, and several
        for more in (prompt(1, seed=1), prompt(3, seed=2)):
            logits, expected = (tiny_llama(more, past_key_values=each).logits for each in (cache, untouched))
            assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", ["dynamic", "gear-2bit", "infinigen", "h2o"])
def test_mistakes_that_no_cache_can_notice_show_in_its_length(name, tiny_llama, prompt, generate):
    cache = create_cache(name, tiny_llama)
    try:
        generate(tiny_llama, prompt(), cache, use_cache=False, max_new_tokens=3)
    except ValueError as error:
        # InfiniGen hears positions; older releases of Transformers give all caches a mask that hides what is new
        assert "a new cache for each prompt" in str(error)
        assert name == "infinigen" or name != "dynamic" and not RECORDS_PAST
    else:
        assert name != "infinigen" and cache.get_seq_length() == 100 + 101 + 102
    cache = create_cache(name, tiny_llama)
    generate(tiny_llama, prompt(), cache)
    # 107 tokens are taken for the beginning of this prompt
    generate(tiny_llama, prompt(120, seed=1), cache)
    assert cache.get_seq_length() == 120 + 7
