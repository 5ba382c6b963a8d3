"""Rows on their way to a GPU: attention over them is right, and nothing is read before it is there.

There is no GPU here: see `conftest.py` for what stands in for one.
"""

import copy
import math
import pickle

import pytest
import torch

from kvcache_plugins.infinigen import staging as prefetch
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool
from kvcache_plugins.infinigen.selection import Selection
from kvcache_plugins.infinigen.staging import Prefetcher, TransferTimes


CPU = torch.device("cpu")


@pytest.fixture
def prefetcher(cuda):
    return Prefetcher(CPU)


def make_pool(
    num_tokens=PAGE_TOKENS + 100, batch_size=2, num_heads=3, key_dim=8, value_dim=5, dtype=torch.float32, **options
):
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(batch_size, num_heads, num_tokens, dim, generator=generator).to(dtype)
        for dim in (key_dim, value_dim)
    )
    pool = TokenPool((keys, values), **options)
    pool.append((keys, values), 0, None)
    return pool


def make_selection(pool, num_chosen, count=None, seed=1):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(pool.batch_size, pool.num_heads, pool.num_slots, generator=generator).argsort(dim=2)
    if count is None:
        count = torch.randint(0, num_chosen + 1, (pool.batch_size, pool.num_heads), generator=generator)
        # One head with none, one with all
        count[0, 0], count[-1, -1] = 0, num_chosen
    return Selection(order[:, :, :num_chosen].contiguous(), count)


def assert_staged(rows, pool, selection):
    valid = selection.valid
    assert rows.shape == (*selection.slots.shape, pool.row_dim)
    assert torch.equal(rows[valid], pool.gather(selection.slots)[valid])


def fetch(prefetcher, pool, selection):
    with prefetcher.start(pool, selection) as rows:
        assert_staged(rows, pool, selection)


def test_rows_are_staged(prefetcher, transfers):
    """Of several pages and of one, with none chosen and nothing to choose."""
    pool, none = make_pool(), torch.zeros(2, 3, dtype=torch.int64)
    for num_chosen in (1, 63, 129):
        fetch(prefetcher, pool, make_selection(pool, num_chosen))
    pool = make_pool(num_tokens=20, dtype=torch.float16)
    for selection in (make_selection(pool, 7), make_selection(pool, 7, none), make_selection(pool, 0, none)):
        fetch(prefetcher, pool, selection)


def test_pages_that_are_added_or_replaced_are_found(prefetcher, transfers):
    pool = make_pool(num_tokens=30)
    more = torch.randn(2, 3, PAGE_TOKENS, 13, generator=torch.Generator().manual_seed(4)).split([8, 5], dim=3)
    for change in (None, lambda: pool.append(more, 30, None), lambda: pool.map(lambda page: -page)):
        if change is not None:
            change()
        fetch(prefetcher, pool, make_selection(pool, 30))


def test_transfers_follow_what_was_computed_and_attention_follows_them(cuda, prefetcher, transfers):
    pool, selection = make_pool(), None
    for number in range(6):
        cuda.compute.do(f"write of the pool, choice {number}")
        selection = make_selection(pool, 10, seed=number)
        staged = prefetcher.start(pool, selection)
        assert f"write of the pool, choice {number}" in transfers[number]
        # The host has not told the computing stream to wait yet: the layer before computes
        assert f"transfer {number}" not in cuda.compute.do("layer before")
        with staged:
            assert f"transfer {number}" in cuda.compute.do(f"attention {number}")
    assert len(prefetcher._stagings) == 1


def test_layers_in_turn_use_two_buffers_that_nobody_reads(cuda, prefetcher, transfers):
    """As in a decode step: the next layer's rows are fetched before this layer's attention reads its own."""
    pool = make_pool()
    selections = [make_selection(pool, 10, seed=number) for number in range(5)]
    waiting = prefetcher.start(pool, selections[0])
    places = []
    for number in range(1, 5):
        following = prefetcher.start(pool, selections[number])
        with waiting as rows:
            places.append(rows.data_ptr())
            assert_staged(rows, pool, selections[number - 1])
            cuda.compute.do(f"attention {number - 1}")
        if number > 1:
            assert f"attention {number - 2}" in transfers[number]
        waiting = following
    assert len(prefetcher._stagings) == len(set(places)) == 2


def test_a_buffer_is_not_overwritten_while_another_stream_reads_it(cuda, prefetcher, transfers):
    pool, other = make_pool(), cuda.Stream()
    staged = prefetcher.start(pool, make_selection(pool, 4))
    with cuda.inside(other), staged:
        other.do("attention elsewhere")
    with prefetcher.start(pool, make_selection(pool, 4)):
        assert len(prefetcher._stagings) == 1
        assert "attention elsewhere" in transfers[1]


def test_rows_that_are_held_are_not_overwritten(prefetcher, transfers):
    pool = make_pool()
    selections = [make_selection(pool, 12, seed=number) for number in range(3)]
    staged = [prefetcher.start(pool, selection) for selection in selections]
    for each, selection in zip(staged, selections, strict=True):
        assert_staged(each.__enter__(), pool, selection)
    assert len(prefetcher._stagings) == 3
    with staged[0]:
        pass
    with pytest.raises(AssertionError), staged[0]:
        pass


def test_rows_that_nobody_asks_for_give_their_buffer_back(prefetcher, transfers):
    pool = make_pool()
    for number in range(4):
        prefetcher.start(pool, make_selection(pool, 12, seed=number))
    assert len(prefetcher._stagings) == 1


def test_what_the_stream_uses_is_not_freed_before(cuda, prefetcher, transfers):
    """The allocator is told of everything that the second stream reads or writes."""
    pool, selection = make_pool(), make_selection(make_pool(), 12)
    with prefetcher.start(pool, selection) as rows:
        side = {place for place, stream in cuda.recorded if stream is prefetcher._stream}
        assert {selection.slots.data_ptr(), selection.count.data_ptr(), rows.data_ptr()} <= side


def test_buffers_grow_by_shares_and_are_counted(prefetcher, transfers):
    pool, sizes = make_pool(), set()
    for num_chosen in range(100, 200):
        with prefetcher.start(pool, make_selection(pool, num_chosen)) as rows:
            assert rows.nbytes <= prefetcher.staging_bytes <= 1.25 * 2 * rows.nbytes
            sizes.add(prefetcher.staging_bytes)
    assert len(sizes) <= math.ceil(math.log(2, 1.25)) + 1


def test_buffers_made_in_inference_mode_are_written_to_outside_of_it(prefetcher, transfers):
    pool = make_pool()
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            fetch(prefetcher, pool, make_selection(pool, 8))


def test_the_host_waits_only_where_it_gathers(cuda, prefetcher, transfers, request):
    pool = make_pool()
    cuda.compute.do("choice")
    with prefetcher.start(pool, make_selection(pool, 8)):
        pass
    by_host = "torch" in request.node.callspec.id
    assert len(cuda.synchronized) == by_host
    assert all("choice" in past for past in cuda.synchronized)


def test_staged_rows_are_not_copied(prefetcher, transfers):
    pool = make_pool()
    staged = prefetcher.start(pool, make_selection(pool, 8))
    assert copy.deepcopy([staged]) == [None]
    assert pickle.loads(pickle.dumps([staged])) == [None]


def test_a_copy_of_a_pool_is_fetched_from_its_own_pages(prefetcher, transfers):
    pool = make_pool()
    selection = make_selection(pool, 8)
    prefetcher.start(pool, selection)
    copied = copy.deepcopy(pool)
    copied.map(torch.neg)
    fetch(prefetcher, copied, selection)


def test_pages_that_are_not_locked_are_locked_or_gathered_by_the_host(cuda, prefetcher, monkeypatch):
    """As in a copy of a pool."""
    cuda.use_kernel("triton")
    locked = set()
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.data_ptr() in locked)

    def pin_memory(tensor):
        result = tensor.clone()
        locked.add(result.data_ptr())
        return result

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    pool = make_pool()
    selection = make_selection(pool, 8)
    fetch(prefetcher, pool, selection)
    assert len(cuda.synchronized) == 1
    pool.pin_memory = True
    with prefetcher.start(pool, selection) as rows:
        assert len(cuda.synchronized) == 1
        assert_staged(rows, pool, selection)
    assert {page.data_ptr() for page in pool.pages} <= locked


def test_times_are_noted_where_they_are_asked_for(cuda, prefetcher, transfers):
    pool, times = make_pool(), TransferTimes()
    with prefetcher.start(pool, make_selection(pool, 8), times):
        pass
    # A transfer is one operation, and one of which the computing stream had not heard
    assert times.seconds() == {"transfer_s": 1.0, "stalled_s": 1.0}
    with prefetcher.start(pool, make_selection(pool, 8)):
        pass
    assert times.seconds() == {"transfer_s": 1.0, "stalled_s": 1.0}
    assert copy.deepcopy(times).seconds() == times.seconds()


def test_a_device_has_one_prefetcher_whose_bytes_are_told(cuda, transfers, monkeypatch):
    monkeypatch.setattr(prefetch, "_PREFETCHERS", {})
    pool, device = make_pool(), torch.device("cpu", 0)
    assert prefetch.staging_bytes(device) == 0
    assert prefetch.prefetcher_of(device) is prefetch.prefetcher_of(device)
    prefetch._PREFETCHERS[device] = Prefetcher(CPU)
    prefetch.prefetcher_of(device).start(pool, make_selection(pool, 8))
    assert prefetch.staging_bytes(device) > 0
    prefetch._PREFETCHERS.clear()
    assert prefetch.staging_bytes(device) == 0


def test_nothing_is_fetched_to_a_cpu():
    pool = make_pool()
    assert prefetch.start_fetch(pool, make_selection(pool, 8)) is None
