"""Layers that keep more than keys and values: what is beside them stays exact and goes where the tokens go."""

import pytest
import torch
from transformers import Cache, DynamicCache

from kvcache_plugins import H2OCache, InfiniGenCache, TransformCodingCache
from kvcache_plugins.eval.families import generate
from kvcache_plugins.eval.tiny_models import build_family, prompt


def test_indexer_keys_follow_operations_on_their_tokens() -> None:
    layer = TransformCodingCache(nbits=4)._next_layer()
    index = torch.randn(2, 100, 8)
    assert torch.equal(layer.update_indexer(index[:, :90]), index[:, :90])
    layer.update(torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16))
    layer.indexer_position_ids = torch.arange(90).expand(3, 2, 90)
    assert torch.equal(layer.update_indexer(index[:, 90:]), index)
    layer.update(torch.randn(2, 2, 10, 16), torch.randn(2, 2, 10, 16))
    layer.crop(-4)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.update_indexer(index[:, :0]), index.flip(0)[:, :96])
    assert layer.indexer_position_ids.shape == (3, 2, 86)
    layer.reset()
    assert not layer.has_index


@pytest.mark.parametrize("make_cache", [TransformCodingCache, H2OCache], ids=["transform", "h2o"])
def test_recurrent_states_follow_batch_operations(make_cache: type[Cache]) -> None:
    model = build_family("falcon_h1")
    cache, dense = make_cache(model.config), DynamicCache(config=model.config)
    tokens = prompt(model, 20, 1)
    for each in (cache, dense):
        generate(model, each, tokens, None, 2, None)
        each.reorder_cache(torch.tensor([0, 0]))
    for own, other in zip(cache.layers, dense.layers, strict=True):
        for index in other.conv_states:
            assert torch.allclose(own.conv_states[index], other.conv_states[index], atol=1e-4)
            assert torch.allclose(own.recurrent_states[index], other.recurrent_states[index], atol=1e-4)
    assert cache.is_linear == [False] * len(cache.layers)


@pytest.mark.parametrize("family", ["jamba", "qwen3_next", "falcon_h1"])
def test_a_missing_config_is_refused_with_the_line_to_write(family: str) -> None:
    model = build_family(family)
    line = r"write `TransformCodingCache\(model.config\)` instead of `TransformCodingCache\(\)`"
    with pytest.raises(ValueError, match=line):
        generate(model, TransformCodingCache(), prompt(model, 20, 1), None, 2, None)


def test_layers_of_unknown_form_are_refused() -> None:
    model = build_family("deepseek_v4")
    with pytest.raises(ValueError, match="`compressed_sparse_attention`.* form of their own"):
        TransformCodingCache(model.config)


def test_unreadable_queries_disable_speculation() -> None:
    model = build_family("bert")
    with pytest.warns(UserWarning, match="has no attention modules.* own query"):
        cache = InfiniGenCache(model, full_layers=(0,), recent=4, speculate=True)
    run = generate(model, cache, prompt(model, 60, 1), None, 6, None)
    stats = cache.stats()
    assert (stats["layers_offloaded"], stats["layers_speculating"], stats["layers_by_own_query"]) == (1, 0, 1)
    assert stats["selected_calls"] == 5 and stats["speculated_calls"] == 0
    assert run.dense_reads == 0
