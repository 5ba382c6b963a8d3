"""Attention in tiles of queries against plain softmax, for every kind of mask."""

import pytest
import torch

from kvcache_plugins.baselines import h2o
from kvcache_plugins.baselines.h2o import attend_and_weigh, sum_weights
from kvcache_plugins.kernels.attention_call import AttentionCall


B, H, G, Q, L, D = 2, 2, 3, 7, 19, 8
MASKS = ("none", "causal", "bool", "float", "by-head", "one-row", "two-dims")


def make_mask(kind):
    causal = torch.ones(Q, L, dtype=torch.bool).tril(L - Q)
    padding = torch.arange(L) >= torch.tensor([0, 5])[:, None, None, None]
    return {
        "none": None,
        "causal": None,
        "bool": causal & padding,
        "float": torch.randn(B, 1, Q, L).masked_fill(~(causal & padding), torch.finfo(torch.float32).min),
        "by-head": torch.rand(1, H * G, Q, L) < 0.7,
        "one-row": padding,
        "two-dims": causal,
    }[kind]


def plain(query, keys, mask, is_causal, allowed):
    """Softmax weights `[B, H * G, Q, S]`, zero in rows without a token."""
    scores = query @ keys.repeat_interleave(G, dim=1).transpose(2, 3) * D**-0.5
    if is_causal:
        mask = torch.ones(Q, L, dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return (
        scores.masked_fill(~allowed.repeat_interleave(G, dim=1)[:, :, None], -torch.inf).softmax(dim=-1).nan_to_num(0)
    )


@pytest.mark.parametrize("tile_numbers", [1, B * H * G * L * 3, 1 << 24], ids=["row", "three", "whole"])
@pytest.mark.parametrize("kind", MASKS)
def test_sums_over_all_positions(monkeypatch, kind, tile_numbers):
    monkeypatch.setitem(h2o._TILE_NUMBERS, "cpu", tile_numbers)
    query, keys, mask = torch.randn(B, H * G, Q, D), torch.randn(B, H, L, D), make_mask(kind)
    weights = plain(query, keys, mask, kind == "causal", torch.ones(B, H, L, dtype=torch.bool))
    real = torch.arange(Q) >= torch.tensor([0, 3])[:, None]
    for real_queries in (None, real):
        counted = weights if real_queries is None else weights * real[:, None, :, None]
        expected = counted.unflatten(1, (H, G)).sum(dim=(2, 3))
        call = AttentionCall(query, mask, is_causal=kind == "causal")
        assert torch.allclose(sum_weights(call, keys, L, real_queries), expected, atol=1e-5)


@pytest.mark.parametrize("tile_numbers", [1, 1 << 24], ids=["row", "whole"])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_over_slots(monkeypatch, kind, tile_numbers):
    monkeypatch.setitem(h2o._TILE_NUMBERS, "cpu", tile_numbers)
    query, mask = torch.randn(B, H * G, Q, D), make_mask(kind)
    keys, values = torch.randn(B, H, L, D), torch.randn(B, H, L, D + 2)
    # Every head has its slots in an order of its own, some of them free; what is in those must not matter
    order = torch.rand(B, H, L).argsort(dim=2)[:, :, : L - 4]
    free = torch.rand(order.shape) < 0.3
    slots = [states.gather(2, order[..., None].expand(*order.shape, states.shape[3])) for states in (keys, values)]
    slots = [states.masked_fill(free[..., None], 1e3) for states in slots]
    positions = order.masked_fill(free, -1).int()
    allowed = torch.zeros(B, H, L, dtype=torch.bool).scatter(2, order, ~free)

    weights = plain(query, keys, mask, kind == "causal", allowed)
    call = AttentionCall(query, mask, is_causal=kind == "causal")
    tiles = list(attend_and_weigh(call, *slots, L, positions))
    output, seen = (torch.cat(parts, dim=2) for parts in list(zip(*tiles, strict=True))[1:])
    assert torch.allclose(output, weights @ values.repeat_interleave(G, dim=1), atol=1e-5)
    by_position = weights.unflatten(1, (H, G)).sum(dim=2)
    index = order[:, :, None].expand(B, H, Q, -1)
    assert torch.allclose(seen, by_position.gather(3, index), atol=1e-5)
