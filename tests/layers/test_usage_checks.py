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
def test_a_config_of_another_model_is_refused(cache_class, tiny_llama, tiny_model):
    deeper, wider = tiny_model("llama", num_hidden_layers=4), tiny_model("llama-mha")
    for own, other, message in (
        (tiny_llama, deeper, "made for a model of 2 layers, but .* has more: make one with"),
        (tiny_llama, wider, "made for a model of 2 key/value heads, but layer 0 .* has 4"),
        (
            deeper,
            tiny_llama,
            f"holds 148 tokens, but the last of 4 layers 0: .* of a model of fewer layers.*{ANOTHER}",
        ),
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
def test_a_cache_filled_by_another_model_is_refused(cache_class, tiny_llama, tiny_model):
    cache, untouched = cache_class(), cache_class()
    first = prompt()
    for each in (cache, untouched):
        generate(tiny_llama, first, each)
    # H2O can undo the weights of a limited number of tokens
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
    for length, expected in ((20, [20, 20]), (1, [21, 21]), (1, [22, 22])):
        for layer_idx in range(2):
            cache.update(torch.randn(1, 2, length, 32), torch.randn(1, 2, length, 32), layer_idx)
        assert lengths(cache) == expected


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


def break_off(model, layer_idx, function):
    """Calls a function that is interrupted as a layer begins to compute."""

    def interrupt(*_):
        raise Interrupted

    handle = model.model.layers[layer_idx].register_forward_pre_hook(interrupt)
    with pytest.raises(Interrupted):
        function()
    handle.remove()


# One for each kind of layer; of these of `infinigen` the first two are Transformers' own, and of Gemma's every other
@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *(
            ("llama", name)
            for name in ("transform", "gear-4bit", "kvarn-k4v4", "turboquant-4bit", "llamacpp-q8_0", "h2o")
        ),
        *(("llama", name) for name in ("infinigen", "infinigen-transform", "infinigen-paper")),
        *(("gemma3-hybrid", name) for name in ("transform", "gear-4bit", "infinigen")),
    ],
)
@pytest.mark.parametrize("is_prompt", [True, False])
@torch.no_grad()
def test_a_cache_after_an_interrupted_forward_is_refused(is_prompt, architecture, name, tiny_model):
    model, input_ids = tiny_model(architecture, num_hidden_layers=4), prompt(100)
    fresh = generate(model, input_ids, create_cache(name, model))
    cache = create_cache(name, model)
    for layer_idx in (1, 3):
        if not is_prompt:
            model(input_ids, past_key_values=cache)
        next_ids = input_ids if is_prompt else input_ids[:, :1]
        break_off(model, layer_idx, lambda ids=next_ids: model(ids, past_key_values=cache))
        held = lengths(cache)
        with pytest.raises(ValueError, match=f"layer 0 holds .* a forward broke off between them.*{ANOTHER}"):
            model(input_ids[:, :1], past_key_values=cache)
        assert lengths(cache) == held
        if architecture == "llama":
            cache.crop(-next_ids.shape[1])
            assert set(lengths(cache)) == {100 - 100 * is_prompt}
            assert model(next_ids, past_key_values=cache).logits.isfinite().all()
        cache.reset()
        assert torch.equal(generate(model, input_ids, cache), fresh)
        cache.reset()


@pytest.mark.parametrize("cache_class", CACHES)
@torch.no_grad()
def test_a_cache_without_a_config_detects_an_interrupted_prompt(cache_class, tiny_model):
    model, cache = tiny_model("llama", num_hidden_layers=3), cache_class()
    break_off(model, 1, lambda: model(prompt(100), past_key_values=cache))
    with pytest.raises(ValueError, match=f"layer 1 holds 0 tokens, but layer 0 100: .* that broke off.*{ANOTHER}"):
        model(prompt(1), past_key_values=cache)
    assert lengths(cache) == [100]


# Tokens of the second prompt; the first leaves 130 in the cache
@pytest.mark.parametrize("length", [40, 65])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["gear-2bit", "h2o", "infinigen", "infinigen-transform"])
def test_a_short_second_prompt_is_refused(name, padded, length, tiny_llama):
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
