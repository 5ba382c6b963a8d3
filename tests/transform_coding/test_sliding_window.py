"""Layers whose attention has a window: equal to Transformers' own sliding layer but for the codes, and bounded;
models whose layers attend to windows, some or all of them.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins import GEARCache, TransformCodingCache, create_cache, predict_memory
from kvcache_plugins.contract import CONTRACT, run_check
from kvcache_plugins.contract.comparison import reachable_bytes


NUM_HEADS, HEAD_DIM, CHUNK = 2, 32, 8


def make_layer(window):
    return TransformCodingCache(nbits=8, sliding="compressed", recent_length=64)._layer(0, None, window)


def window_mask(layer, window, num_new, padding):
    """Makes the mask that Transformers makes of the sizes that a layer announces."""
    length, first = layer.get_mask_sizes(num_new)
    queries = torch.arange(layer.get_seq_length(), layer.get_seq_length() + num_new)[:, None]
    tokens = torch.arange(first, first + length)
    seen = (tokens <= queries) & (tokens > queries - window)
    return seen & (tokens >= torch.tensor(padding)[:, None, None, None])


def feed(layers, window, num_new, padding, what):
    """Attend over all layers; the output of the first one is expected of all."""
    new = torch.randn(2, len(padding), NUM_HEADS, num_new, HEAD_DIM).unbind()
    query = torch.randn(len(padding), 2 * NUM_HEADS, num_new, HEAD_DIM)
    outputs = []
    for layer in layers:
        mask = window_mask(layer, window, num_new, padding)
        keys, values = layer.update(*new)
        assert keys.shape[2] == values.shape[2] == mask.shape[3]
        outputs.append(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True))
    positions = torch.arange(layers[0].get_seq_length() - num_new, layers[0].get_seq_length())
    is_real = (positions >= torch.tensor(padding)[:, None])[:, None, :, None]
    for output in outputs[1:]:
        error = ((output - outputs[0]) * is_real).nan_to_num().abs().max()
        assert error < 0.03, f"{what}: {error}"


@pytest.mark.parametrize(("window", "padding"), [(70, (0, 0)), (80, (0, 37)), (97, (90, 3))], ids=str)
def test_attention_equals_the_dense_sliding_layer(window, padding):
    torch.manual_seed(0)
    own = make_layer(window)
    # Prompts below, at and beyond the window, then every offset of a window against a chunk, several tokens at once,
    # and a later prompt
    for prompt in (45, 200):
        own.reset()
        layers = DynamicSlidingWindowLayer(sliding_window=window), own
        for step, num_new in enumerate((prompt, *[1] * 17, 5, 1, 40, 3, 150, *[1] * 20)):
            feed(layers, window, num_new, padding, f"prompt {prompt}, step {step}")
    assert layers[1].stats()["tokens_compressed"] > 0 and layers[1].dense_reads == 0
    for side in ("keys", "values"):
        expected = getattr(layers[0], side)
        dense = layers[1].to_dense(side)[:, :, -expected.shape[2] :]
        assert (dense - expected).abs().max() < 0.1


def test_memory_is_bounded_and_counted():
    window = 70
    layer = make_layer(window)
    feed([layer], window, 300, (0, 0), "prompt")
    sizes, spare = [], 0
    for _ in range(160):
        feed([layer], window, 1, (0, 0), "step")
        named = list(layer.named_tensors())
        sizes.append(sum(tensor.nbytes for _, tensor in named))
        spare = max(spare, sum(tensor.nbytes for part, tensor in named if part == "spare"))
        assert sizes[-1] == reachable_bytes(layer)
        held = sum(block.length for block in layer.storage.segments)
        assert held <= window - 1 + 64 + CHUNK
    assert max(sizes[100:]) <= max(sizes[:100]) and spare <= max(sizes) // 5
    assert layer.storage.prefix is None and layer.num_values() == 2 * 2 * NUM_HEADS * (window - 1) * HEAD_DIM


def test_rollback_equals_the_dense_sliding_layer():
    torch.manual_seed(2)
    window, padding = 70, (0, 9)
    layers = DynamicSlidingWindowLayer(sliding_window=window), make_layer(window)
    feed(layers, window, 120, padding, "prompt")
    for layer in layers:
        layer.activate_past_recording()
    for step, (drafted, rejected) in enumerate([(6, 4), (6, 0), (9, 9), (5, 1), (30, 29)] * 6):
        for num_new in (1, drafted - 1):
            feed(layers, window, num_new, padding, f"round {step}")
        for layer in layers:
            layer.crop(-rejected)
        assert layers[0].get_seq_length() == layers[1].get_seq_length()
        for side in ("keys", "values"):
            # Transformers' layer has its next update evict what no query sees any more
            expected = getattr(layers[0], side)
            dense = layers[1].to_dense(side)
            assert dense.shape[2] >= window - 1
            assert (dense - expected[:, :, -dense.shape[2] :]).abs().max() < 0.1
    feed(layers, window, 1, padding, "at last")
    assert layers[1].storage.first_held > 0


def test_newest_update_can_be_taken_back_and_more_is_refused():
    window = 70
    layer = make_layer(window)
    feed([layer], window, 200, (0, 0), "prompt")
    with pytest.raises(ValueError, match=r"`crop` of 20 tokens.*`activate_past_recording\(\)`"):
        layer.crop(-20)
    for _ in range(30):
        feed([layer], window, 4, (0, 0), "step")
        layer.crop(-4)
        feed([layer], window, 3, (0, 0), "step")
    with pytest.raises(ValueError, match="a window of 70 tokens has evicted"):
        layer.crop(-90)
    assert layer.get_seq_length() == 290
    layer.crop(-290)
    assert layer.get_seq_length() == 0
    feed([layer], window, 20, (0, 0), "anew")


VOCAB_SIZE, WINDOW, CONTEXT = 211, 2048, 3000
FINE = {"nbits": 8}
ITEMS = {
    *("hybrid", "crop-prompt", "save-load", "deepcopy", "reorder", "select-indices", "memory", "beam-search"),
    *("chunked-prefill", "greedy", "prompt-lookup", "left-padding", "row-isolation", "eager", "multi-turn", "reset"),
}


@pytest.fixture(scope="module")
def make_mistral(tiny_model) -> Callable[[int | None], PreTrainedModel]:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 64}
    return lambda window: tiny_model("mistral-sliding", sliding_window=window, vocab_size=VOCAB_SIZE, **sizes)


@pytest.fixture(scope="module")
def mistral(make_mistral) -> PreTrainedModel:
    """Builds a Mistral all of whose layers have the smallest window that is compressed by default."""
    return make_mistral(WINDOW)


@pytest.mark.parametrize("item", [check for check in CONTRACT if check.name in ITEMS], ids=lambda item: item.name)
def test_windows_keep_the_contract(item, make_mistral, contract_models):
    model = contract_models["hybrid"] if item.on_hybrid else make_mistral(90)
    result = run_check(item, model, lambda: TransformCodingCache(model, **FINE, sliding="compressed"))
    assert result.status == "pass", result.detail


@torch.no_grad()
@pytest.mark.parametrize("name", ["transform", "transform-22"])
def test_memory_is_bounded_by_window_chunk_and_buffer(name, mistral, make_mistral):
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
    full, residual = make_mistral(None), cache.cache_config.residual_length
    chunk = max(residual, 64)
    held = create_cache(name, full)
    full(token_ids[:, : WINDOW + chunk], past_key_values=held, logits_to_keep=1)
    # Two layers, keys and values of one head of 64 channels in float32
    buffer = residual * 2 * 2 * 64 * 4
    assert max(sizes) <= 1.002 * (held.memory().total_bytes + buffer)
    stats = cache.stats()
    assert (stats["layers_windowed"], stats["layers_left"], stats["dense_reads"]) == (2, 0, 0)


@pytest.mark.parametrize(
    ("window", "options", "is_compressed"),
    [
        (2047, {}, False),
        (2048, {}, True),
        (511, {"sliding": "compressed"}, True),
        (4096, {"sliding": "dense"}, False),
    ],
    ids=str,
)
def test_only_long_windows_are_compressed(window, options, is_compressed, make_mistral):
    config = make_mistral(window).config
    if is_compressed:
        cache = TransformCodingCache(config, **options)
    else:
        with pytest.warns(UserWarning, match=f"all layers of the model attend to a window of {window} tokens"):
            cache = TransformCodingCache(config, **options)
    assert cache.stats()["layers_windowed"] == 2 * is_compressed
    assert cache.stats()["layers_left"] == 2 * (not is_compressed)
    assert cache.is_sliding == [True, True]


def test_gear_keeps_windows_dense(make_mistral):
    config = make_mistral(4096).config
    with pytest.warns(UserWarning, match="all layers of the model attend to a window of 4096 tokens"):
        cache = GEARCache(config)
    assert (cache.stats()["layers_windowed"], cache.stats()["layers_left"]) == (0, 2)


def test_chunked_attention_is_treated_as_a_window(tiny_model):
    from kvcache_plugins.eval.families import generate
    from kvcache_plugins.eval.tiny_models import build_family, prompt

    model = build_family("llama4_text")
    tokens = prompt(model, 60, 1)
    cache = TransformCodingCache(model.config, **FINE, sliding="compressed")
    assert cache.stats()["layers_windowed"] > 0
    run, dense = (generate(model, each, tokens, None, 20, None) for each in (cache, DynamicCache(config=model.config)))
    assert torch.equal(run.tokens, dense.tokens)


def test_predicted_memory_follows_the_window(make_mistral):
    spec = "transform-22:sliding=compressed,residual_length=8"
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
