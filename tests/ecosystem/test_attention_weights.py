"""Attention weights that are asked for are those of every forward, as the dense cache has them, in every family.

One family of each kind is daily: weights are collected by hooks, or returned by the modules; with softcaps, sinks,
grouped heads, latent states, windows, and attention in a model's own code.
"""

import pytest
import torch
from transformers import DynamicCache

from kvcache_plugins import create_cache
from kvcache_plugins.eval import families as survey
from kvcache_plugins.eval.families import own_cases
from kvcache_plugins.eval.tiny_models import build_family, family_names, prompt
from kvcache_plugins.models.cache_argument import as_argument


DAILY = (
    *("llama", "gpt2", "opt", "persimmon", "stablelm", "nemotron", "gpt_bigcode", "gptj", "gemma2", "gpt_oss"),
    *("deepseek_v3", "bart", "bloom", "gpt_neo", "granite_swa"),
)
# Prompt, steps, a draft
SIZES = (150, 1, 1, 5, 1)
# Mean sums of differences of a query's weights, which add up to 1
LIMITS = {"transform": 0.1, "infinigen": 1e-3, "h2o": 1e-3}
# An indexer that sees other hidden states by a rounding of codes selects some other tokens
LIMIT_WITH_INDEXER = 0.15


@torch.no_grad()
def weights(model, cache):
    """Attention weights of some forwards; those before the last are read late."""
    parts = prompt(model, sum(SIZES), 1).split(SIZES, dim=1)
    return [model(part, **as_argument(cache), output_attentions=True).attentions for part in parts]


def make_finest(name, model):
    """Make a cache in the form that loses next to nothing."""
    finest = own_cases()[name].finest
    assert finest is not None
    return finest.prepare(model)()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in DAILY else pytest.mark.long) for name in family_names()],
)
def test_attention_weights_are_near_the_dense_caches(family):
    try:
        model = build_family(family)
        model.set_attn_implementation("eager")
        expected = weights(model, DynamicCache(config=model.config))
    except survey.CAUGHT:
        pytest.skip("the dense cache does not run it")
    for name, limit in LIMITS.items():
        try:
            cache = make_finest(name, model)
        except ValueError:
            assert family not in DAILY
            continue
        found = weights(model, cache)
        if name == "transform" and any(getattr(layer, "has_index", False) for layer in cache.layers):
            limit = LIMIT_WITH_INDEXER
        assert [len(each) for each in found] == [len(each) for each in expected], name
        for each, other in zip(sum(found, ()), sum(expected, ()), strict=True):
            assert each.shape == other.shape
            assert (each.float() - other.float()).abs().sum(dim=-1).mean() <= limit, name


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 60}],
    ids=["beams", "drafts", "chunks"],
)
@pytest.mark.filterwarnings("ignore:the whole cache is fetched for every token:UserWarning")
@pytest.mark.parametrize(("family", "name"), [("llama", "infinigen"), ("gpt2", "h2o"), ("opt", "infinigen")])
def test_generate_returns_weights(family, name, options):
    model = build_family(family)
    model.set_attn_implementation("eager")
    options = {**options, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    options |= {"output_attentions": True, "return_dict_in_generate": True}
    tokens = prompt(model, 150, 1).repeat_interleave(1 if "prompt_lookup_num_tokens" in options else 2, dim=0)
    outputs = [
        model.generate(tokens, past_key_values=cache, **options)
        for cache in (DynamicCache(config=model.config), make_finest(name, model))
    ]
    expected, found = (output.attentions for output in outputs)
    assert torch.equal(*(output.sequences for output in outputs))
    assert len(found) == len(expected) == 12
    for each, other in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert torch.allclose(each, other, atol=1e-4)


def test_asking_for_weights_changes_no_text():
    """Nor which tokens InfiniGen chooses, or H2O keeps, though all keys are read for them."""
    model = build_family("llama")
    model.set_attn_implementation("eager")
    parts = prompt(model, 158, 1).split((150, 1, 1, 5, 1), dim=1)
    for name in ("transform", "infinigen"):
        caches = [create_cache(name, model, **({"full_layers": ()} if name == "infinigen" else {})) for _ in range(2)]
        for part in parts:
            with torch.no_grad():
                asked, usual = (
                    model(part, past_key_values=cache, output_attentions=cache is caches[0]).logits for cache in caches
                )
            assert torch.equal(asked, usual)


def test_h2o_refuses_weights_over_dropped_tokens_and_says_so():
    model = build_family("llama")
    model.set_attn_implementation("eager")
    cache, token = create_cache("h2o", model), prompt(model, 1, 2)
    with torch.no_grad():
        exact = model(prompt(model, 150, 1), past_key_values=cache, output_attentions=True)
        # All weights of the prompt are returned
        assert exact.attentions[1].sum(dim=-1).allclose(torch.ones(()))
        step = model(token, past_key_values=cache, output_attentions=True)
        message = "has dropped tokens.*neither attention weights.*leave `output_attentions` out"
        with pytest.raises(ValueError, match=message):
            step.attentions[0].sum()
        with pytest.raises(ValueError, match=message):
            model(token, past_key_values=cache)
        del step
        model(token, past_key_values=cache)
