"""Transform coding on the states of pretrained models: attention with rotary embeddings as models have them."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from kvcache_plugins import create_cache
from kvcache_plugins.layers.compressed_layer import CompressedLayer


TEXT = Path(__file__).resolve().parents[3] / "LICENSE"
pytestmark = pytest.mark.slow
PREFIX, SCORED = 200, 24


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.long)])
def model_and_ids(request):
    model, tokenizer = request.getfixturevalue(request.param)
    text = TEXT.read_text(encoding="utf-8")
    return model, tokenizer(text, return_tensors="pt").input_ids[:, : PREFIX + SCORED]


@torch.inference_mode()
def feed(model, cache, token_ids):
    """Logits of the last tokens, one after another behind a prompt."""
    model(token_ids[:, :PREFIX], past_key_values=cache, logits_to_keep=1)
    return [
        model(each, past_key_values=cache).logits[:, -1].double() for each in token_ids[:, PREFIX:].split(1, dim=1)
    ]


def mean_kl(logits, expected):
    pairs = (
        F.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="sum", log_target=True)
        for a, b in zip(logits, expected, strict=True)
    )
    return float(sum(pairs)) / len(logits)


def test_decoding_is_near_a_dense_cache(model_and_ids):
    model, token_ids = model_and_ids
    expected = feed(model, DynamicCache(config=model.config), token_ids)
    kl = {}
    for name, bound in (("gear-t16", 0.15), ("gear-t30", 0.01)):
        cache = create_cache(name, model)
        kl[name] = mean_kl(feed(model, cache, token_ids), expected)
        assert 0 < kl[name] < bound
        layers = [layer for layer in cache.layers if isinstance(layer, CompressedLayer)]
        # The layout of the rotary embedding is told from keys alone
        assert {layer.codec.rope.name for layer in layers} == {"half-split"}
        assert sum(block.length for block in layers[0].blocks) > PREFIX
    assert kl["gear-t30"] < kl["gear-t16"] / 4
