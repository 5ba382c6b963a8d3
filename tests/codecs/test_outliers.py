"""Outliers are counted along the axis that is filtered, and no place is chosen twice."""

import pytest
import torch

from kvcache_plugins.codecs.outliers import (
    Outliers,
    add_outliers,
    select_outliers,
    sort_into_tiles,
)


def test_counts_come_from_the_filtered_axis():
    # The released code takes the count of keys from the channels: 40 a side of 1000 tokens at 4096 channels, instead
    # of 10
    states = torch.randn(1, 32, 1, 1000, 128)
    outliers, _ = select_outliers(states, None, 0.02, "key")
    assert outliers.tokens.shape == (1, 1, 32 * 20 * 128)
    assert outliers.in_use is None
    of_values, _ = select_outliers(states[:, :, :, :3], None, 0.02, "value")
    assert of_values.tokens.shape == (1, 1, 3 * 2 * round(0.01 * 4096))


def test_keys_are_the_largest_and_smallest_of_each_channel():
    states = torch.randn(2, 2, 3, 50, 8)
    outliers, keep = select_outliers(states, None, 0.08, "key")
    indices = outliers.tokens.unflatten(2, (2, -1, 8)).transpose(1, 2)
    assert torch.equal(keep, torch.ones_like(states).scatter(3, indices, 0).bool())
    chosen = states.gather(3, indices).sort(dim=3).values
    ordered = states.sort(dim=3).values
    assert torch.equal(chosen, torch.cat([ordered[:, :, :, :2], ordered[:, :, :, -2:]], dim=3))


def test_values_are_chosen_over_all_heads():
    states = torch.zeros(1, 2, 1, 4, 50)
    states[:, 1, :, 2, 7] = 5
    states[:, 0, :, 2, 3] = -5
    outliers, keep = select_outliers(states, None, 0.02, "value")
    assert not keep[0, 1, 0, 2, 7]
    assert not keep[0, 0, 0, 2, 3]
    assert keep[:, :, :, 2].sum() == 98
    places = (outliers.heads * 50 + outliers.channels).view(4, 2)
    assert sorted(places[2].tolist()) == [3, 57]


def test_no_place_twice_among_equal_values():
    tokens = select_outliers(torch.zeros(1, 1, 1, 100, 2), None, 0.5, "key")[0].tokens.view(50, 2)
    for channel in range(2):
        assert tokens[:, channel].unique().numel() == 50


def test_short_sequence_of_a_padded_batch_keeps_its_own_count():
    states = torch.randn(2, 2, 1, 400, 4)
    valid = torch.ones(2, 1, 400, dtype=torch.bool)
    valid[1, 0, :300] = False
    outliers, _ = select_outliers(states, valid, 0.02, "key")
    alone = select_outliers(states[1:, :, :, 300:], None, 0.02, "key")[0].tokens
    # Of two heads of four channels
    assert outliers.in_use.sum(dim=(1, 2)).tolist() == [8 * 8, 2 * 8]
    assert torch.equal(outliers.tokens[1][outliers.in_use[1]], alone.flatten() + 300)


@pytest.mark.parametrize("head_dim", [20, 64, 512, 600])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_stored_outliers_come_back_where_they_were(head_dim, length):
    batch_size, num_heads, num_chunks = 2, 3, 2
    shape = (batch_size, num_heads, num_chunks, length, head_dim)
    dense = torch.where(torch.rand(shape) < 0.02, torch.randn(shape), 0)
    # Every sequence's list is as long as the longest, in random order, with unused entries among the others
    rows = dense.transpose(1, 2).flatten(2)
    order = torch.rand(rows.shape).masked_fill(rows != 0, 2).argsort(dim=2, descending=True)
    flat = order[..., : int((rows != 0).sum(2).max())]
    flat = flat[..., torch.randperm(flat.shape[2])]
    values = rows.gather(2, flat)
    places = Outliers(
        heads=flat // (length * head_dim),
        tokens=flat // head_dim % length,
        channels=flat % head_dim,
        in_use=values != 0,
    )
    stored = sort_into_tiles(places, torch.where(values == 0, 7, values), num_heads, length, head_dim)
    assert stored[0].dtype == (torch.int32 if head_dim > 512 else torch.int16)
    for tokens in (slice(0, length), slice(length // 3, length), slice(length // 2, length // 2 + 1)):
        states = torch.zeros(shape)[:, :, :, tokens].contiguous()
        add_outliers(states, *stored, tokens)
        assert torch.equal(states, dense[:, :, :, tokens])
