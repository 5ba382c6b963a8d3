"""Trellis codes: the search finds the best path, and errors are those known of such trellises."""

import itertools

import pytest
import torch

from kvcache_plugins.codecs.quantizers import NUM_STATES, Trellis, state_points


TRELLIS = Trellis()
WIDTHS = range(1, len(TRELLIS.distortions))


def refit_points(width: int, num_rounds: int) -> list[float]:
    """
    Errors of long streams over the Gaussian bound, of the points as they are and after each round of the fit that the
    coefficients are from: a search, and then the odd polynomial of least error for the states that it found.
    """
    torch.manual_seed(1)
    normal, widths = torch.randn(1, 1, 50, 30, 8), torch.full((1, 1, 30), width)
    order = (torch.arange(NUM_STATES) * TRELLIS.multipliers[width]) % NUM_STATES
    centred = (2 * order.double() + 1) / NUM_STATES - 1
    powers, errors = torch.stack([centred, centred**3, centred**5], dim=1), []
    # Points of its own are fitted: compiled coding has kept those of before
    state_points.cache_clear()
    try:
        for _ in range(1 + num_rounds):
            states = TRELLIS.quantize(normal, widths, True)
            errors.append(float((TRELLIS.points(states, widths) - normal).square().mean()) * 4**width)
            chosen = powers[states.flatten()]
            fitted = torch.linalg.lstsq(chosen, normal.double().flatten()[:, None]).solution[:, 0]
            # Searches go on with these
            state_points(torch.device("cpu"))[width] = (powers @ fitted).float()
    finally:
        state_points.cache_clear()
    return errors


@pytest.mark.parametrize("width", WIDTHS)
def test_coefficients_are_those_that_their_fit_ends_with(width):
    errors = refit_points(width, 2)
    assert min(errors) > 0.99 * errors[0]


@pytest.mark.long
@pytest.mark.parametrize("width", [2, 3, 4])
def test_multipliers_are_better_than_others(width, monkeypatch):
    errors = {}
    for multiplier in (TRELLIS.multipliers[width], 1, 3, 55, 129):
        multipliers = list(TRELLIS.multipliers)
        multipliers[width] = multiplier
        monkeypatch.setattr(Trellis, "multipliers", tuple(multipliers))
        errors[multiplier] = refit_points(width, 1)[-1]
        monkeypatch.undo()
    best, *others = errors.values()
    assert best < min(others)


@pytest.mark.parametrize("width", WIDTHS)
def test_all_states_have_points_of_their_own(width):
    points = state_points(torch.device("cpu"))[width]
    assert len(points.unique()) == NUM_STATES
    torch.testing.assert_close(points.sort().values, -points.sort().values.flip(0))


def test_no_path_is_nearer():
    """Compares the found path with all 65536 through a block of eight numbers."""
    torch.manual_seed(1)
    normal = torch.randn(1, 1, 5, 1, 8)
    widths = torch.tensor([[[2]]])
    # The search counts in eighths of what is 1 / 4 here
    grid = (state_points(torch.device("cpu"))[2] * 32).round()
    numbers = (normal.flatten(0, 3) * 32).round()
    found = grid[TRELLIS.quantize(normal, widths, False).flatten(0, 3)]
    codes = torch.tensor(list(itertools.product(range(4), repeat=8)))
    states, state = torch.zeros_like(codes), torch.zeros(len(codes), dtype=torch.int64)
    for place in reversed(range(8)):
        state = (state * 4 + codes[:, place]) % NUM_STATES
        states[:, place] = state
    for own, number in zip(found, numbers, strict=True):
        least = (grid[states] - number).square().sum(dim=1).min()
        assert float((own - number).square().sum()) == float(least)
