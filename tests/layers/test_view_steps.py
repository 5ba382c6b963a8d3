"""A step done tile by tile is the step done at once; what mixes or picks tokens is no step."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from kvcache_plugins.layers.view_steps import Layout, TokenStep, find_steps


STATES = torch.randn(2, 4, 37, 8)
# Of layout [2, 4, 37, 8], tokens third: operation and its arguments
STEPS = {
    "transpose": (torch.Tensor.transpose, 2, 3),
    "transpose-negative": (torch.Tensor.transpose, -1, -2),
    "transpose-function": (torch.transpose, 1, 2),
    "permute": (torch.Tensor.permute, 2, 0, 3, 1),
    "permute-tuple": (torch.Tensor.permute, (0, 2, 1, 3)),
    "reshape-heads": (torch.Tensor.reshape, 8, -1, 8),
    "reshape-channels": (torch.Tensor.reshape, 2, 4, 37, 2, 4),
    "view": (torch.Tensor.view, (2, 2, 2, 37, 8)),
    "flatten": (torch.Tensor.flatten, 0, 1),
    "unflatten": (torch.Tensor.unflatten, 3, (2, 4)),
    "expand": (torch.Tensor.expand, 3, 2, 4, 37, 8),
    "expand-minus-one": (torch.Tensor.expand, -1, -1, -1, -1),
    "repeat": (torch.Tensor.repeat, 1, 3, 1, 1),
    "repeat-interleave": (torch.Tensor.repeat_interleave, 3, 1),
    "unsqueeze": (torch.Tensor.unsqueeze, 2),
    "unsqueeze-behind": (torch.Tensor.unsqueeze, -1),
    "index-none": (torch.Tensor.__getitem__, (slice(None), slice(None), None)),
    "index-channels": (torch.Tensor.__getitem__, (..., slice(2, 6))),
    "index-head": (torch.Tensor.__getitem__, (slice(None), 1)),
    "index-all-tokens": (torch.Tensor.__getitem__, (slice(None), slice(None), slice(0, 37))),
    "contiguous": (torch.Tensor.contiguous,),
    "to": (torch.Tensor.to, torch.float64),
    "float": (torch.Tensor.float,),
    "linear": (F.linear, torch.randn(5, 8), torch.randn(5)),
    "scaled": (torch.Tensor.__mul__, 0.5),
    "divided": (torch.Tensor.div, torch.randn(4, 1, 8)),
}
NO_STEPS = {
    "some-tokens": (torch.Tensor.__getitem__, (slice(None), slice(None), slice(3, None))),
    "one-token": (torch.Tensor.__getitem__, (slice(None), slice(None), -1)),
    "picked-tokens": (torch.Tensor.__getitem__, (slice(None), slice(None), torch.tensor([1, 2]))),
    "tokens-with-channels": (torch.Tensor.reshape, 2, 4, 37 * 8),
    "tokens-repeated": (torch.Tensor.repeat, 1, 1, 2, 1),
    "tokens-interleaved": (torch.Tensor.repeat_interleave, 2, 2),
    "tokens-scaled-apart": (torch.Tensor.mul, torch.randn(37, 8)),
    "sum": (torch.Tensor.sum, 2),
}


def layout_of(states: torch.Tensor) -> Layout:
    return Layout(tuple(states.shape), states.dtype, states.device, 2)


@pytest.mark.parametrize(("function", "args"), [(f, a) for f, *a in STEPS.values()], ids=STEPS.keys())
def test_a_step_on_tiles_is_the_step(function: Callable[..., torch.Tensor], args: list[object]) -> None:
    step = find_steps(function, layout_of(STATES), args, {})
    assert isinstance(step, TokenStep)
    tiles = [step.function(tile) for tile in STATES.split([16, 20, 1], dim=2)]
    expected = function(STATES, *args)
    assert torch.allclose(torch.cat(tiles, dim=step.token_dim), expected, atol=1e-6)
    assert step.shape is None or step.shape == expected.shape


@pytest.mark.parametrize(("function", "args"), [(f, a) for f, *a in NO_STEPS.values()], ids=NO_STEPS.keys())
def test_what_mixes_or_picks_tokens_is_no_step(function: Callable[..., torch.Tensor], args: list[object]) -> None:
    assert find_steps(function, layout_of(STATES), args, {}) is None


@pytest.mark.parametrize(
    ("function", "args"),
    [(torch.split, [3, 3]), (torch.Tensor.split, [[2, 6], -1]), (torch.chunk, [2, 1]), (torch.Tensor.chunk, [3, -1])],
    ids=["split", "split-sizes", "chunk", "chunk-uneven"],
)
def test_what_returns_several_is_several_steps(function: Callable[..., torch.Tensor], args: list[object]) -> None:
    steps = find_steps(function, layout_of(STATES), args, {})
    assert isinstance(steps, list)
    for step, expected in zip(steps, function(STATES, *args), strict=True):
        assert torch.equal(step.function(STATES), expected)


def test_a_size_that_equals_the_tokens_is_not_mistaken_for_them() -> None:
    states = torch.randn(2, 4, 8, 8)
    step = find_steps(torch.Tensor.reshape, layout_of(states), [8, 8, 8], {})
    assert isinstance(step, TokenStep)
    assert step.token_dim == 1
    assert step.function(states[:, :, :3]).shape == (8, 3, 8)
