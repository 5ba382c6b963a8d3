"""Attention that a model writes out step by step is the layer's, and whatever else is done to scores gets numbers."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins import GEARCache
from kvcache_plugins.layers.lazy_kv import LazyKV


SCALE = 0.3


@pytest.fixture
def lazy(layer):
    return layer.update(torch.randn(2, 2, 3, 32), torch.randn(2, 2, 3, 32))


@pytest.fixture
def query():
    return torch.randn(2, 2, 3, 32)


def dense(layer):
    return layer.to_dense("keys"), layer.to_dense("values")


def mask():
    hidden = torch.zeros(2, 1, 3, 153)
    hidden[..., 10:20] = torch.finfo(torch.float32).min
    return hidden


def plainly(query, keys):
    return torch.softmax(torch.matmul(query, keys.transpose(2, 3)) * SCALE, -1)


def masked(query, keys):
    scores = query @ keys.transpose(-1, -2) / 4 + mask()
    return F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), p=0.0, training=True)


def softcapped(query, keys):
    scores = torch.tanh(torch.matmul(query, keys.transpose(2, 3)) * SCALE / 5) * 5
    return (mask() + scores + torch.ones(1, 2, 1, 1).expand(1, 2, 3, 153)).softmax(dim=-1)


def with_sinks(query, keys):
    scores = torch.matmul(query, keys.transpose(2, 3)) * SCALE + mask()
    scores = torch.cat([scores, torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1).expand(2, 2, 3, 1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1]


@pytest.mark.parametrize("weigh", [plainly, masked, softcapped, with_sinks])
def test_steps_of_attention_are_answered_by_the_layer(layer, lazy, query, weigh):
    weights = weigh(query, lazy[0])
    output = torch.matmul(weights, lazy[1])
    assert layer.stats()["attend_calls"] == 1
    assert layer.dense_reads == 0
    keys, values = dense(layer)
    expected = weigh(query, keys)
    assert torch.allclose(output, expected @ values, atol=1e-4)
    assert weights.shape == expected.shape
    assert weights.dtype == expected.dtype
    assert torch.equal(weights + 0, expected)
    assert layer.dense_reads == 1


OTHERWISE = {
    "a factor behind the mask": lambda scores: (scores + mask()) * 2,
    "a factor that is negative": lambda scores: scores * -1,
    "a factor for each head": lambda scores: scores * torch.tensor([1.0, 2.0])[:, None, None],
    "a sum with a factor": lambda scores: torch.add(scores, mask(), alpha=0.5),
    "a mask of one dimension": lambda scores: scores + torch.ones(153),
    "two softcaps": lambda scores: scores.tanh().tanh(),
    "a choice": lambda scores: torch.where(mask() == 0, scores, -1e4),
    "the maximum of something else": lambda scores: scores - (scores * 2).max(dim=-1, keepdim=True).values,
    "the maximum of a column": lambda scores: scores - scores.max(dim=-2, keepdim=True).values,
    "places of the maximum": lambda scores: scores + scores.max(dim=-1, keepdim=True).indices,
    "sinks in front": lambda scores: torch.cat([torch.zeros(2, 2, 3, 1), scores], dim=-1)[..., 1:],
    "a product from the left": lambda scores: torch.matmul(torch.eye(3).expand(2, 2, 3, 3), scores),
    "a difference": lambda scores: torch.ones(2, 2, 3, 153) - scores,
    "a least score": lambda scores: torch.max(torch.zeros(2, 2, 3, 153), scores),
    "another order": lambda scores: scores.flip(-1),
    "a value that is written": lambda scores: scores.index_fill_(3, torch.tensor([0]), -1e4),
    "a mask that is added in place": lambda scores: scores.add_(mask()),
}


@pytest.mark.parametrize("change", OTHERWISE.values(), ids=OTHERWISE)
def test_other_operations_receive_the_weights(layer, lazy, query, change):
    def attend(keys, values):
        return torch.matmul(F.softmax(change(torch.matmul(query, keys.transpose(2, 3))), dim=-1), values)

    assert torch.allclose(attend(*lazy), attend(*dense(layer)), atol=1e-5)
    assert layer.dense_reads > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: torch.cat([torch.zeros_like(weights[..., :1]), weights[..., 1:]], dim=-1),
        lambda weights: F.dropout(weights, p=1.0),
        lambda weights: weights.softmax(dim=-1),
        lambda weights: weights[..., :-1] + weights[..., 1:],
    ],
    ids=["a token is left out", "dropout", "a second softmax", "neighbours"],
)
def test_changed_weights_are_attended_with(layer, lazy, query, change):
    keys, values = dense(layer)
    made, expected = change(plainly(query, lazy[0])), change(plainly(query, keys))
    assert torch.equal(made, expected)
    assert layer.stats()["attend_calls"] == 0


def test_writes_into_weights_persist(layer, lazy, query):
    weights = plainly(query, lazy[0])
    weights[..., 0] = 7
    assert bool((weights[..., 0] == 7).all())
    assert weights.data_ptr() == weights.data_ptr()
    expected = plainly(query, dense(layer)[0])
    expected[..., 0] = 7
    assert torch.allclose(torch.matmul(weights, lazy[1]), expected @ dense(layer)[1], atol=1e-5)


CHANGES = {
    "update": lambda layer: layer.update(torch.randn(2, 2, 200, 32), torch.randn(2, 2, 200, 32)),
    "crop": lambda layer: layer.crop(-60),
    "reset": lambda layer: layer.reset(),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "selection": lambda layer: layer.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_held_attention_weights_survive_changes_of_the_layer(layer, lazy, query, change):
    expected = plainly(query, dense(layer)[0])
    held = plainly(query, lazy[0])
    torch.matmul(held, lazy[1])
    change(layer)
    assert torch.equal(held + 0, expected)


def test_unreferenced_weights_are_not_computed(layer, query):
    for _ in range(3):
        lazy = layer.update(torch.randn(2, 2, 1, 32), torch.randn(2, 2, 1, 32))
        torch.matmul(plainly(query[:, :, :1], lazy[0]), lazy[1])
    assert layer.dense_reads == 0
    del lazy
    gc.collect()
    assert all(scores() is None for scores in layer.handed_out.scores)


def test_a_copied_layer_leaves_weights_to_its_original(layer, lazy, query):
    held = plainly(query, lazy[0])
    copied = copy.deepcopy(layer)
    copied.reset()
    assert layer.dense_reads == copied.dense_reads == 0
    assert torch.equal(held + 0, plainly(query, dense(layer)[0]))


def test_prompt_attention_equals_attention_without_a_cache():
    layer, query = GEARCache(nbits=2)._next_layer(), torch.randn(2, 2, 153, 32)
    exact = torch.randn(2, 2, 153, 32), torch.randn(2, 2, 153, 32)
    hidden = torch.full((153, 153), -torch.inf).triu(1).repeat(2, 1, 1, 1)
    hidden[1, :, :, :50] = torch.finfo(torch.float32).min

    def attend(keys, values):
        weights = F.softmax(torch.matmul(query, keys.transpose(2, 3)) * SCALE + hidden, dim=-1)
        return weights, torch.matmul(weights, values)

    weights, output = attend(*layer.update(*exact))
    expected = attend(*exact)
    assert torch.equal(output, expected[1])
    # Padding was shown by the mask, and the prompt is compressed by now
    assert layer.padding.tolist() == [0, 50]
    assert layer.stats()["prompts_without_mask"] == 0
    assert isinstance(weights, LazyKV)
    assert torch.equal(weights + 0, expected[0])
    assert layer.dense_reads == 0
