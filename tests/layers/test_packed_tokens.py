"""Tokens of items that wait for a table join the exact ones in front, each behind its own."""

import torch

from kvcache_plugins.layers.packed_tokens import ExactPrefix


def prefix_of(starts, counts, num_slots):
    """Every token is its own position."""
    start, count = torch.tensor(starts), torch.tensor(counts)
    positions = (start[:, None] + torch.arange(num_slots)).float()[:, None, :, None]
    return ExactPrefix(positions.clone(), -positions, start=start, count=count, is_uniform=False)


def tokens(batch_size, first, count):
    positions = torch.arange(first, first + count).float()[None, None, :, None].expand(batch_size, -1, -1, -1)
    return positions, -positions


def require_positions(prefix):
    for item, count in enumerate(prefix.count.tolist()):
        expected = prefix.start[item] + torch.arange(count)
        assert torch.equal(prefix.keys[item, 0, :count, 0], expected.float())
        assert torch.equal(prefix.values[item, 0, :count, 0], -expected.float())


def test_only_those_that_wait_join():
    # One that has a table, one that has begun, and two whose padding went on: into the new tokens, and beyond them
    prefix = prefix_of([0, 40, 50, 50], [4, 10, 0, 0], 10)
    waiting = torch.tensor([False, True, True, True])
    joined = prefix.joined(*tokens(4, 50, 20), 50, torch.tensor([0, 40, 57, 90]), waiting)
    assert joined.start.tolist() == [0, 40, 57, 90] and joined.count.tolist() == [4, 30, 13, 0]
    assert joined.num_slots == 30 and not joined.is_uniform
    require_positions(joined)
    # What it was made of is as it was
    assert prefix.count.tolist() == [4, 10, 0, 0] and prefix.start.tolist() == [0, 40, 50, 50]
    again = joined.joined(*tokens(4, 70, 30), 70, torch.tensor([0, 40, 57, 90]), waiting)
    assert again.count.tolist() == [4, 60, 43, 10]
    require_positions(again)


def test_what_is_not_kept_takes_no_room():
    prefix = prefix_of([0, 40, 50], [4, 30, 20], 30)
    shorter = prefix.shortened(torch.tensor([100, 4, 100]))
    assert shorter.count.tolist() == [4, 4, 20] and shorter.num_slots == 20
    assert shorter.keys.untyped_storage().nbytes() == shorter.keys.nbytes
    require_positions(shorter)
    assert prefix.shortened(torch.tensor([100, 100, 100])).keys is prefix.keys
