"""A view's layout: the product with the view is the product with the heads, moved to where the view has them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvcache_plugins.layers.head_layout import HeadLayout, find_head_layout
from kvcache_plugins.layers.lazy_views import Step, StoredSide, View


BATCH, HEADS, TOKENS, DIM = 2, 3, 7, 160
STATES = torch.randn(BATCH, HEADS, TOKENS, DIM)
Function = Callable[[torch.Tensor], torch.Tensor]
# With tokens before the last dimension
VIEWS: dict[str, Function] = {
    "stored": lambda states: states,
    "grouped": lambda states: states.repeat_interleave(2, dim=1),
    "in turn": lambda states: states.repeat(1, 2, 1, 1),
    "in one dimension": lambda states: states.repeat_interleave(2, dim=1).flatten(0, 1),
    "apart": lambda states: states[:, :, None],
    "turned": lambda states: states.transpose(0, 1),
    "cast": lambda states: states.to(torch.bfloat16).float(),
}
OTHERS: dict[str, Function] = {
    "fewer channels": lambda states: states[..., :8],
    "other order of channels": lambda states: states.unflatten(3, (2, -1)).transpose(3, 4).flatten(3),
    "one head missing": lambda states: states[:, 1:],
    "heads as channels": lambda states: states.transpose(1, 2).flatten(2)[:, None],
    "one head twice": lambda states: states[:, :2].repeat(1, 2, 1, 1)[:, :3],
}


def view_of(function: Function) -> View:
    return Step(function, StoredSide("keys"), only_moves=True)


def layout_of(view: View, token_dim: int, rows: tuple[int, ...]) -> HeadLayout | None:
    return find_head_layout(view, tuple(STATES.shape), token_dim, rows)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("is_sum", [True, False], ids=["values", "keys"])
def test_products_with_heads_are_those_with_the_view(name: str, is_sum: bool) -> None:
    seen = VIEWS[name](STATES)
    function = VIEWS[name] if is_sum else lambda states: VIEWS[name](states).transpose(-1, -2)
    token_dim = seen.dim() - 2 if is_sum else seen.dim() - 1
    # Two query heads a head, where heads stand apart
    rows = (*seen.shape[:-3], 2) if name == "apart" else tuple(seen.shape[:-2])
    left = torch.randn(*rows, 5, TOKENS if is_sum else DIM)
    layout = layout_of(view_of(function), token_dim, tuple(left.shape[:-2]))
    assert layout is not None
    heads = STATES.to(torch.bfloat16).float() if name == "cast" else STATES
    right = heads if is_sum else heads.transpose(2, 3)
    product = layout.to_rows(layout.to_heads(left) @ right[:, :, None])
    torch.testing.assert_close(product, left @ (seen if is_sum else seen.transpose(-1, -2)), rtol=1e-4, atol=1e-4)
    assert torch.equal(layout.to_rows(layout.to_heads(left)), left)


@pytest.mark.parametrize("name", OTHERS)
def test_other_views_have_none(name: str) -> None:
    seen = OTHERS[name](STATES)
    assert layout_of(view_of(OTHERS[name]), 2, tuple(seen.shape[:2])) is None


def test_what_changes_numbers_has_none() -> None:
    projection = nn.Linear(DIM, DIM, bias=False)
    nn.init.eye_(projection.weight)
    projected = Step(projection, StoredSide("keys"))
    assert layout_of(projected, 2, (BATCH, HEADS)) is None
    assert layout_of(Step(lambda states: states, projected, only_moves=True), 2, (BATCH, HEADS)) is None
    both = Step(lambda keys, values: keys, StoredSide("keys"), StoredSide("values"), only_moves=True)
    assert layout_of(both, 2, (BATCH, HEADS)) is None


def test_items_have_to_stay_apart() -> None:
    square = torch.Size((2, 2, TOKENS, DIM))
    turned = find_head_layout(view_of(lambda states: states.transpose(0, 1)), square, 2, (2, 2))
    grouped = find_head_layout(view_of(lambda states: states.repeat(1, 3, 1, 1)), square, 2, (2, 6))
    assert turned is not None and grouped is not None
    assert not turned.keeps_items()
    assert grouped.keeps_items()
    assert grouped.is_as(grouped) and not grouped.is_as(turned)
