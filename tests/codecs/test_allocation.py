"""Bits by energy: least error against all other ways to give them."""

import itertools

import pytest
import torch

from kvcache_plugins.codecs.bit_allocation import allocate_widths, share_bytes
from kvcache_plugins.codecs.prompt_codec import make_value_format
from kvcache_plugins.formats.quantizer import DISTORTIONS, num_blocks


def expected_distortion(energies, widths):
    return (energies * torch.tensor(DISTORTIONS)[widths]).sum(dim=-1)


@pytest.mark.parametrize("total", [0, 1, 7, 12, 24])
def test_allocated_widths_have_the_least_error(total):
    energies = torch.tensor([[[5.0, 1.0, 0.03]]])
    widths = allocate_widths(energies, total, DISTORTIONS)
    assert int(widths.sum()) == total
    others = torch.tensor([each for each in itertools.product(range(9), repeat=3) if sum(each) == total])
    least = expected_distortion(energies.expand(1, len(others), 3), others[None]).min()
    assert float(expected_distortion(energies, widths)) <= float(least) * 1.0001


@pytest.mark.parametrize("energies", [torch.zeros(1, 1, 4), torch.full((1, 1, 4), 1e-30)], ids=["zero", "tiny"])
def test_all_bits_are_given_to_channels_without_energy(energies):
    assert allocate_widths(energies, 8, DISTORTIONS).tolist() == [[[2, 2, 2, 2]]]


@pytest.mark.parametrize(("head_dim", "total"), [(64, 17), (64, 64), (20, 5), (1, 3)])
def test_value_widths_differ_by_at_most_one(head_dim, total):
    widths = make_value_format(torch.randn(1, 1, 9, head_dim), torch.ones(1, 9).bool(), total).widths[0, 0].tolist()
    assert len(widths) == num_blocks(head_dim) and sum(widths) == total and max(widths) - min(widths) <= 1


def test_bytes_shared_among_sides_have_the_least_error():
    energies = [torch.rand(2, 4) + 0.1, 100 * (torch.rand(2, 4) + 0.1), torch.rand(1, 3) * 1e-6 + 1e-9]
    total, least = 2 * 9 + 2 * 14 + 1 * 3, 3
    counts = share_bytes(energies, total, least, DISTORTIONS)
    assert min(counts) == counts[2] == least and counts[0] < counts[1]
    spent = sum(count * len(side) for count, side in zip(counts, energies, strict=True))
    assert total - 2 <= spent <= total

    def error(counts: list[int]) -> float:
        pairs = zip(energies, counts, strict=True)
        widths = (allocate_widths(side[None], count, DISTORTIONS) for side, count in pairs)
        return sum(float(expected_distortion(*pair).sum()) for pair in zip(energies, widths, strict=True))

    for shift in (-2, -1, 1, 2):
        assert error(counts) <= error([counts[0] + shift, counts[1] - shift, counts[2]])


def test_all_bytes_are_used_if_sides_have_room():
    assert share_bytes([torch.rand(2, 3), torch.rand(2, 5)], 2 * 8 * 8, 3, DISTORTIONS) == [24, 40]
