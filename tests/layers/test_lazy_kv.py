"""Lazy states report what dense ones would, attend without becoming dense, and are right for any other reader."""

import pytest
import torch
import torch.nn.functional as F
from feeding import feed
from feeding import states as make_states
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import repeat_kv

from kvcache_plugins import GEARCache, TransformCodingCache
from kvcache_plugins.layers.lazy_kv import LazyKV
from kvcache_plugins.layers.query_recorder import QueryRecordingLayer, record_queries


@pytest.fixture
def lazy(layer):
    return layer.update(torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32))


def test_handle_reports_the_properties_of_the_dense_tensor(layer, lazy):
    keys, _ = lazy
    assert isinstance(keys, torch.Tensor)
    assert keys.shape == (2, 2, 151, 32)
    assert keys.size(2) == 151
    assert (keys.dim(), keys.ndim, keys.numel(), len(keys)) == (4, 4, 2 * 2 * 151 * 32, 2)
    assert (keys.dtype, keys.device, keys.requires_grad) == (torch.float32, torch.device("cpu"), False)
    assert "LazyKV" in repr(keys)
    assert layer.dense_reads == 0


def test_repeated_heads_stay_lazy(layer, lazy):
    query = torch.randn(2, 6, 1, 32)
    repeated = [repeat_kv(states, 3) for states in lazy]
    assert all(isinstance(states, LazyKV) and states.shape == (2, 6, 151, 32) for states in repeated)
    output = F.scaled_dot_product_attention(query, *repeated)
    assert layer.dense_reads == 0
    dense = [repeat_kv(layer.to_dense(side), 3) for side in ("keys", "values")]
    assert torch.allclose(output, F.scaled_dot_product_attention(query, *dense), atol=5e-5)
    assert torch.equal(repeated[0] + 0, dense[0])


@pytest.mark.parametrize(
    "read",
    [
        lambda keys: keys.transpose(2, 3).transpose(2, 3),
        lambda keys: keys * 1,
        lambda keys: torch.cat([keys, keys], dim=2)[:, :, :151],
        lambda keys: keys.clone(),
        lambda keys: keys.mT.mT,
        lambda keys: torch.stack([keys])[0],
        lambda keys: keys.reshape(2, -1).view(2, 2, 151, 32),
        lambda keys: keys[:, :, None, :, :].expand(2, 2, 3, 151, 32)[:, :, 1],
        lambda keys: torch.einsum("bhtd->bhtd", keys),
        lambda keys: keys.contiguous() + 0,
        lambda keys: keys.to(torch.float64).to(torch.float32),
    ],
)
def test_other_operations_receive_the_dense_tensor(layer, lazy, read):
    assert torch.equal(read(lazy[0]), layer.to_dense("keys"))
    assert layer.dense_reads > 0


def test_keys_and_values_of_a_layer_are_its_states(layer):
    assert torch.equal(layer.keys + 0, layer.to_dense("keys"))
    assert torch.equal(layer.values + 0, layer.to_dense("values"))
    assert GEARCache()._next_layer().keys is None


def test_held_prompt_states_stay_exact_after_compression():
    layer = GEARCache(nbits=2)._next_layer()
    exact = torch.randn(2, 2, 150, 32)
    keys, values = layer.update(exact, exact)
    assert torch.equal(keys + 0, exact)
    assert torch.equal(values + 0, exact)
    # Both sides were read: an eager attention has what it needs, and the prompt is compressed
    assert layer.stats()["tokens_compressed"] == 128
    assert torch.equal(keys + 0, exact)
    assert not torch.equal(layer.to_dense("keys"), exact)


CHANGES = {
    "crop": lambda layer: layer.crop(-10),
    "crop of all": lambda layer: layer.crop(-1000),
    "reset": lambda layer: layer.reset(),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "select": lambda layer: layer.batch_select_indices([1]),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_held_states_keep_their_values(change, layer, lazy):
    """Held states behave like tensors of a dense cache, which later changes of the cache leave alone."""
    expected = [layer.to_dense(side) for side in ("keys", "values")]
    turned, query = lazy[0].transpose(2, 3), torch.randn(2, 2, 1, 32)
    attended = F.scaled_dot_product_attention(query, *expected)
    CHANGES[change](layer)
    # Add as many tokens as before, but others
    layer.update(*torch.randn(2, layer.batch_size, 2, 151 - layer.get_seq_length(), 32))
    assert isinstance(turned, LazyKV)
    assert torch.equal(turned + 0, expected[0].mT)
    for states, dense in zip(lazy, expected, strict=True):
        assert torch.equal(states + 0, dense)
        assert torch.equal(states[:, :, :140], dense[:, :, :140])
    assert torch.allclose(F.scaled_dot_product_attention(query, *lazy), attended, atol=1e-6)


def test_held_states_of_a_window_keep_their_values(tiny_model):
    layer = TransformCodingCache(tiny_model("mistral-sliding").config, sliding="compressed").layers[0]
    layer.update(*torch.randn(2, 1, 2, 100, 32))
    layer.commit_prompt()
    keys, _ = layer.update(*torch.randn(2, 1, 2, 1, 32))
    expected = layer.to_dense("keys")
    layer.update(*torch.randn(2, 1, 2, 1, 32))
    assert torch.equal(keys + 0, expected)


def test_unreferenced_states_are_not_made_dense(layer, monkeypatch):
    monkeypatch.setattr(type(layer), "to_dense", lambda *_: pytest.fail("made dense"))
    layer.update(*torch.randn(2, 2, 2, 1, 32))
    layer.crop(-10)
    layer.reset()


def test_a_slice_of_many_tokens_decodes_only_those():
    """More than data-free samples have: a slice may not be taken for all of them."""
    layer = GEARCache(backbone="kivi", nbits=2)._next_layer()
    layer.update(*torch.randn(2, 1, 1, 10_100, 32))
    layer.commit_prompt()
    keys, _ = layer.update(*torch.randn(2, 1, 1, 1, 32))
    dense = layer.to_dense("keys")
    for tokens in (slice(10_050), slice(-10_050, None), slice(1, None)):
        assert torch.equal(keys[:, :, tokens] + 0, dense[:, :, tokens])
    assert [each.shape[2] for each in keys.split(10_050, dim=2)] == [10_050, 51]


def test_mixed_keys_and_values_fall_back_to_dense(layer, lazy):
    query, other = torch.randn(2, 2, 1, 32), torch.randn(2, 2, 151, 32)
    expected = F.scaled_dot_product_attention(query, layer.to_dense("keys"), other)
    assert torch.allclose(F.scaled_dot_product_attention(query, lazy[0], other), expected)
    assert layer.dense_reads == 1


def test_causal_mask_without_a_mask_is_aligned_upper_left(layer):
    keys, values = layer.update(torch.randn(2, 2, 5, 32), torch.randn(2, 2, 5, 32))
    query = torch.randn(2, 2, 5, 32)
    dense = layer.to_dense("keys"), layer.to_dense("values")
    expected = F.scaled_dot_product_attention(query, *dense, is_causal=True)
    assert torch.allclose(F.scaled_dot_product_attention(query, keys, values, is_causal=True), expected, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid", "gpt2"])
@torch.no_grad()
def test_recording_queries_changes_nothing(tiny_model, architecture, implementation):
    model = tiny_model(architecture, attn_implementation=implementation)
    token_ids, mask = torch.randint(2, 128, (2, 300)), torch.ones(2, 300, dtype=torch.long)
    mask[1, :50] = 0
    cache, dense = (DynamicCache(config=model.config) for _ in range(2))
    record_queries(cache)
    recording = [layer for layer in cache.layers if isinstance(layer, QueryRecordingLayer)]
    assert len(recording) == 2
    for part in (slice(0, 280), slice(280, 300)):
        logits, expected = (
            model(token_ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=each).logits
            for each in (cache, dense)
        )
        assert torch.equal(logits * mask[:, part, None], expected * mask[:, part, None])
        for layer in recording:
            assert layer.queries.shape == (2, 4, min(256, part.stop - part.start), layer.keys.shape[3])


@pytest.mark.parametrize("make_cache", [GEARCache, TransformCodingCache])
@torch.no_grad()
def test_planned_attention_is_of_keys_and_values_in_this_order(make_cache):
    layer = make_cache()._next_layer()
    feed(layer, *make_states(1, 150))
    for _ in range(3):
        feed(layer, *make_states(1, 1))
    keys, values = layer.update(*make_states(1, 1))
    query = torch.randn(1, 4, 1, 32)
    dense = {keys: layer.to_dense("keys"), values: layer.to_dense("values")}
    for pair in ((keys, keys), (values, values), (values, keys), (keys, values)):
        expected = F.scaled_dot_product_attention(query, *(dense[each] for each in pair), enable_gqa=True)
        assert torch.allclose(F.scaled_dot_product_attention(query, *pair, enable_gqa=True), expected, atol=1e-4)
