"""TurboQuant: the distortions that its paper states, unbiased scores, and bytes to the byte."""

import math

import pytest
import torch

from kvcache_plugins.baselines import TurboQuantCache
from kvcache_plugins.baselines.turboquant import TurboQuantCoder, constants


CPU = torch.device("cpu")
# The paper's: mean squared error of unit vectors, with as many digits as it gives: two of them have one only
PUBLISHED = {1: (0.36, 2), 2: (0.117, 3), 3: (0.03, 2), 4: (0.009, 3)}
# The same for a normal variable, as Max (1960) has it
LLOYD_MAX = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}


def unit_vectors(count: int, dim: int) -> torch.Tensor:
    states = torch.randn(1, 1, count, dim, generator=torch.Generator().manual_seed(5))
    return states / states.norm(dim=-1, keepdim=True)


def through(coder: TurboQuantCoder, states: torch.Tensor) -> torch.Tensor:
    return coder.decode(coder.encode(states))


@pytest.mark.parametrize("nbits", PUBLISHED)
def test_distortion_equals_the_published_one(nbits: int) -> None:
    """Checks vectors of few large coordinates too: the rotation makes them alike."""
    errors = []
    for power in (1, 5):
        states = unit_vectors(4000, 256) ** power
        states = states / states.norm(dim=-1, keepdim=True)
        coder = TurboQuantCoder(256, nbits, residual=False)
        errors.append((through(coder, states) - states).square().sum(dim=-1).mean().item())
    published, digits = PUBLISHED[nbits]
    for error in errors:
        assert error == pytest.approx(LLOYD_MAX[nbits], rel=0.02)
        assert round(error, digits) == published
        if nbits <= 2:
            assert error == pytest.approx(published, rel=0.02)


@pytest.mark.parametrize("nbits", [2, 3, 4])
def test_residual_makes_scores_unbiased(nbits: int) -> None:
    """Codes alone shrink inner products; with signs of the residual they are right on average, as in the paper."""
    dim, count = 64, 20000
    states = unit_vectors(count, dim)
    for residual in (False, True):
        found = through(TurboQuantCoder(dim, nbits, residual), states)
        # Mean product of each vector with itself, which is 1
        mean = (found * states).sum(dim=-1).mean().item()
        if residual:
            assert mean == pytest.approx(1, abs=0.01)
        else:
            assert mean == pytest.approx(1 - LLOYD_MAX[nbits], abs=0.005)
    query = unit_vectors(count, dim).flip(2)
    error = ((found - states) * query).sum(dim=-1).square().mean().item()
    # The paper: 1.57, 0.56, 0.18 and 0.047 divided by the dimension, at 1 to 4 bits
    assert error == pytest.approx({2: 0.56, 3: 0.18, 4: 0.047}[nbits] / dim, rel=0.15)


def test_levels_are_symmetric_and_each_the_mean_of_its_cell() -> None:
    for nbits in (1, 4, 8):
        levels = constants(128, nbits, CPU).levels
        assert levels.shape == (2**nbits,)
        assert bool((levels.diff() > 0).all())
        torch.testing.assert_close(levels, -levels.flip(0), atol=2e-4, rtol=0)
    # One bit: the mean of a half of a normal variable, nearly
    assert constants(128, 1, CPU).levels[1].item() == pytest.approx(math.sqrt(2 / math.pi / 128), rel=5e-3)


@pytest.mark.parametrize("dim", [5, 64, 80])
def test_rotation_is_orthogonal_and_always_the_same(dim: int) -> None:
    matrix = constants(dim, 2, CPU).rotation
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-5, rtol=0)
    constants.cache_clear()
    assert torch.equal(constants(dim, 2, CPU).rotation, matrix)


@pytest.mark.parametrize(
    ("options", "row"),
    [
        ({"nbits": 1}, 2 * (2 + 8)),
        ({"nbits": 2}, 2 * (2 + 16)),
        ({"nbits": 3}, 2 * (2 + 24)),
        ({"nbits": 4}, 2 * (2 + 32)),
        ({"nbits": 5, "value_nbits": 6}, 2 + 40 + 2 + 48),
        ({"key_nbits": 8, "value_nbits": 3}, 2 + 64 + 2 + 24),
        ({"nbits": 3, "residual": True}, 2 + 16 + 2 + 8 + 2 + 24),
    ],
)
def test_bytes_of_a_token_equal_the_published_ones(options: dict[str, int | bool], row: int) -> None:
    cache = TurboQuantCache(**options)
    states = torch.randn(2, 3, 10, 64)
    cache.update(states, states, 0)
    cache.layers[0].commit_prompt()
    assert cache.memory().total_bytes == 2 * 3 * 10 * row
    assert cache.stats()["tokens_compressed"] == 10
