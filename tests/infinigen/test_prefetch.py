"""Rows on their way to a GPU: nothing is read before it is there, nor its memory given away before it was read.

There is no GPU here: see `conftest.py` for what stands in for one.
"""

import copy
import pickle

import pytest
import torch

from kvcache_plugins.infinigen import staging
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.infinigen.staging import TransferTimes


UNTIMED = TransferTimes(are_tracked=False)


def make_pool(num_tokens=PAGE_TOKENS + 100, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2, 3, num_tokens, dim, generator=generator).to(dtype) for dim in (8, 5)]
    pool = TokenPool(parts)
    pool.append(parts, 0, None)
    return pool


def make_selection(pool, num_chosen, count=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(2, 3, pool.num_slots, generator=generator).argsort(dim=2)
    if count is None:
        count = torch.randint(0, num_chosen + 1, (2, 3), generator=generator)
        # One head with none, one with all
        count[0, 0], count[-1, -1] = 0, num_chosen
    return Selection(order[:, :, :num_chosen].contiguous(), count)


def start(pool, selection, times=UNTIMED):
    return staging.start_fetch(pool, selection, times)


def assert_staged(rows, pool, selection):
    valid = selection.valid
    assert rows.shape == (*selection.slots.shape, pool.row_dim)
    assert torch.equal(rows[valid], pool.gather(selection.slots)[valid])


def fetch(pool, selection):
    assert_staged(start(pool, selection).wait(), pool, selection)


def test_transfers_follow_what_was_computed_and_attention_follows_them(cuda, transfers):
    pool = make_pool()
    for number in range(6):
        cuda.compute.do(f"write of the pool, choice {number}")
        staged = start(pool, make_selection(pool, 10, seed=number))
        assert f"write of the pool, choice {number}" in transfers[number]
        # The host has not told the computing stream to wait yet: the layer before computes
        assert f"transfer {number}" not in cuda.compute.do("layer before")
        staged.wait()
        assert f"transfer {number}" in cuda.compute.do(f"attention {number}")
    assert cuda.synchronized == []


@pytest.mark.parametrize("is_read", [False, True])
def test_memory_of_rows_is_the_computing_streams_once_they_are_written(cuda, transfers, is_read):
    """Whoever gets it next is behind the transfer there, and before the next one."""
    pool, other = make_pool(), cuda.Stream()
    staged = start(pool, make_selection(pool, 4))
    if is_read:
        with cuda.inside(other):
            place = staged.wait().data_ptr()
        assert "transfer 0" in other.past and (place, other) in cuda.recorded
    assert "transfer 0" not in cuda.compute.past
    del staged
    assert "transfer 0" in cuda.compute.do("who gets the memory")
    start(pool, make_selection(pool, 4))
    assert "who gets the memory" in transfers[1]


def test_what_the_stream_uses_is_not_freed_before(cuda, transfers):
    """The allocator is told of everything that the second stream reads and others may free."""
    pool, selection = make_pool(), make_selection(make_pool(), 12)
    start(pool, selection)
    side = {place for place, stream in cuda.recorded if stream is not cuda.compute}
    assert {each.data_ptr() for each in (selection.slots, selection.count, pool.addresses_for(torch.empty(1)))} == side


def test_staged_rows_are_not_copied(transfers):
    pool = make_pool()
    staged = start(pool, make_selection(pool, 8))
    assert copy.deepcopy([staged]) == [None]
    assert pickle.loads(pickle.dumps([staged])) == [None]


def test_pages_of_a_copy_are_locked(cuda, transfers, monkeypatch):
    locked = set()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in locked)

    def pin_memory(tensor):
        result = tensor.clone()
        locked.add(result.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pool = copy.deepcopy(make_pool())
    assert {page.data_ptr() for page in pool.pages} <= locked
    fetch(pool, make_selection(pool, 8))


def test_times_are_noted_where_they_are_asked_for(transfers):
    pool, times = make_pool(), TransferTimes(are_tracked=True)
    start(pool, make_selection(pool, 8), times).wait()
    # A transfer is one operation, and one of which the computing stream had not heard
    assert times.seconds() == copy.deepcopy(times).seconds() == {"transfer_s": 1.0, "stalled_s": 1.0}
    start(pool, make_selection(pool, 8)).wait()
    assert times.seconds() == {"transfer_s": 1.0, "stalled_s": 1.0} and UNTIMED.seconds() == {}
