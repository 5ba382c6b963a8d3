"""Victims that new tokens replace: distinct, by policy, without attention sinks; and masks of slots."""

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.infinigen.config import InfiniGenConfig
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.pool import PAGE_TOKENS, TokenPool, UsageRecord
from kvcache_plugins.kernels.attention_call import AttentionCall


def filled(policy: str, num_protected: int = 0, num_slots: int = 8) -> UsageRecord:
    record = UsageRecord(policy, num_protected, 1, 2, num_slots)
    record.add(0, num_slots, 0)
    return record


def fetch(record: UsageRecord, *slots: int) -> None:
    chosen = torch.tensor(slots).expand(1, 2, -1)
    record.touch(chosen, torch.ones_like(chosen, dtype=torch.bool))


# Policies with attention sinks, tokens fetched in each step, and victims of as many tokens at a time
VICTIMS = {
    "fifo": (2, [[2, 3]], [[2, 3, 4], [5, 6]]),
    "lru": (0, [[0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 7], [1]], [[3, 5], [0, 2]]),
    "counter": (0, [[0, 1, 2, 3, 4, 5]] * 3 + [[6]], [[7, 6]]),
}


@pytest.mark.parametrize("policy", VICTIMS)
def test_each_policy_evicts_its_victims(policy: str) -> None:
    num_protected, fetched, victims = VICTIMS[policy]
    record, position, expected = filled(policy, num_protected), 8, list(range(8))
    for slots in fetched:
        fetch(record, *slots)
    for slots in victims:
        assert record.replace(len(slots), position, None).tolist() == [[slots] * 2]
        for slot in slots:
            expected[slot], position = position, position + 1
    assert record.positions.tolist() == [[expected] * 2]
    # A new token starts with the average, so that it is not the next victim
    assert policy != "counter" or record.usage[0, 0, 7] > 0


def test_padding_of_a_selection_is_not_counted() -> None:
    record = filled("counter")
    chosen = torch.tensor([[[0, 1, 2]] * 2])
    record.touch(chosen, torch.tensor([[[True, False, False], [True, True, False]]]))
    assert record.usage is not None
    assert record.usage[0, :, :3].tolist() == [[1, 0, 0], [1, 1, 0]]


def test_filling_does_not_hide_the_use_of_a_slot() -> None:
    record = filled("lru")
    fetch(record, 1, 2, 3, 4, 5, 6, 7)
    # Filling is slot 0, which may be selected, too
    record.touch(torch.tensor([[[0, 1, 0]] * 2]), torch.tensor([[[True, True, False]] * 2]))
    assert record.usage[0, 0].tolist() == [2, 2, 1, 1, 1, 1, 1, 1]


def test_a_run_of_tokens_evicts_no_attention_sink() -> None:
    keys = torch.arange(40.0)[None, None, :, None].expand(1, 2, -1, 4)
    pool = TokenPool((keys, keys), max_tokens=16, num_protected=15)
    pool.append((keys, keys), None)
    assert pool.usage is not None
    assert pool.usage.positions[0, 0].sort().values.tolist() == [*range(15), 39]


def test_counters_are_halved_when_one_saturates() -> None:
    record = filled("counter")
    for step in range(300):
        fetch(record, *([0, 1] if step % 2 else [0]))
    assert record.usage is not None
    first, second, third = record.usage[0, 0, :3].tolist()
    # 255 and then halved, and 45 more; the other one had half as many all along
    assert (first, second, third) == (172, 86, 0)


def test_padding_is_evicted_first() -> None:
    record = UsageRecord("counter", 1, 2, 1, 6)
    record.add(0, 6, 0)
    victims = record.replace(3, 6, torch.tensor([0, 4]))
    assert victims[0, 0].tolist() == [1, 2, 3]
    # Three of four padding tokens
    assert victims[1, 0].tolist() == [0, 1, 2]
    assert record.num_evicted == 3


def test_rolled_back_slots_are_reused_first() -> None:
    record = filled("lru")
    record.truncate(6)
    assert record.replace(2, 6, None)[0, 0].sort().values.tolist() == [6, 7]
    assert record.num_evicted == 0


@pytest.mark.parametrize("policy", ["counter", "lru", "fifo"])
def test_each_eviction_has_another_victim(policy: str) -> None:
    """The paper's released code had one victim for 102 evictions."""
    generator = torch.Generator().manual_seed(0)
    states = torch.arange(400.0)[None, None, :, None].expand(1, 2, -1, 4)
    pool = TokenPool((states, states), max_tokens=100, eviction=policy, num_protected=4)
    gone: list[set[int]] = [set(), set()]
    num_gone = 0
    for position in range(400):
        assert pool.usage is not None
        before = [set(row.tolist()) - {-1} for row in pool.usage.positions[0]]
        pool.append((states[:, :, position : position + 1], states[:, :, position : position + 1]), None)
        for head, row in enumerate(pool.usage.positions[0]):
            victims = before[head] - set(row.tolist())
            assert not victims & gone[head]
            gone[head] |= victims
            num_gone += len(victims)
            assert policy == "fifo" or position not in victims
        chosen = torch.randint(0, pool.num_slots, (1, 2, 9), generator=generator).sort(dim=2).values
        pool.usage.touch(chosen, torch.ones_like(chosen, dtype=torch.bool))
    assert pool.usage is not None
    assert num_gone == pool.usage.num_evicted == 2 * 300
    assert all(set(range(4)) <= set(row.tolist()) for row in pool.usage.positions[0])
    # Every slot holds the token that the record says
    slots = torch.arange(100).expand(1, 2, -1)
    assert torch.equal(pool.gather(slots)[..., 0].long(), pool.usage.positions.long())


def test_rows_are_gathered_from_all_pages() -> None:
    count = 2 * PAGE_TOKENS + 70
    keys, values = torch.randn(2, 3, count, 5), torch.randn(2, 3, count, 7)
    pool = TokenPool((keys, values))
    for start in range(0, count, 600):
        stop = min(start + 600, count)
        assert pool.append((keys[:, :, start:stop], values[:, :, start:stop]), None) == (stop - start, [])
    slots = torch.randint(0, count, (2, 3, 200), generator=torch.Generator().manual_seed(0))
    expected = torch.cat([keys, values], dim=3).gather(2, slots[..., None].expand(-1, -1, -1, 12))
    assert torch.equal(pool.gather(slots), expected)
    pool.truncate(PAGE_TOKENS)
    assert (len(pool.pages), pool.num_slots) == (1, PAGE_TOKENS)
    assert torch.equal(torch.cat([rows[..., :5] for rows, *_ in pool.iter_pages()], dim=2), keys[:, :, :PAGE_TOKENS])


@pytest.mark.parametrize("counts", [(1, 63, 1), (40, 100, 884), (65, PAGE_TOKENS - 65, 1), (PAGE_TOKENS + 5, 3)])
def test_a_first_page_is_as_large_as_its_tokens_need(counts):
    keys = torch.randn(2, 3, sum(counts), 8)
    pool, done = TokenPool((keys, keys)), 0
    for count in counts:
        new = keys[:, :, done : done + count]
        pool.append((new, -new), None)
        done += count
        room = sum(page.shape[2] for page in pool.pages)
        assert room == max(64, 1 << (done - 1).bit_length()) if done <= PAGE_TOKENS else room % PAGE_TOKENS == 0
        held = torch.cat([rows[..., :8] for rows, *_ in pool.iter_pages()], dim=2)
        assert torch.equal(held, keys[:, :, :done])
        slots = torch.arange(done).expand(2, 3, done)
        assert torch.equal(pool.gather(slots)[..., 8:], -keys[:, :, :done])
        parts = dict.fromkeys(("pool", "spare"), 0)
        for part, tensor in pool.named_tensors():
            parts[part] += tensor.shape[2]
        assert parts == {"pool": done, "spare": room - done}


@pytest.mark.parametrize("pool_tokens", [None, 100])
@pytest.mark.parametrize("is_bias", [False, True])
@torch.no_grad()
def test_each_head_attends_under_its_own_mask(is_bias: bool, pool_tokens: int | None) -> None:
    layer = InfiniGenLayer(InfiniGenConfig(pool_tokens=pool_tokens, recent=8), 0)
    keys, values = torch.randn(2, 2, 2, 63, 16)
    layer.update(keys[:, :, :60], values[:, :, :60])
    layer.commit_prompt()
    layer.update(keys[:, :, 60:], values[:, :, 60:])
    query, mask = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 3, 63)
    mask = mask if is_bias else mask > -1
    expected = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
    torch.testing.assert_close(layer.attend(AttentionCall(query, mask)), expected)
