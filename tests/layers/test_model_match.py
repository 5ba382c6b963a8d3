"""A cache and a model, or a prompt, that do not belong together: one sentence, and the cache can still be used."""

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import GEARCache, H2OCache, create_cache
from kvcache_plugins.contract.subject import RECORDS_PAST


CACHES = [GEARCache, H2OCache]
ANOTHER = r"a new cache for each prompt, or call `reset\(\)`"


def generate(model, input_ids, cache, **options):
    options = {"max_new_tokens": 4, "do_sample": False, **options}
    return model.generate(input_ids, past_key_values=cache, **options)


def prompt(length=148, batch_size=1):
    return torch.randint(3, 128, (batch_size, length))


def lengths(cache):
    return [layer.get_seq_length() for layer in cache.layers]


@pytest.mark.parametrize("cache_class", CACHES)
def test_another_models_config(cache_class, tiny_llama, tiny_model):
    deeper, wider = tiny_model("llama", num_hidden_layers=4), tiny_model("llama-mha")
    for own, other, message in (
        (tiny_llama, deeper, "made for a model of 2 layers, but .* has more: make one with"),
        (tiny_llama, wider, "made for a model of 2 key/value heads, but layer 0 .* has 4"),
        (deeper, tiny_llama, f"model of 4 layers, but the last forward had states for 2 .*{ANOTHER}"),
    ):
        cache, input_ids = cache_class(own.config), prompt()
        with pytest.raises(ValueError, match=message):
            generate(other, input_ids, cache)
        if own is deeper:
            cache.reset()
        assert not any(lengths(cache))
        expected = generate(own, input_ids, cache_class(own.config))
        assert torch.equal(generate(own, input_ids, cache), expected)


@pytest.mark.parametrize("cache_class", CACHES)
def test_a_cache_that_another_model_has_filled(cache_class, tiny_llama, tiny_model):
    cache, untouched = cache_class(), cache_class()
    first = prompt()
    for each in (cache, untouched):
        generate(tiny_llama, first, each)
    # What H2O lets go of without a trace has a limit
    longer = torch.cat([first, prompt(30)], dim=1)
    deeper, wider = tiny_model("llama", num_hidden_layers=4), tiny_model("llama-mha")
    with pytest.raises(ValueError, match=f"layer 2 holds 0 tokens, but layer 1 151: .* another model.*{ANOTHER}"):
        generate(deeper, longer, cache)
    with pytest.raises(ValueError, match=f"keys of 2 heads of 32 in layer 0, but got 4 of 32: .*{ANOTHER}"):
        generate(wider, longer, cache)
    assert lengths(cache)[:2] == [151, 151]
    assert torch.equal(generate(tiny_llama, longer, cache), generate(tiny_llama, longer, untouched))


@pytest.mark.parametrize("cache_class", CACHES)
def test_layers_may_be_filled_one_after_the_other(cache_class, tiny_llama):
    cache = cache_class(tiny_llama.config)
    for layer_idx, expected in ((0, [22, 0]), (1, [22, 22])):
        for length in (20, 1, 1):
            cache.update(torch.randn(1, 2, length, 32), torch.randn(1, 2, length, 32), layer_idx)
        assert lengths(cache) == expected


# Tokens of the second prompt; the first leaves 130 in the cache. Only InfiniGen hears positions; the others hear of
# the prompt's length if it is short, or padded
@pytest.mark.parametrize(
    ("name", "padded", "length"),
    [
        (name, padded, length)
        for name in ("gear-2bit", "h2o", "infinigen", "infinigen-gear")
        for padded in (False, True)
        for length in (40, 66, 129, 130)
        if padded or length == 40 or name.startswith("infinigen")
    ],
)
def test_a_second_prompt_that_is_not_longer(name, padded, length, tiny_llama):
    cache, first, second = create_cache(name, tiny_llama), prompt(120, 2), prompt(length, 2)
    generate(tiny_llama, first, cache, max_new_tokens=11)
    mask = torch.ones_like(second)
    mask[1, : 10 * padded] = 0
    with pytest.raises(ValueError, match=ANOTHER):
        generate(tiny_llama, second, cache, attention_mask=mask)
    assert lengths(cache) == [130, 130] if name in ("gear-2bit", "h2o") else max(lengths(cache)) == 130
    cache.reset()
    expected = generate(tiny_llama, second, create_cache(name, tiny_llama), attention_mask=mask)
    assert torch.equal(generate(tiny_llama, second, cache, attention_mask=mask), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["gear-2bit", "h2o", "infinigen", "infinigen-gear"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "gpt2", "opt"])
def test_what_goes_on_is_not_refused(name, architecture, tiny_model):
    """Turns, padded turns, prompts in chunks, beams, drafts of the prompt's own words, and one token at a time."""
    model = tiny_model(architecture)
    input_ids = prompt(70, 2)
    mask = torch.ones_like(input_ids)
    mask[1, :20] = 0
    for options in ({}, {"prefill_chunk_size": 16}, {"num_beams": 2}):
        cache = create_cache(name, model)
        output = generate(model, input_ids, cache, attention_mask=mask, **options)
        if "num_beams" in options:
            continue
        turn = torch.cat([output, prompt(9, 2)], dim=1)
        turn_mask = torch.cat([mask, mask.new_ones(2, turn.shape[1] - mask.shape[1])], dim=1)
        assert generate(model, turn, cache, attention_mask=turn_mask).shape[1] == turn.shape[1] + 4
    # Older releases draft of the prompt only where a token ends the text
    if architecture != "gemma3-hybrid" and RECORDS_PAST:
        draft = generate(model, input_ids[:1], create_cache(name, model), prompt_lookup_num_tokens=3)
        assert draft.shape[1] == 74
    cache = create_cache(name, model)
    with torch.no_grad():
        for position in range(20):
            logits = model(input_ids[:1, position : position + 1], past_key_values=cache).logits
        expected = model(input_ids[:1, :20], past_key_values=DynamicCache(config=model.config)).logits
    assert torch.equal(logits[:, -1].argmax(), expected[:, -1].argmax())
