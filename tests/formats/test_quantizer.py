"""The quantizer of a normal variable: errors by integration, how far they are from Lloyd-Max's, and bits."""

import math

import pytest
import torch

from kvcache_plugins.formats.quantizer import DISTORTIONS, MAX_WIDTH, block_offsets, level_tables, levels_at, pack_rows


# Max, "Quantizing for minimum distortion" (1960), for 2, 4, 8, 16 and 32 levels
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
WIDTHS = range(1, MAX_WIDTH + 1)


def squared_error(levels: torch.Tensor) -> float:
    """Return the mean squared error of a normal variable in closed form, each value at its nearest level."""
    levels = levels.double()
    bounds = torch.cat([levels.new_tensor([-40.0]), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([40.0])])
    density = (-bounds * bounds / 2).exp() / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(bounds).diff()
    mean = -density.diff()
    square = share - (bounds * density).diff()
    return float((square - 2 * levels * mean + levels * levels * share).sum())


@pytest.mark.parametrize("width", WIDTHS)
def test_tabulated_distortions_equal_those_of_the_levels(width):
    assert squared_error(levels_at(width)) == pytest.approx(DISTORTIONS[width], rel=1e-3)


@pytest.mark.parametrize("width", LLOYD_MAX)
def test_levels_are_within_two_percent_of_lloyd_max(width):
    assert squared_error(levels_at(width)) < 1.021 * LLOYD_MAX[width]


@pytest.mark.parametrize("width", WIDTHS)
def test_bounds_choose_the_nearest_level(width):
    values = torch.randn(2000) * 1.5
    codes = torch.searchsorted(level_tables(torch.device("cpu")).bounds[width], values)
    nearest = (values[:, None] - levels_at(width)).abs().argmin(dim=1)
    assert torch.equal(codes, nearest)


def test_each_further_bit_reduces_the_error_less():
    gains = -torch.tensor(DISTORTIONS).diff()
    assert bool((gains.diff() < 0).all())


def test_codes_are_packed_lowest_bits_first():
    widths = torch.tensor([[[3, 1]]], dtype=torch.uint8)
    codes = torch.tensor([[7, 0, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1]])[None, None, None]
    rows = pack_rows(codes, torch.zeros(1, 1, 1, 1, dtype=torch.uint8), widths, 5)
    assert rows.flatten().tolist() == [0, 0b00000111, 0, 0b00100000, 0b10000001]
    assert block_offsets(widths).tolist() == [[[1, 4]]]


def test_rows_longer_than_their_codes_end_with_zeros():
    widths = torch.tensor([[[8, 3]]], dtype=torch.uint8)
    codes = torch.full((1, 1, 2, 2, 8), 5)
    rows = pack_rows(codes, torch.zeros(1, 1, 2, 1, dtype=torch.uint8), widths, 22)
    assert torch.equal(rows[..., :12], pack_rows(codes, torch.zeros(1, 1, 2, 1, dtype=torch.uint8), widths, 12))
    assert not rows[..., 12:].any()
