"""Attention over chosen codes: slots and runs from memory never reach outside the arrays."""

import pytest
import torch

from kvcache_plugins.codecs.parts import CodedTokens, KeyGroups, SinkStates, ValuePages
from kvcache_plugins.kernels.compiled_tokens import attend_chosen, grouped_scores
from kvcache_plugins.kernels.library import levels_here


def keys_of(runs) -> KeyGroups:
    ones = torch.ones(1, 1, 4, 8, dtype=torch.float16)
    return KeyGroups(torch.zeros(1, 1, 4, 16, 4, dtype=torch.uint8), ones, ones, 4, runs)


@pytest.mark.parametrize("level", levels_here())
@pytest.mark.parametrize("forged", [-(2**63), -1, 64, 2**40])
def test_slots_and_counts_out_of_range_read_nothing_else(monkeypatch, level, forged):
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", level)
    row = torch.cat([torch.zeros(4, dtype=torch.uint8), torch.ones(2, dtype=torch.float16).view(torch.uint8)])
    pages = [row.expand(1, 1, 32, 8).contiguous() for _ in range(2)]
    sinks = torch.ones(1, 1, 2, 8)
    tokens = CodedTokens(keys_of([(0, 64, 0)]), ValuePages(pages, 8, 4, 8), SinkStates(None, sinks, sinks))
    window, slots = torch.ones(1, 1, 1, 8), torch.full((1, 1, 5), forged)
    for count in (5, forged):
        of_heads, mask = torch.full((1, 1), count), torch.ones(1, 9)
        output = attend_chosen(torch.zeros(1, 1, 2, 8), tokens, slots, of_heads, window, window, 0.3, mask, 8)
        assert output.isfinite().all() and (output <= 8**0.5 + 1e-5).all()


@pytest.mark.parametrize("level", levels_here())
def test_the_order_of_slots_does_not_matter(monkeypatch, level):
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", level)
    heads, groups, dim, count = 2, 5, 20, 150
    codes = torch.randint(0, 256, (1, heads, 16, 16, dim // 2), dtype=torch.uint8)
    keys = KeyGroups(codes, *torch.rand(2, 1, heads, 16, dim).half(), 4, [(0, 40, 0), (40, 240, 8)])
    numbers = torch.rand(1, heads, 240, 2).half().view(torch.uint8)
    rows = torch.cat([torch.randint(0, 256, (1, heads, 240, dim // 2), dtype=torch.uint8), numbers], dim=3)
    sinks = torch.randn(1, heads, 3, dim)
    pages = [page.contiguous() for page in rows.split(120, dim=2)]
    tokens = CodedTokens(keys, ValuePages(pages, dim, 4, dim), SinkStates(None, sinks, sinks))
    slots = torch.stack([torch.randperm(240)[:count] for _ in range(heads)])[None]
    query, window, of_heads = (
        torch.randn(1, heads, groups, dim),
        torch.randn(1, heads, 2, dim),
        torch.full((1, heads), count),
    )
    outputs = [
        attend_chosen(query, tokens, each, of_heads, window, window, 0.3, torch.randn(1, 242).mul(0), 240)
        for each in (slots, slots.sort().values, slots.flip(2))
    ]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


@pytest.mark.parametrize("runs", [[(0, 65, 0)], [(0, 8, -1)], [(1, 8, 0)], [(0, 8, 0), (9, 12, 0)]], ids=str)
def test_runs_that_do_not_follow_each_other_within_the_groups_are_refused(runs):
    with pytest.raises(ValueError, match="`runs`"):
        grouped_scores(torch.randn(1, 1, 1, 8), keys_of(runs))
