"""Where a layer's heads stand in a view of its states, so that a product with the view is one with the heads.

Models lay out heads in ways of their own before they multiply: each repeated for the query heads that share it, one
after another or all of them in turn, items and heads in one dimension. Instead of following each, the view is made of
states that hold their own numbers: what comes out says which head stands in which row. Views that do more than move
numbers (projections, parts put together) have no such layout.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, D head dim, T tokens, R rows: everything
before the last two dimensions.
"""

import math
from dataclasses import dataclass

import torch

from .lazy_views import View


# What every dtype holds exactly
_BASE = 128
_NUM_DIGITS = 2


@dataclass(frozen=True, eq=False, slots=True)
class HeadLayout:
    """
    Attributes:
        heads (`tuple[int, int]`): B and H.
        rows (`tuple[int, ...]`): the dimensions of the product before the last two.
        order (`torch.Tensor` of shape `[B * H * G]`, *optional*): rows in the order of the heads that they hold;
            `None` if that is how they stand.
    """

    heads: tuple[int, int]
    rows: tuple[int, ...]
    order: torch.Tensor | None

    def is_as(self, other: "HeadLayout") -> bool:
        """Whether another one is the same."""
        if self.order is None or other.order is None:
            return self.order is other.order and self.rows == other.rows
        return self.rows == other.rows and torch.equal(self.order, other.order)

    def keeps_items(self) -> bool:
        """Whether the first dimension of the rows is that of the items of a batch."""
        num_items = self.heads[0]
        if self.rows[0] != num_items or self.order is None:
            return self.rows[0] == num_items
        items = self.order.view(num_items, -1) // math.prod(self.rows[1:])
        return torch.equal(items, torch.arange(num_items)[:, None].expand_as(items))

    def to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., Q, D or T]`, whose rows broadcast to the product's, as `[B, H, G, Q, D or T]`."""
        flat = states.expand(*self.rows, *states.shape[-2:]).flatten(0, len(self.rows) - 1)
        if self.order is not None:
            flat = flat[self.order.to(flat.device)]
        return flat.reshape(*self.heads, -1, *states.shape[-2:])

    def to_rows(self, by_heads: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_heads`."""
        flat = by_heads.flatten(0, 2)
        if self.order is not None:
            flat = flat[self.order.argsort().to(flat.device)]
        return flat.reshape(*self.rows, *by_heads.shape[-2:])


def find_head_layout(
    view: View, shape: tuple[int, ...], token_dim: int, left_rows: tuple[int, ...]
) -> HeadLayout | None:
    """
    The layout of a view that has tokens in the last dimension or the one before, as far as a product is concerned.

    Args:
        view (`View`): the view.
        shape (`tuple[int, ...]`): `[B, H, T, D]` of the states that it is of.
        token_dim (`int`): the dimension that it has tokens in.
        left_rows (`tuple[int, ...]`): rows of what it is multiplied with, which both broadcast to.

    Returns:
        `HeadLayout`, or `None` if it is of both sides, does more than move numbers, or has not every head whole and
        equally often.
    """
    if len(view.sides) != 1 or not view.only_moves:
        return None
    batch_size, num_heads, _, head_dim = shape
    if max(batch_size * num_heads, head_dim) > _BASE**_NUM_DIGITS:
        return None
    (side,) = view.sides
    seen = view.of({side: _numbered(batch_size, num_heads, head_dim)}).movedim(token_dim, -1).long()
    if seen.shape[-2] != head_dim:
        return None
    scale = torch.tensor([_BASE**digit for digit in range(_NUM_DIGITS)])
    head, channel = ((part * scale).sum(dim=-1) for part in seen.split(_NUM_DIGITS, dim=-1))  # [..., D]
    if not torch.equal(channel, torch.arange(head_dim).expand_as(channel)) or not bool((head == head[..., :1]).all()):
        return None
    rows = tuple(torch.broadcast_shapes(head.shape[:-1], left_rows))
    held = head[..., 0].expand(rows).flatten()
    count = math.prod(rows) // (batch_size * num_heads)
    if not torch.equal(held.sort().values, torch.arange(batch_size * num_heads).repeat_interleave(count)):
        return None
    order = held.argsort(stable=True)
    is_in_order = torch.equal(order, torch.arange(len(order)))
    return HeadLayout((batch_size, num_heads), rows, None if is_in_order else order)


def _numbered(batch_size: int, num_heads: int, head_dim: int) -> torch.Tensor:
    """
    States `[B, H, tokens, D]` whose tokens are the digits of each number's head, over items, and then of its channel.
    """
    heads = torch.arange(batch_size * num_heads).view(batch_size, num_heads, 1).expand(-1, -1, head_dim)
    channels = torch.arange(head_dim).expand_as(heads)
    digits = [number // _BASE**digit % _BASE for number in (heads, channels) for digit in range(_NUM_DIGITS)]
    return torch.stack(digits, dim=2).float()
