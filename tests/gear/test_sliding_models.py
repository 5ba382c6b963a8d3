"""Models whose layers attend to windows, some or all of them, with caches that compress these layers."""

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_plugins import GEARCache, create_cache, predict_memory
from kvcache_plugins.contract import CONTRACT, run_check
from kvcache_plugins.contract.comparison import reachable_bytes
from kvcache_plugins.contract.subject import RECORDS_PAST


VOCAB_SIZE, WINDOW, CONTEXT = 211, 2048, 3000
FINE = {"nbits": 8, "backbone": "transform"}
# What older releases of Transformers need a dense sliding layer to be rolled back for is not there
ITEMS = {"hybrid"} | (
    {"crop-prompt", "save-load", "deepcopy", "reorder", "select-indices", "memory", "beam-search", "chunked-prefill"}
    | {"greedy", "prompt-lookup", "left-padding", "row-isolation", "eager", "multi-turn", "reset"}
    if RECORDS_PAST
    else set()
)


@pytest.fixture(scope="module")
def make_mistral(tiny_model) -> Callable[[int | None], PreTrainedModel]:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 64}
    return lambda window: tiny_model("mistral-sliding", sliding_window=window, vocab_size=VOCAB_SIZE, **sizes)


@pytest.fixture(scope="module")
def mistral(make_mistral) -> PreTrainedModel:
    """Builds a Mistral all of whose layers have the smallest window that is compressed by default."""
    return make_mistral(WINDOW)


@pytest.mark.parametrize("item", [check for check in CONTRACT if check.name in ITEMS], ids=lambda item: item.name)
def test_contract(item, make_mistral, contract_models):
    model = contract_models["hybrid"] if item.on_hybrid else make_mistral(90)
    result = run_check(item, model, lambda: GEARCache(model, **FINE, sliding="compressed"))
    assert result.status == "pass", result.detail


@torch.no_grad()
@pytest.mark.parametrize("name", ["gear", "gear-t22"])
def test_bytes_are_those_of_a_window_a_chunk_and_a_buffer(name, mistral, make_mistral):
    token_ids = torch.randint(0, VOCAB_SIZE, (1, CONTEXT))
    cache = create_cache(name, mistral)
    mistral(token_ids, past_key_values=cache, logits_to_keep=1)
    sizes = [cache.memory().total_bytes]
    predicted = predict_memory(mistral, name, CONTEXT, device="cpu")
    assert predicted.total_bytes == sizes[0] and predicted.num_values == cache.memory().num_values
    for step in range(70):
        mistral(token_ids[:, step : step + 1], past_key_values=cache)
        sizes.append(cache.memory().total_bytes)
    assert sizes[-1] == reachable_bytes(cache)
    # The rate: what full attention would hold of as many tokens
    full, residual = make_mistral(None), cache.gear_config.residual_length
    chunk = max(residual, 64)
    held = create_cache(name, full)
    full(token_ids[:, : WINDOW + chunk], past_key_values=held, logits_to_keep=1)
    # Of two layers, keys and values of one head of 64 channels in float32
    buffer = residual * 2 * 2 * 64 * 4
    assert max(sizes) <= 1.002 * (held.memory().total_bytes + buffer)
    stats = cache.stats()
    assert (stats["layers_windowed"], stats["layers_left"], stats["dense_reads"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("window", "options", "is_compressed"),
    [
        (4096, {"nbits": 4}, False),
        (2047, {}, False),
        (2048, {}, True),
        (511, {"sliding": "compressed"}, True),
        (4096, {"sliding": "dense"}, False),
    ],
    ids=str,
)
def test_which_windows_are_compressed(window, options, is_compressed, make_mistral):
    config = make_mistral(window).config
    if is_compressed:
        cache = GEARCache(config, **options)
    else:
        with pytest.warns(UserWarning, match=f"all layers of the model attend to a window of {window} tokens"):
            cache = GEARCache(config, **options)
    assert cache.stats()["layers_windowed"] == 2 * is_compressed
    assert cache.stats()["layers_left"] == 2 * (not is_compressed)
    assert cache.is_sliding == [True, True]


def test_chunked_attention_is_a_window_too(tiny_model):
    from kvcache_plugins.eval.families import build_family, generate, prompt

    model = build_family("llama4_text")
    tokens = prompt(model, 60, 1)
    cache = GEARCache(model.config, **FINE, sliding="compressed")
    assert cache.stats()["layers_windowed"] > 0
    run, dense = (generate(model, each, tokens, None, 20, None) for each in (cache, DynamicCache(config=model.config)))
    assert torch.equal(run.tokens, dense.tokens)


def test_predicted_memory_follows_the_window(make_mistral):
    spec = "gear-t22:sliding=compressed,residual_length=8"
    model, token_ids = make_mistral(300), torch.randint(0, VOCAB_SIZE, (2, 700))
    for context in (250, 700):
        cache = create_cache(spec, model)
        with torch.no_grad():
            model(token_ids[:, : context - 100], past_key_values=cache)
            for step in range(context - 100, context):
                model(token_ids[:, step : step + 1], past_key_values=cache)
        predicted = predict_memory(model, spec, context, batch_size=2, new_tokens=100, device="cpu")
        assert predicted.total_bytes == cache.memory().total_bytes
        assert predicted.num_values == cache.memory().num_values
