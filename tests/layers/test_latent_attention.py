"""Latent attention over stored latent states is what attention over expanded keys and values is."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins import TransformCodingCache, create_cache
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.latent_attention import LatentAttention
from kvcache_plugins.layers.lazy_kv import LazyKV


HEADS, NOPE, ROTARY, VALUE, RANK = 4, 16, 8, 12, 32
TOKENS = 150


@pytest.fixture
def weight():
    return torch.randn(HEADS * (NOPE + VALUE), RANK) / RANK**0.5


@pytest.fixture
def layer():
    """A layer of latent states and rotary keys that holds packed tokens."""
    layer = TransformCodingCache(nbits=8)._next_layer()
    layer.update(torch.randn(2, 1, TOKENS, RANK), torch.randn(2, 1, TOKENS, ROTARY))
    layer.commit_prompt()
    return layer


def expand(latent, rotary, weight, bias=None):
    """Expand as the models of Transformers do."""
    batch_size, _, num_tokens, _ = latent.shape
    states = F.linear(latent, weight, bias).view((batch_size, num_tokens, -1, NOPE + VALUE)).transpose(1, 2)
    nope, values = torch.split(states, [NOPE, VALUE], dim=-1)
    rotary = rotary.expand(-1, nope.shape[1], -1, -1)
    keys = states.new_empty(*states.shape[:-1], NOPE + ROTARY)
    keys[..., :NOPE].copy_(nope)
    keys[..., NOPE:].copy_(rotary)
    return keys, values


def by_sdpa(query, keys, values, mask):
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=0.3)


def by_steps(query, keys, values, mask):
    scores = torch.matmul(query, keys.transpose(2, 3)) * 0.3
    return torch.matmul(F.softmax(scores if mask is None else scores + mask, dim=-1, dtype=torch.float32), values)


@pytest.mark.parametrize("attend", [by_sdpa, by_steps])
@pytest.mark.parametrize("num_new", [1, 3, 60])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_equals_that_to_expanded_states(layer, weight, attend, num_new, is_masked):
    lazy = layer.update(torch.randn(2, 1, num_new, RANK), torch.randn(2, 1, num_new, ROTARY))
    query, mask = torch.randn(2, HEADS, num_new, NOPE + ROTARY), None
    if is_masked:
        mask = torch.zeros(2, 1, num_new, TOKENS + num_new)
        mask[1, ..., 20:50] = -torch.inf
    dense = [layer.to_dense(side) for side in ("keys", "values")]
    output = attend(query, *expand(*lazy, weight), mask)
    assert layer.dense_reads == 0
    assert torch.allclose(output, attend(query, *expand(*dense, weight), mask), atol=1e-4)


def test_few_queries_attend_to_latents_and_many_to_expanded_tokens(weight):
    attention = LatentAttention(weight.unflatten(0, (HEADS, -1)), NOPE)
    expands = [attention.expands(AttentionCall(torch.zeros(1, HEADS, count, NOPE + ROTARY))) for count in (1, 24, 25)]
    # 36 channels more a query of a head, against 28 * 32 that expand a token
    assert expands == [False, False, True]


def test_latent_prompt_attention_equals_attention_without_a_cache(weight):
    layer = TransformCodingCache()._next_layer()
    states, query = (torch.randn(2, 1, 80, RANK), torch.randn(2, 1, 80, ROTARY)), torch.randn(2, HEADS, 80, 24)
    mask = torch.full((80, 80), -torch.inf).triu(1).repeat(2, 1, 1, 1)
    mask[1, ..., :10] = torch.finfo(torch.float32).min
    expected = by_sdpa(query, *expand(*states, weight), mask)
    assert torch.equal(by_sdpa(query, *expand(*layer.update(*states), weight), mask), expected)
    assert layer.padding.tolist() == [0, 10]


OTHERWISE = {
    "a bias": lambda lazy, weight: expand(*lazy, weight, torch.ones(len(weight))),
    "a factor": lambda lazy, weight: expand(lazy[0] * 2, lazy[1], weight),
    "another rotary key": lambda lazy, weight: expand(lazy[0], lazy[1] + 1, weight),
    "one part instead of another": lambda lazy, weight: [
        F.pad(each, (0, NOPE + ROTARY - each.shape[3])) for each in expand(*lazy, weight)
    ],
    "values of another layer": lambda lazy, weight: (
        expand(*lazy, weight)[0],
        expand(*lazy, weight.flip(0))[1],
    ),
}


@pytest.mark.parametrize("make", OTHERWISE.values(), ids=OTHERWISE)
def test_other_operations_receive_dense_states(layer, weight, make):
    lazy = layer.update(torch.randn(2, 1, 1, RANK), torch.randn(2, 1, 1, ROTARY))
    query, dense = torch.randn(2, HEADS, 1, NOPE + ROTARY), [layer.to_dense(side) for side in ("keys", "values")]
    output = by_sdpa(query, *make(lazy, weight), None)
    assert layer.dense_reads > 0
    assert torch.allclose(output, by_sdpa(query, *make(dense, weight), None), atol=1e-5)


def test_writes_into_keys_persist(layer, weight):
    lazy = layer.update(torch.randn(2, 1, 1, RANK), torch.randn(2, 1, 1, ROTARY))
    dense = [layer.to_dense(side) for side in ("keys", "values")]
    made = []
    for states in (lazy, dense):
        keys, values = expand(*states, weight)
        keys[..., 3:5].copy_(torch.ones(2, HEADS, TOKENS + 1, 2))
        made.append((keys, values))
    assert isinstance(made[0][0], LazyKV)
    assert torch.allclose(made[0][0] + 0, made[1][0], atol=1e-6)
    query = torch.randn(2, HEADS, 1, NOPE + ROTARY)
    outputs = [by_sdpa(query, *each, None) for each in made]
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("name", ["transform", "gear", "kivi-2bit", "kvarn-k4v4", "llamacpp-q8_0"])
def test_values_without_channels_are_refused_by_caches_that_code(name):
    """Of latent attention without a rotary part, as in GLM-5 Next."""
    with pytest.raises(ValueError, match="keys of 32 and values of 0 channels cannot be coded"):
        create_cache(name).update(torch.randn(1, 1, 80, 32), torch.randn(1, 1, 80, 0), 0)
