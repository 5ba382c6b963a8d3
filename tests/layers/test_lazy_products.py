"""Attention that is written out over lazy states: what dense states give, and nothing made dense."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache

from kvcache_plugins import GEARCache
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.lazy_states import LazyStates


# Sums of tiles instead of one sum
TOLERANCE = 1e-5
Filled = tuple[LazyLayer, LazyStates, LazyStates]
STORAGES: dict[str, Callable[[], Cache]] = {
    "gear": lambda: GEARCache(nbits=4, residual_length=16),
    "sinks": lambda: GEARCache(nbits=4, backbone="kivi", residual_length=16, num_sink_tokens=9, rotate_values=True),
    "transform": lambda: GEARCache(nbits=4, backbone="transform"),
}


def filled(make_cache: Callable[[], Cache], padding: tuple[int, int] = (0, 0)) -> Filled:
    """A layer after a prompt of 150 tokens and 40 decoded ones, and the states that it handed out last."""
    layer = make_cache()._next_layer()
    heads = 2, 2
    layer.update(torch.randn(*heads, 150, 32), torch.randn(*heads, 150, 32))
    if any(padding):
        layer.padding = torch.tensor(padding)
    layer.settle_prompt()
    for _ in range(40):
        keys, values = layer.update(torch.randn(*heads, 1, 32), torch.randn(*heads, 1, 32))
    return layer, keys, values


@pytest.fixture(params=STORAGES.keys())
def states(request: pytest.FixtureRequest) -> Filled:
    return filled(STORAGES[request.param])


def write_out(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    groups = query.shape[1] // keys.shape[1]
    keys, values = (
        each[:, :, None].expand(*each.shape[:2], groups, *each.shape[2:]).reshape(2, -1, *each.shape[2:])
        for each in (keys, values)
    )
    weights = torch.tanh(torch.matmul(query, keys.transpose(2, 3)) * 0.3).softmax(dim=-1)
    return torch.matmul(weights, values)


def flat(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As Bloom: items and heads in one dimension, a bias added to the product."""
    query, keys, values = (each.reshape(-1, each.shape[2], 32) for each in (query[:, :2], keys, values))
    bias = torch.linspace(-1, 0, keys.shape[1]).expand(4, 1, -1)
    weights = bias.baddbmm(batch1=query, batch2=keys.transpose(-1, -2), beta=0.5, alpha=0.2).softmax(dim=-1)
    return torch.bmm(weights, values)


def latent(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As multi-head latent attention: projected, split, and put together again."""
    torch.manual_seed(0)
    projection = nn.Linear(32, 2 * 24, bias=False)
    with torch.no_grad():
        wide = projection(keys[:, :1]).view(2, keys.shape[2], 2, 24).transpose(1, 2)
    nope, summed = torch.split(wide, [16, 8], dim=-1)
    rotary = values[:, :1].expand(-1, 2, -1, -1)
    made = wide.new_empty(*wide.shape[:-1], 48)
    made[..., :16].copy_(nope)
    made[..., 16:].copy_(rotary)
    query = torch.cat([query, query[..., :16]], dim=-1)[:, :2]
    by_hand = (query @ made.mT * 0.1).softmax(dim=-1) @ summed
    fused = F.scaled_dot_product_attention(query, made, summed, scale=0.1)
    assert torch.allclose(by_hand, fused, atol=TOLERANCE)
    return fused


def joined(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """As differential attention: halves of the values repeated, and sides put together."""
    first, second = (each.repeat(1, 2, 1, 1) for each in torch.chunk(values, 2, dim=1))
    both = torch.cat([first, second], dim=-1)
    return F.scaled_dot_product_attention(query[:, :2], keys, both)


@pytest.mark.parametrize("attention", [write_out, flat, latent, joined])
def test_written_out_attention_is_that_over_dense_states(
    states: Filled,
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    layer, keys, values = states
    query = torch.randn(2, 4, 1, 32)
    output = attention(query, keys, values)
    assert layer.dense_reads == 0
    assert layer.stats()["written_out_calls"] > 0
    expected = attention(query, layer.materialize("keys"), layer.materialize("values"))
    assert torch.allclose(output, expected, atol=TOLERANCE)


@pytest.mark.parametrize("make_cache", STORAGES.values(), ids=STORAGES.keys())
@pytest.mark.parametrize("padding", [(0, 0), (0, 20), (81, 3)], ids=str)
def test_tiles_are_the_dense_states_in_order(make_cache: Callable[[], Cache], padding: tuple[int, int]) -> None:
    layer, _, _ = filled(make_cache, padding)
    seen = 0
    for tokens, tile in layer.dense_tiles({"keys", "values"}):
        assert tokens.start == seen
        seen = tokens.stop
        for side, states in tile.items():
            assert torch.equal(states, layer.materialize(side)[:, :, tokens])
    assert seen == layer.get_seq_length() == 190


def test_a_prompt_is_attended_to_exactly_and_stored() -> None:
    layer = GEARCache(nbits=2)._next_layer()
    keys, values = torch.randn(2, 2, 150, 32), torch.randn(2, 2, 150, 32)
    query = torch.randn(2, 4, 150, 32)
    assert torch.equal(write_out(query, *layer.update(keys, values)), write_out(query, keys, values))
    assert layer.dense_reads == 0
    assert layer.stats()["tokens_compressed"] == 128


def test_padding_is_told_by_the_weights_of_a_prompt() -> None:
    layer = GEARCache(nbits=2)._next_layer()
    keys, values = layer.update(torch.randn(2, 2, 150, 32), torch.randn(2, 2, 150, 32))
    hidden = torch.ones(150, 150).triu(1).bool().repeat(2, 1, 1, 1)
    hidden[1, :, :, :37] = True
    scores = torch.randn(2, 2, 150, 32) @ keys.transpose(2, 3)
    weights = scores.masked_fill(hidden, torch.finfo(torch.float32).min).softmax(dim=-1)
    assert layer.padding is None
    weights @ values
    assert layer.padding.tolist() == [0, 37]
    assert layer.stats()["prompts_without_mask"] == 0


def test_gradients_end_at_what_is_stored() -> None:
    _, keys, values = filled(STORAGES["gear"])
    query = torch.randn(2, 4, 1, 32, requires_grad=True)
    with pytest.raises(NotImplementedError, match="gradients do not flow"):
        write_out(query, keys, values).sum().backward()


def test_writing_into_what_is_stored_is_refused() -> None:
    _, keys, _ = filled(STORAGES["gear"])
    for write in (lambda: keys.mul_(2), lambda: keys.__setitem__(0, 0.0), lambda: keys.add_(1)):
        with pytest.raises(NotImplementedError, match="writes into the keys or values"):
            write()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_that_of_dense_states(dtype: torch.dtype) -> None:
    layer = GEARCache(nbits=4)._next_layer()
    layer.update(*(torch.randn(2, 2, 1500, 32, dtype=dtype) for _ in range(2)))
    layer.settle_prompt()
    keys, values = layer.update(*(torch.randn(2, 2, 1, 32, dtype=dtype) for _ in range(2)))
    query = torch.randn(2, 4, 1, 32, dtype=dtype)
    output = write_out(query, keys, values)
    assert output.dtype == dtype
    expected = write_out(query, layer.materialize("keys"), layer.materialize("values"))
    assert torch.allclose(output, expected, atol=4 * torch.finfo(dtype).eps)
