"""Operations on a batch and crops take what those of `DynamicCache` take, and give what it gives."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from feeding import feed, states
from transformers import DynamicCache

from kvcache_plugins import GEARCache, TransformCodingCache, create_cache


# With options with which nothing is lost, and two whose numbers are another's
EXACT = {
    "infinigen": {"alpha": float("inf"), "max_fetch_ratio": 1.0, "full_layers": ()},
    "h2o": {"heavy_ratio": 0.5, "recent_ratio": 0.5},
}
NAMES = [*EXACT, "transform", "gear-4bit", "llamacpp-q8_0"]
INDICES = {
    "list": [2, 0],
    "tuple": (2, 0),
    "array": np.array([2, 0]),
    "negative numbers": [-1, 0],
    "numbers twice": [2, 2, 0, 1],
    "mask": torch.tensor([True, False, True]),
    "list of truth values": [True, False, True],
    "slice": slice(1, 3),
}
# And how many of 5 tokens are left
CROPS = {"-2": (-2, 3), "0": (0, 5), "all": (-5, 0), "more": (-9, 0), "tensor": (torch.tensor(-2), 3)}
CROPS |= {"array": (np.int64(-2), 3)}


def filled(name, model, input_ids):
    cache = DynamicCache(config=model.config) if name is None else create_cache(name, model, **EXACT.get(name, {}))
    model(input_ids, past_key_values=cache)
    return cache


@pytest.fixture
def input_ids():
    return torch.randint(3, 128, (3, 100))


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_batch_select_indices_accepts_every_tensor_index(name, tiny_llama, input_ids):
    for kind, indices in INDICES.items():
        rows = torch.arange(3)[indices, ...]
        cache, same = filled(name, tiny_llama, input_ids), filled(name, tiny_llama, input_ids)
        cache.batch_select_indices(indices)
        same.reorder_cache(rows)
        logits, expected = (tiny_llama(input_ids[rows, :1], past_key_values=each).logits for each in (cache, same))
        assert torch.equal(logits, expected), kind
        if name in EXACT:
            dense = filled(None, tiny_llama, input_ids)
            dense.batch_select_indices(indices)
            expected = tiny_llama(input_ids[rows, :1], past_key_values=dense).logits
            assert torch.allclose(logits, expected, atol=1e-4), kind


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_missing_sequences_are_refused_without_losing_states(name, tiny_llama, input_ids):
    cache, untouched = (filled(name, tiny_llama, input_ids) for _ in range(2))
    with pytest.raises(IndexError):
        cache.batch_select_indices([0, 3])
    logits, expected = (tiny_llama(input_ids[:, :1], past_key_values=each).logits for each in (cache, untouched))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_operations_on_an_empty_batch_do_nothing(name, tiny_llama):
    cache = create_cache(name, tiny_llama)
    cache.batch_select_indices([0])
    cache.batch_repeat_interleave(2)
    cache.crop(-3)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("architecture", ["llama", "gemma3-hybrid"])
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_crop_accepts_the_lengths_of_a_dense_cache(name, architecture, tiny_model, input_ids):
    model = tiny_model(architecture)
    for kind, (tokens_to_remove, length) in CROPS.items():
        cache, dense = (filled(each, model, input_ids[:, :5]) for each in (name, None))
        cache.crop(tokens_to_remove)
        dense.crop(max(tokens_to_remove, -5))
        assert [each.get_seq_length() for each in cache.layers] == [length] * len(cache.layers), kind
        assert isinstance(cache.get_seq_length(), int)
        logits, expected = (model(input_ids[:, length:9], past_key_values=each).logits for each in (cache, dense))
        assert torch.allclose(logits, expected, atol=1e-4) or name not in EXACT, kind


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_tokens_behind_cropped_padding_are_real(name, tiny_llama, input_ids):
    mask = torch.ones_like(input_ids)
    mask[1, :60] = 0
    cache = create_cache(name, tiny_llama, **EXACT.get(name, {}))
    tiny_llama(input_ids[:, :60], attention_mask=mask[:, :60], past_key_values=cache)
    cache.crop(-20)
    assert cache.layers[1].padding.tolist() == [0, 40, 0]
    mask[1, 40:] = 1
    logits = tiny_llama(input_ids[:, 40:], attention_mask=mask, past_key_values=cache).logits
    dense = DynamicCache(config=tiny_llama.config)
    for part in (slice(40), slice(40, None)):
        expected = tiny_llama(input_ids[:, part], attention_mask=mask[:, : part.stop], past_key_values=dense).logits
    assert cache.layers[1].padding.tolist() == [0, 40, 0]
    assert torch.allclose(logits, expected, atol=1e-4) or name not in EXACT


@pytest.mark.parametrize("name", ["transform", "gear-4bit"])
@torch.no_grad()
def test_a_sequence_begins_where_crop_left_none_of_it(name):
    layer = create_cache(name)._next_layer()
    feed(layer, *states(2, 200), padding=[0, 50])
    layer.crop(-180)
    for padding in ([0, 20], [0, 60]):
        other = copy.deepcopy(layer)
        new = states(2, 100)
        new[0][1, :, : padding[1] - 20] = torch.nan
        feed(other, *new, padding=padding)
        query = torch.randn(2, 4, 1, 32)
        output = feed(other, *states(2, 1), padding=padding, query=query)
        held = [other.to_dense(side)[1:, :, padding[1] :] for side in ("keys", "values")]
        assert torch.allclose(output[1:], F.scaled_dot_product_attention(query[1:], *held, enable_gqa=True), atol=1e-4)


@pytest.mark.parametrize("count", [1, 300])
def test_a_refused_update_leaves_no_keys_of_an_indexer(count):
    """Keys of an indexer come before the keys and values, which are refused at once or when they are packed."""
    layer = create_cache("transform")._next_layer()
    index = torch.randn(1, 102, 8)
    layer.update_indexer(index[:, :100])
    feed(layer, *states(1, 100))
    bad = states(1, count)
    bad[0][0, 0, 0, 0] = torch.nan
    layer.update_indexer(torch.randn(1, count, 8))
    with pytest.raises(ValueError, match="NaN"):
        feed(layer, *bad)
        for _ in range(5):
            layer.update_indexer(torch.randn(1, 1, 8))
            feed(layer, *states(1, 1))
    layer.crop(100 - layer.get_seq_length())
    assert torch.equal(layer.update_indexer(index[:, 100:101]), index[:, :101])
    feed(layer, *states(1, 1))
    assert torch.equal(layer.update_indexer(index[:, 101:]), index)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("make_cache", [GEARCache, TransformCodingCache])
def test_a_given_mask_of_another_batch_is_refused(make_cache, batch_size):
    layer = make_cache(attention_mask=torch.ones(batch_size, 100))._next_layer()
    layer.update(*states(2, 100))
    with pytest.raises(ValueError, match=f"`attention_mask` of the cache is of {batch_size} sequences, but .* of 2"):
        layer.commit_prompt()
    assert layer.get_seq_length() == 0


@pytest.mark.parametrize("name", ["transform", "gear-4bit", "llamacpp-q8_0"])
@torch.no_grad()
def test_an_emptied_layer_takes_states_of_other_sizes(name):
    layer, expected = (create_cache(name)._next_layer() for _ in range(2))
    feed(layer, *states(2, 100))
    layer.crop(-100)
    for count in (100, 1):
        keys, values = (torch.randn(1, 4, count, 64, dtype=torch.float64) for _ in range(2))
        outputs = [feed(each, keys, values, query=keys) for each in (layer, expected)]
        assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["transform", "gear-4bit"])
def test_keys_with_values_of_other_tokens_are_refused(name):
    layer = create_cache(name)._next_layer()
    for counts in ((100, 99), (100, 100), (2, 1), (1, 2)):
        (keys, _), (_, values) = (states(1, count) for count in counts)
        if counts[0] == counts[1]:
            feed(layer, keys, values)
            continue
        for pair in ((keys, values), (keys[0], values[0]), (keys, values.expand(2, -1, -1, -1))):
            with pytest.raises(ValueError, match="layer 0: keys and values of the same tokens"):
                layer.update(*pair)
    assert layer.get_seq_length() == 100
