"""Kernels of chosen tokens at every level of instructions: like plain PyTorch, and never outside the arrays."""

import pytest
import torch

from kvcache_plugins.codecs.quantization import pack
from kvcache_plugins.kernels import tokens
from kvcache_plugins.kernels.compiled_tokens import attend_rows, choose_heaviest, code_scores, copy_rows, largest
from kvcache_plugins.kernels.library import levels_here


FORGED = (-(2**63), -1, 64, 2**40)


@pytest.fixture(params=levels_here(), autouse=True)
def _level(request, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_CPU_LEVEL", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 300])
def test_rows_match_pytorch(head_dim, groups, dtype):
    torch.manual_seed(0)
    pages = [torch.randn(2, 2, 32, 2 * head_dim).to(dtype) for _ in range(3)]
    window = torch.randn(2, 2, 7, head_dim).to(dtype)
    slots, count = torch.rand(2, 2, 96).topk(71, dim=2).indices, torch.tensor([[71, 3], [64, 0]])
    arguments = torch.randn(2, 2, groups, head_dim), pages, slots, count, window, window, head_dim**-0.5
    query, _, _, _, *others = arguments
    dense = tokens.gather_rows(pages, slots).split(head_dim, dim=3)
    expected = tokens.attend_staged(query, *dense, count, *others)
    assert torch.allclose(attend_rows(*arguments, None, None, 0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("forged", FORGED)
def test_slots_positions_and_counts_out_of_range_read_nothing_else(forged):
    pages = [torch.ones(1, 1, 32, 16) for _ in range(2)]
    slots, window = torch.full((1, 1, 5), forged), torch.ones(1, 1, 3, 8)
    query, mask = torch.randn(1, 1, 2, 8), torch.ones(1, 9, dtype=torch.bool)
    for count in (5, forged):
        of_heads = torch.full((1, 1), count)
        output = attend_rows(query, pages, slots, of_heads, window, window, 0.3, mask, slots, 6)
        assert torch.allclose(output, torch.ones(1, 1, 2, 8))
    out = torch.zeros(1, 1, 5, 16)
    copy_rows(pages, slots, out, are_mapped=False)
    assert (out == 1).all()


def test_masks_without_the_columns_of_the_window_are_refused():
    page, window = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 3, 8)
    slots, count = torch.zeros(1, 1, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="`mask` has to have at least 9 columns"):
        attend_rows(window[:, :, :1], [page], slots, count, window, window, 1.0, torch.ones(1, 8), None, 6)


@pytest.mark.parametrize("nbits", [2, 4, 8])
@pytest.mark.parametrize(("head_dim", "groups"), [(8, 1), (20, 9), (64, 3), (84, 4), (300, 2)])
def test_scores_match_pytorch(head_dim, groups, nbits):
    torch.manual_seed(0)
    codes = pack(torch.randint(0, 2**nbits, (2, 2, 131, head_dim), dtype=torch.uint8), nbits)
    query, scale = torch.randn(2, 2, groups, head_dim), (torch.rand(2, 2, 131) + 0.1).half()
    expected = tokens._code_scores(query, codes[:, :, :129], scale[:, :, :129], nbits)
    error = (code_scores(query, codes, scale, 129, nbits) - expected).square().mean().sqrt()
    assert error < 1e-4 * expected.square().mean().sqrt()


@pytest.mark.parametrize("length", [1, 63, 129])
def test_the_largest_and_the_heaviest_are_those_of_pytorch(length):
    torch.manual_seed(0)
    numbers = torch.randn(2, 3, length)
    expected = numbers.sort(dim=2, descending=True)
    values, places = largest(numbers, length, torch.full((2, 3), -torch.inf))
    assert torch.equal(values, expected.values) and torch.equal(places, expected.indices)
    scores, resident = torch.randn(2, 3, 2, length), torch.randn(2, 3, 2, 5)
    weights = torch.cat([scores, resident], dim=3).softmax(dim=3).mean(dim=2)[..., :length]
    slots, count = choose_heaviest(scores, resident, (0, length), 0.5 / length, length, length)
    assert torch.equal(count, (weights >= 0.5 / length).sum(dim=2))
    assert torch.equal(slots[0, 0, : count[0, 0]], weights[0, 0].argsort(descending=True)[: count[0, 0]])
