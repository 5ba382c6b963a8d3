"""The quantizers of a normal variable: their errors by integration, and how far they are from Lloyd-Max's."""

import math

import pytest
import torch

from kvcache_plugins.codecs.quantizers import MAX_WIDTH, QUANTIZERS, thresholds


# Max, "Quantizing for minimum distortion" (1960), for 2, 4, 8, 16 and 32 levels
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}
DISTORTIONS, levels = QUANTIZERS["lloyd-max"].distortions, QUANTIZERS["lloyd-max"].levels
WIDTHS = range(1, MAX_WIDTH + 1)


def squared_error(points: torch.Tensor) -> float:
    """Over a normal variable, in closed form: every value goes to its nearest point."""
    points = points.double()
    bounds = torch.cat([points.new_tensor([-40.0]), (points[1:] + points[:-1]) / 2, points.new_tensor([40.0])])
    density = (-bounds * bounds / 2).exp() / math.sqrt(2 * math.pi)
    share = torch.special.ndtr(bounds).diff()
    mean = -density.diff()
    square = share - (bounds * density).diff()
    return float((square - 2 * points * mean + points * points * share).sum())


@pytest.mark.parametrize("width", WIDTHS)
def test_distortions_are_those_of_the_points(width):
    assert squared_error(levels(width)) == pytest.approx(DISTORTIONS[width], rel=1e-3)


@pytest.mark.parametrize("width", LLOYD_MAX)
def test_points_are_within_two_percent_of_lloyd_max(width):
    assert squared_error(levels(width)) < 1.021 * LLOYD_MAX[width]


@pytest.mark.parametrize("width", WIDTHS)
def test_points_are_in_order_and_symmetric(width):
    points = levels(width)
    assert points.shape == (2**width,) and bool((points.diff() > 0).all())
    torch.testing.assert_close(points, -points.flip(0))


@pytest.mark.parametrize("width", WIDTHS)
def test_thresholds_lead_to_the_nearest_point(width):
    values = torch.randn(2000) * 1.5
    codes = torch.searchsorted(thresholds(torch.device("cpu"))[width], values)
    nearest = (values[:, None] - levels(width)).abs().argmin(dim=1)
    assert torch.equal(codes, nearest)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_further_bits_are_worth_less_and_less(quantizer):
    gains = -torch.tensor(QUANTIZERS[quantizer].distortions).diff()
    assert bool((gains.diff() < 0).all())
