"""A cache and a model, or a prompt, that do not belong together: one sentence, and the cache can still be used."""

import pytest
import torch

from kvcache_plugins import H2OCache, TransformCodingCache, create_cache


CACHES = [TransformCodingCache, H2OCache]
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


# Tokens of the second prompt; the first leaves 130 in the cache
@pytest.mark.parametrize("length", [40, 65])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gear-2bit", "h2o", "infinigen", "infinigen-transform"])
def test_a_second_prompt_of_at_most_half_the_tokens(name, padded, length, tiny_llama):
    cache, first, second = create_cache(name, tiny_llama), prompt(120, 2), prompt(length, 2)
    generate(tiny_llama, first, cache, max_new_tokens=11)
    mask = torch.ones_like(second)
    mask[1, : 10 * padded] = 0
    with pytest.raises(ValueError, match=ANOTHER):
        generate(tiny_llama, second, cache, attention_mask=mask)
    assert lengths(cache) == [130, 130]
    cache.reset()
    expected = generate(tiny_llama, second, create_cache(name, tiny_llama), attention_mask=mask)
    assert torch.equal(generate(tiny_llama, second, cache, attention_mask=mask), expected)
