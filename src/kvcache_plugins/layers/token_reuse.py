"""Count the tokens of a cache that a new prompt can reuse: a shared beginning, if all layers can go back to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer, LinearAttentionLayer

from .lazy_layer import LazyLayer


def count_shared(
    input_ids: torch.Tensor, held_ids: torch.Tensor, num_held: int, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """
    Count the tokens of each sequence's beginning that a new prompt shares with `num_held` tokens of a cache; at least
    one token of the prompt is not counted, since `generate` needs a token to read.

    Returns:
        `torch.Tensor` of shape `[batch_size]`.

    Raises:
        ValueError: if token ids are no batches of the same number of sequences, or fewer than the cache holds.
    """
    for name, ids in (("input_ids", input_ids), ("held_ids", held_ids)):
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point():
            got = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids)
            raise ValueError(f"`{name}` has to be token ids of shape [batch_size, tokens] but got {got}")
    if input_ids.shape[0] != held_ids.shape[0] or not input_ids.shape[1]:
        raise ValueError(
            f"`input_ids` has to hold tokens of {held_ids.shape[0]} sequences, as `held_ids` does, but has the shape "
            f"{list(input_ids.shape)}"
        )
    if held_ids.shape[1] < num_held:
        raise ValueError(
            f"`held_ids` has {held_ids.shape[1]} tokens, but the cache holds {num_held}: give all tokens that it has "
            "read, as `generate` has returned them"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has to be of the shape of `input_ids`, {list(input_ids.shape)}, but is of "
            f"{list(attention_mask.shape)}"
        )
    most = min(num_held, input_ids.shape[1] - 1)
    is_equal = input_ids[:, :most] == held_ids[:, :most].to(input_ids.device)
    return is_equal.long().cumprod(dim=1).sum(dim=1)


def limit_by_padding(
    shared: torch.Tensor, layers: Sequence[object], attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """
    Limit shared tokens `[batch_size]` to the padding where a mask pads a sequence by another number of tokens than the
    cache has seen: its tokens have other positions.
    """
    if attention_mask is None:
        return shared
    given = (attention_mask.cumsum(dim=1) == 0).sum(dim=1).to(shared.device)
    held = next(
        (layer.padding for layer in layers if isinstance(layer, LazyLayer) and layer.padding is not None), None
    )
    held = torch.zeros_like(given) if held is None else held.to(shared.device)
    return torch.where(given == held, shared, torch.minimum(shared, torch.minimum(given, held)))


def can_go_back(layer: object, count: int) -> bool:
    """Return true if `crop` of `count` tokens leaves the layer as it was before them."""
    if isinstance(layer, LinearAttentionLayer):
        # A recurrence cannot be reversed; a convolution can, for as many tokens as were recorded
        widths = [
            states.shape[-1] - (layer.conv_kernel_size[index] or 0)
            for index, states in layer.conv_states.items()
            if states is not None
        ]
        has_past = layer.is_croppable and getattr(layer, "record_past", False)
        if not has_past or min(widths, default=0) < count:
            return False
    if isinstance(layer, LazyLayer):
        return layer.is_croppable and layer.can_crop(count)
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
        length = layer.get_seq_length()
        num_seen = min(layer.sliding_window - 1, length - count)
        has_past = length < layer.sliding_window or getattr(layer, "record_past", False)
        return has_past and layer.keys.shape[2] - count >= num_seen
    return not isinstance(layer, CacheLayerMixin) or layer.is_croppable
