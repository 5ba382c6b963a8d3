"""Scores of keys in groups of tokens: every kernel against float64."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvcache_plugins.codecs.parts import KeyGroups
from kvcache_plugins.codecs.quantization import pack
from kvcache_plugins.kernels.tokens import grouped_scores


KERNELS = ["torch", "compiled"]
# The compiled kernels round queries to 16 bits
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    batch_size: int
    num_heads: int
    groups: int
    head_dim: int
    nbits: int
    group_size: int
    num_groups: int
    # First slot, slot behind the last, and how far places are behind
    runs: tuple[tuple[int, int, int], ...]


CASES = {
    "one token, the last of its group": Case(1, 1, 1, 64, 4, 64, 1, ((0, 1, 63),)),
    "groups of queries, spare room": Case(2, 3, 3, 64, 4, 64, 5, ((0, 200, 10),)),
    "more than a task": Case(1, 2, 4, 64, 2, 64, 70, ((0, 4479, 1),)),
    "three runs, and groups without tokens": Case(2, 2, 2, 80, 8, 16, 20, ((0, 50, 14), (50, 61, 35), (61, 130, 51))),
    "a head dim that vectors do not divide, nine queries": Case(1, 1, 9, 84, 2, 64, 3, ((0, 150, 42),)),
    "fewer bytes than are read at once": Case(1, 3, 1, 20, 4, 8, 9, ((0, 61, 3),)),
    "bytes that hold fewer channels than they could": Case(2, 1, 5, 50, 4, 24, 4, ((0, 90, 6),)),
    "groups of one token": Case(1, 2, 3, 64, 4, 1, 40, ((0, 40, 0),)),
    "8 bits of many channels": Case(1, 1, 1, 300, 8, 32, 3, ((0, 96, 0),)),
}


def random_keys(case: Case) -> tuple[torch.Tensor, KeyGroups, torch.Tensor]:
    """Queries, keys, and the keys in all slots in float64; what is in no slot is as large as can be."""
    torch.manual_seed(0)
    size = case.batch_size, case.num_heads, case.num_groups
    codes = torch.randint(0, 2**case.nbits, (*size, case.group_size, case.head_dim), dtype=torch.uint8)
    scale, zero = (torch.rand(*size, case.head_dim) + 0.1).half(), torch.randn(*size, case.head_dim).half()
    dense = zero.double()[:, :, :, None] + scale.double()[:, :, :, None] * codes.double()
    dense = torch.cat([dense.flatten(2, 3)[:, :, first + shift : stop + shift] for first, stop, shift in case.runs], 2)
    query = torch.randn(case.batch_size, case.num_heads, case.groups, case.head_dim)
    return query, KeyGroups(pack(codes, case.nbits), scale, zero, case.nbits, case.runs), dense


def check(query: torch.Tensor, keys: KeyGroups, dense: torch.Tensor) -> torch.Tensor:
    scores, expected = grouped_scores(query, keys), query.double() @ dense.transpose(2, 3)
    assert scores.dtype == torch.float32
    assert scores.shape == expected.shape
    error = (scores.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < TOLERANCE
    return scores


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", request.param)
    return request.param


@pytest.mark.parametrize("name", CASES)
def test_match_float64(name, kernel):
    check(*random_keys(CASES[name]))


@pytest.mark.parametrize("size", [0.0, 1e-35, 1e20])
def test_queries_of_any_size(size, kernel):
    query, keys, dense = random_keys(CASES["groups of queries, spare room"])
    scores, expected = grouped_scores(query * size, keys), query.double() @ dense.transpose(2, 3) * size
    assert torch.allclose(scores.double(), expected, atol=1e-2 * size + 1e-30, rtol=1e-3)


def test_threads_and_neighbours_do_not_change_a_bit(monkeypatch):
    monkeypatch.setenv("KVCACHE_PLUGINS_KERNELS", "compiled")
    query, keys, dense = random_keys(CASES["three runs, and groups without tokens"])
    before, outputs = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        outputs.append(check(query, keys, dense))
    torch.set_num_threads(before)
    one = slice(1, 2)
    alone = replace(keys, codes=keys.codes[one], scale=keys.scale[one], zero=keys.zero[one])
    assert torch.equal(*outputs) and torch.equal(outputs[0][one], grouped_scores(query[one], alone))


def test_tensors_of_any_strides(kernel):
    query, keys, dense = random_keys(CASES["groups of queries, spare room"])
    turned = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in (keys.codes, keys.scale, keys.zero))
    query = query.transpose(1, 3).contiguous().transpose(1, 3)
    check(query, KeyGroups(*turned, keys.nbits, keys.runs), dense)


def test_places_follow_their_runs():
    keys = random_keys(CASES["three runs, and groups without tokens"])[1]
    slots = torch.tensor([[0, 49, 50, 60], [61, 129, 3, 55]])
    assert keys.places_of(slots).tolist() == [[14, 63, 85, 95], [112, 180, 17, 90]]
