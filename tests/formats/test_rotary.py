"""Rotations: the rotary embedding is undone as Transformers does it, and Hadamard matrices are their own inverse."""

import pytest
import torch
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_half_split

from kvcache_plugins.formats.hadamard import hadamard_matrix, rotate, rotation_size
from kvcache_plugins.formats.rotary import RotaryLayout, candidate_layouts


FREQUENCIES = (1.0, 0.3, 0.01, 0.0001)


def embedded(keys: torch.Tensor, name: str) -> torch.Tensor:
    angles = torch.arange(keys.shape[2])[:, None] * torch.tensor(FREQUENCIES)
    if name == "half-split":
        angles = torch.cat([angles, angles], dim=-1)[None]
        return apply_half_split(keys, keys, angles.cos(), angles.sin())[1]
    angles = angles.repeat_interleave(2, dim=-1)[None]
    return apply_interleaved(keys, keys, angles.cos(), angles.sin())[1]


@pytest.mark.parametrize("name", ["half-split", "interleaved"])
def test_rotation_of_a_model_is_undone(name):
    keys = torch.randn(2, 3, 100, 8)
    layout = RotaryLayout(FREQUENCIES, name, 0, 8)
    cosines, sines = layout.angles(torch.arange(100))
    rotated = embedded(keys, name)
    torch.testing.assert_close(layout.rotate(keys, cosines, sines), rotated, atol=1e-4, rtol=0)
    torch.testing.assert_close(layout.rotate(rotated, cosines, -sines), keys, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", candidate_layouts(FREQUENCIES, 11), ids=lambda each: f"{each.name}-{each.first}")
def test_partial_rotation_keeps_other_channels(layout):
    keys = torch.randn(1, 1, 5, 11)
    rotated = layout.rotate(keys, *layout.angles(torch.arange(5)))
    untouched = [channel for channel in range(11) if not layout.first <= channel < layout.first + 8]
    assert torch.equal(rotated[..., untouched], keys[..., untouched])
    if layout.frequencies:
        assert not torch.equal(rotated, keys)
    torch.testing.assert_close(rotated.norm(dim=-1), keys.norm(dim=-1))


def test_candidate_layouts_fit_the_head_dim():
    assert [(each.name, each.first) for each in candidate_layouts(FREQUENCIES, 8)] == [
        ("half-split", 0),
        ("interleaved", 0),
        ("none", 0),
    ]
    assert [each.first for each in candidate_layouts(FREQUENCIES, 12)] == [0, 0, 4, 4, 0]
    assert [each.name for each in candidate_layouts((), 8)] == ["none"]
    # More channels than there are: the frequencies are of something else
    assert [each.name for each in candidate_layouts(FREQUENCIES, 6)] == ["none"]


@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (128, 128), (96, 32), (80, 16), (6, 2), (5, 1)])
def test_hadamard_rotates_the_largest_power_of_two(head_dim: int, size: int) -> None:
    assert rotation_size(head_dim) == size
    matrix = hadamard_matrix(size, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size))
    states = torch.randn(2, 3, head_dim)
    rotated = rotate(states)
    torch.testing.assert_close(rotated.norm(dim=-1), states.norm(dim=-1))
    torch.testing.assert_close(rotate(rotated), states)
    assert size == 1 or not torch.allclose(rotated, states)


def test_hadamard_spreads_an_outlier() -> None:
    states = torch.zeros(64)
    states[5] = 8.0
    torch.testing.assert_close(rotate(states).abs(), torch.ones(64))


def test_half_precision_is_rotated_in_float32() -> None:
    states = torch.randn(4, 64, dtype=torch.bfloat16)
    assert rotate(states).dtype == torch.float32
    torch.testing.assert_close(rotate(states), rotate(states.float()))


def test_autocast_does_not_round_rotated_states() -> None:
    states = torch.randn(2, 3, 64)
    expected = rotate(states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotate(states), expected)
