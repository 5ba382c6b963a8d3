"""Slots: where new tokens go, and what a slot that is free looks like. Which stay: `test_h2o.py`, by a simulation."""

import torch

from kvcache_plugins.baselines.kept_tokens import FREE, KeptTokens


B, H, D = 2, 3, 4


def states_of(positions):
    """Keys that say their item, head and position, and values that are their negatives."""
    keys = torch.zeros(*positions.shape, D)
    keys[..., 0], keys[..., 1] = torch.arange(B)[:, None, None], torch.arange(H)[:, None]
    keys[..., 2] = positions
    return keys, -keys


def make(length, weights=None):
    positions = torch.arange(length).expand(B, H, length).clone()
    weights = torch.rand(B, H, length) if weights is None else weights
    return KeptTokens(*states_of(positions), positions, weights)


def append(kept, start, count):
    kept.append(*states_of(torch.arange(start, start + count).expand(B, H, count)), start)


def held(kept):
    """Positions of every item and head, sorted; what stands beside them has to belong to them."""
    used = kept.positions != FREE
    keys, values = states_of(kept.positions)
    assert torch.equal(kept.keys[used], keys[used])
    assert torch.equal(kept.values[used], values[used])
    return [[sorted(kept.positions[item, head][used[item, head]].tolist()) for head in range(H)] for item in range(B)]


def test_new_tokens_take_free_slots():
    kept = make(24)
    kept.keep(20, 20, 0, max_budget=20)
    assert [part for part, _ in kept.named_tensors()] == ["kept", "kept", "index", "index"]
    storage = kept.keys.data_ptr()
    before = held(kept)
    append(kept, 24, 4)
    assert kept.keys.data_ptr() == storage
    assert held(kept) == [[positions + [24, 25, 26, 27] for positions in item] for item in before]
    assert (kept.weights[kept.positions >= 24] == 0).all()
    append(kept, 28, 3)
    assert kept.num_slots == 27
    assert held(kept) == [[positions + list(range(24, 31)) for positions in item] for item in before]


def test_dropped_tail_and_dense():
    kept = make(40)
    kept.keep(35, 30, 0, max_budget=35)
    kept.drop_from(36)
    positions = held(kept)
    assert all(len(each) == 31 and max(each) == 35 for item in positions for each in item)
    dense = kept.dense("keys", 36)
    assert dense.shape == (B, H, 36, D)
    for item in range(B):
        for head in range(H):
            missing = sorted(set(range(36)) - set(positions[item][head]))
            assert (dense[item, head, missing] == 0).all()
            assert dense[item, head, positions[item][head], 2].tolist() == positions[item][head]
    assert kept.is_within(31)
    assert not kept.is_within(30)


def test_equal_weights_keep_the_first():
    kept = make(12, torch.ones(B, H, 12))
    kept.keep(6, 10, 0, max_budget=6)
    assert held(kept) == [[[0, 1, 2, 3, 10, 11]] * H] * B
