"""Rotation by Hadamard matrices: orthogonal, its own inverse, and it spreads what stands out."""

import pytest
import torch

from kvcache_plugins.codecs.rotation import hadamard_matrix, rotate, rotation_size


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (128, 128), (96, 32), (80, 16), (6, 2), (5, 1)])
def test_rotates_the_largest_power_of_two(head_dim: int, size: int) -> None:
    assert rotation_size(head_dim) == size
    matrix = hadamard_matrix(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    states = torch.randn(2, 3, head_dim)
    rotated = rotate(states)
    torch.testing.assert_close(rotated.norm(dim=-1), states.norm(dim=-1))
    torch.testing.assert_close(rotate(rotated), states)
    assert size == 1 or not torch.allclose(rotated, states)


def test_a_value_that_stands_out_is_spread() -> None:
    states = torch.zeros(64)
    states[5] = 8.0
    torch.testing.assert_close(rotate(states).abs(), torch.ones(64))


def test_half_precision_is_rotated_in_float32() -> None:
    states = torch.randn(4, 64, dtype=torch.bfloat16)
    assert rotate(states).dtype == torch.float32
    torch.testing.assert_close(rotate(states), rotate(states.float()))


def test_autocast_does_not_round_what_is_rotated() -> None:
    states = torch.randn(2, 3, 64)
    expected = rotate(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate(states), expected)
