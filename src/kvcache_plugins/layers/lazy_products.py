"""Attention that is written out, over lazy states: products with keys and with values, a tile of tokens at a time.

The scores are as large as the model wants them, `[..., queries, tokens]`; keys and values are dense for one tile only.
What the model does between the two products (softcaps, sinks, biases, masks, softmax, dropout) it does itself, on
plain tensors.

Products with exact states, as of a prompt, are the dense ones. A layer that need not, or cannot, hand out all tokens
(it has dropped some, or fetches few) is asked for products by heads instead, where the model's view has heads.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from kvcache_plugins.kernels.attention import OnlineAttention
from kvcache_plugins.kernels.masks import slice_mask

from .contexts import without_gradients
from .head_layout import HeadLayout, find_head_layout
from .lazy_views import View
from .states_source import StatesSource


class ViewedStates(Protocol):
    """What products ask of lazy states; see `LazyStates`."""

    layer: StatesSource
    origin: View
    token_dim: int
    exact: torch.Tensor | None

    @property
    def shape(self) -> torch.Size:
        """As the model sees them."""

    @property
    def dtype(self) -> torch.dtype:
        """As the model sees them."""


def multiply(left: torch.Tensor, states: ViewedStates) -> torch.Tensor | None:
    """
    `left @ states`.

    Args:
        left (`torch.Tensor` of shape `[..., queries, channels or tokens]`): queries or weights.
        states (`ViewedStates` of shape `[..., channels, tokens]` or `[..., tokens, channels]`): keys or values.

    Returns:
        `torch.Tensor`, or `None` if it is no product of attention.
    """
    num_dims = len(states.shape)
    if num_dims < 3 or left.dim() < 2 or states.token_dim < num_dims - 2 or not _is_newest(states):
        return None
    is_sum, layer = states.token_dim == num_dims - 2, states.layer
    layout = _layout_of(states, left)
    by_heads = None if layout is None else layout.to_heads(left)
    if states.exact is not None:
        product = torch.matmul(left, states.exact)
    else:
        with torch.no_grad():
            of_heads = _of_heads(layer, layout, by_heads, is_sum)
            if of_heads is not None:
                product = of_heads
            else:
                product = _weighted_sum(left, states) if is_sum else _scores(left, states)
        if torch.is_grad_enabled() and left.requires_grad:
            product = without_gradients(product)
    if is_sum:
        layer.on_weighted_sum(left, by_heads)
    elif states.exact is not None and layout is not None and by_heads is not None:
        layer.on_exact_scores(by_heads, layout.to_heads(product))
    return product


def _layout_of(states: ViewedStates, left: torch.Tensor) -> HeadLayout | None:
    layer = states.layer
    if not layer.attends_by_heads or len(states.origin.sides) != 1:
        return None
    (side,) = states.origin.sides
    return find_head_layout(states.origin, layer.states_shape(side), states.token_dim, tuple(left.shape[:-2]))


def _of_heads(
    layer: StatesSource, layout: HeadLayout | None, by_heads: torch.Tensor | None, is_sum: bool
) -> torch.Tensor | None:
    """The product, if the layer has one of its own."""
    if layout is None or by_heads is None:
        return None
    product = layer.head_sums(by_heads) if is_sum else layer.head_scores(by_heads)
    return None if product is None else layout.to_rows(product).to(by_heads.dtype)


def _is_newest(states: ViewedStates) -> bool:
    return states.exact is not None or states.shape[states.token_dim] == states.layer.lazy_length()


def _tiles(states: ViewedStates) -> Iterator[tuple[slice, torch.Tensor]]:
    for tokens, tile in states.layer.dense_tiles(states.origin.sides):
        yield tokens, states.origin.of(tile)


def _scores(query: torch.Tensor, keys: ViewedStates) -> torch.Tensor:
    return torch.cat([torch.matmul(query, tile) for _, tile in _tiles(keys)], dim=-1)


def _weighted_sum(weights: torch.Tensor, values: ViewedStates) -> torch.Tensor:
    total: torch.Tensor | None = None
    for tokens, tile in _tiles(values):
        # Not in less than float32: sums of tiles would be rounded once for each
        part = torch.matmul(weights[..., tokens].float(), tile.float())
        total = part if total is None else total.add_(part)
    assert total is not None, "nothing is stored"
    return total.to(weights.dtype)


def attend_views(
    query: torch.Tensor,
    keys: ViewedStates,
    values: ViewedStates,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor | None:
    """
    `scaled_dot_product_attention` over views of one layer's states, such as latent ones that have been projected.

    Returns:
        `torch.Tensor`, or `None` if the views are not of shape `[batch_size, heads, tokens, channels]`.
    """
    is_four = len(keys.shape) == len(values.shape) == query.dim() == 4
    if not is_four or keys.token_dim != 2 or values.token_dim != 2 or not _is_newest(keys) or not _is_newest(values):
        return None
    layer = keys.layer
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
    layout = _shared_layout(query, keys, values, attn_mask)
    by_heads = None if layout is None else layout.to_heads(query).flatten(1, 2)
    if keys.exact is not None and values.exact is not None:
        output = F.scaled_dot_product_attention(
            query, keys.exact, values.exact, attn_mask=attn_mask, enable_gqa=enable_gqa, **options
        )
        if by_heads is not None:
            layer.on_exact_attention(by_heads, attn_mask, **options)
            return output
    elif keys.exact is not None or values.exact is not None or keys.shape[1] != values.shape[1]:
        return None
    else:
        with torch.no_grad():
            if layout is not None and by_heads is not None:
                of_heads = layer.attend(by_heads, attn_mask, **options)
                output = layout.to_rows(of_heads.unflatten(1, (layout.heads[1], -1)))
            else:
                output = _attend_projected(query, keys, values, attn_mask, **options)
        if torch.is_grad_enabled() and query.requires_grad:
            output = without_gradients(output)
    if by_heads is None:
        layer.on_viewed_attention(query, keys.exact, attn_mask, **options)
    return output


def _shared_layout(
    query: torch.Tensor, keys: ViewedStates, values: ViewedStates, attn_mask: torch.Tensor | None
) -> HeadLayout | None:
    """The layout that keys and values have in common, where attention over them is over the heads that are stored."""
    # Every query head its own mask would have to follow it
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] != 1:
        return None
    found = [
        find_head_layout(states.origin, states.layer.states_shape(side), states.token_dim, tuple(query.shape[:2]))
        for states, side in ((keys, "keys"), (values, "values"))
        if states.origin.sides == {side}
    ]
    if len(found) < 2 or found[0] is None or found[1] is None:
        return None
    return found[0] if found[0].is_as(found[1]) and found[0].keeps_items() else None


def _attend_projected(
    query: torch.Tensor,
    keys: ViewedStates,
    values: ViewedStates,
    attn_mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention over what is computed of the states, by the layer if it knows how, else tile by tile."""
    views = keys.origin, values.origin
    output = keys.layer.attend_views(query, *views, attn_mask, is_causal=is_causal, scale=scale)
    if output is None:
        output = _attend_tiles(query, keys, values, _causal(attn_mask, query, keys, is_causal), scale)
    return output


def _causal(
    attn_mask: torch.Tensor | None, query: torch.Tensor, keys: ViewedStates, is_causal: bool
) -> torch.Tensor | None:
    if not is_causal:
        return attn_mask
    return torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril()


def _attend_tiles(
    query: torch.Tensor,
    keys: ViewedStates,
    values: ViewedStates,
    attn_mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    attention = OnlineAttention(query, keys.shape[1], scale)
    for tokens, tile in keys.layer.dense_tiles(keys.origin.sides | values.origin.sides):
        done: dict[View, torch.Tensor] = {}
        mask = slice_mask(attn_mask, tokens.start, tokens.stop)
        attention.add_tile(keys.origin.of(tile, done), values.origin.of(tile, done), mask)
    return attention.result()


def _matmul(left: Any, right: Any) -> tuple[Any, Any]:
    return left, right


def _reversed_matmul(right: Any, left: Any) -> tuple[Any, Any]:
    return left, right


# Functions that multiply two tensors, and which is the left one
FACTORS: dict[Callable[..., Any], Callable[..., tuple[Any, Any]]] = {
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _reversed_matmul,
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
}
# Those that add to a product: `beta * input + alpha * (batch1 @ batch2)`
ADDING = {torch.baddbmm, torch.Tensor.baddbmm}
