"""Tokens of items that wait for a table join the exact ones in front; what is no number is found anywhere."""

import pytest
import torch

from kvcache_plugins.layers.packing import ExactPrefix, check_finite


VALID = torch.tensor([[False, True, True], [True, True, True]])


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


def states(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # As models lay them out: not contiguous
    return torch.randn(2, 3, 4, 8, dtype=dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("valid", [None, VALID], ids=["all", "padded"])
def test_what_is_no_number_is_found(dtype, number, side, valid):
    both = {"keys": states(dtype), "values": states(dtype)}
    check_finite(**both, valid=valid, layer_idx=7)
    both[side][1, 2, 1, 3] = number
    with pytest.raises(ValueError, match=f"layer 7: the {side} to be compressed hold NaN or infinity"):
        check_finite(**both, valid=valid, layer_idx=7)


def test_padding_may_hold_anything():
    keys, values = states(), states()
    keys[0, :, 0], values[0, 1, 0] = torch.nan, torch.inf
    check_finite(keys, values, VALID, 0)
    with pytest.raises(ValueError, match="the keys"):
        check_finite(keys, values, None, 0)


def test_no_tokens_and_no_data():
    check_finite(states()[:, :, :0], states()[..., :0], None, 0)
    check_finite(states().to("meta"), states().to("meta"), None, 0)


def test_numbers_are_named_before_scales():
    good, bad = torch.zeros(1, 1, 3, 4), torch.full((1, 1, 3, 4), torch.nan)
    ends, reaches = torch.tensor(True), torch.tensor(False)
    check_finite(good, good, None, 0, is_beyond=reaches)
    with pytest.raises(ValueError, match="layer 3: tokens are too large"):
        check_finite(good, good, None, 3, is_beyond=ends)
    with pytest.raises(ValueError, match="layer 3: the values .* hold NaN"):
        check_finite(good, bad, None, 3, is_beyond=ends)
    # Not the scales of padding: whoever asks leaves them out
    check_finite(good, bad, torch.zeros(1, 3, dtype=torch.bool), 3, is_beyond=reaches)
