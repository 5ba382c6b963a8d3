"""The mask of an attention over tokens that stand in slots, in no order.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, each with a token or free, L
positions of the sequence.
"""

import torch

from kvcache_plugins.kernels.masks import slice_mask


class SlotMask:
    """
    The mask of an attention, read at the tokens that stand in slots.

    Args:
        attn_mask (`torch.Tensor`, *optional*):
            As `scaled_dot_product_attention` takes it, over all positions of the sequence.
        is_causal (`bool`):
            Whether a causal mask aligned to the upper left applies instead.
        length (`int`):
            L.
        positions (`torch.Tensor` of shape `[B, H, S]`, *optional*):
            Position of the token in every slot, negative for a free one. Without it there is a slot for every
            position, in order.
    """

    def __init__(
        self, attn_mask: torch.Tensor | None, *, is_causal: bool, length: int, positions: torch.Tensor | None = None
    ):
        self.attn_mask = slice_mask(attn_mask, 0, length)  # [B or 1, heads or 1, Q or 1, L]
        self.is_causal, self.length, self.positions = is_causal, length, positions

    def num_slots(self, stop: int) -> int | None:
        """How many of the first slots the queries before `stop` can attend to; `None` for all of them."""
        return min(stop, self.length) if self.is_causal and self.positions is None else None

    def softmax(self, scores: torch.Tensor, rows: slice, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """
        The weights that scores `[B, H, G, queries, S]` of the queries `rows`, over `num_slots(rows.stop)` slots, stand
        for: all zero where a query may attend to nothing. The scores are used up.
        """
        mask = self._given(rows, scores.shape[1])
        if self.is_causal:
            mask = self._causal(scores, rows)
        if self.positions is not None:
            used = (self.positions >= 0)[:, :, None, None]
            if mask is None or mask.dtype == torch.bool:
                mask = used if mask is None else mask & used
            else:
                scores.masked_fill_(~used, -torch.inf)
        if sinks is not None:
            if mask is not None and mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            elif mask is not None:
                scores.add_(mask)
            return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        if mask is None:
            return scores.softmax(dim=-1)
        if mask.dtype == torch.bool:
            scores.masked_fill_(~mask, -torch.inf)
            nothing = ~mask.any(dim=-1, keepdim=True)
        else:
            scores.add_(mask)
            nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf
        return scores.softmax(dim=-1).masked_fill_(nothing, 0)

    def _causal(self, scores: torch.Tensor, rows: slice) -> torch.Tensor | None:
        """The causal mask of some queries, or `None` after their scores were masked where they stand."""
        queries = torch.arange(rows.start, rows.stop, device=scores.device)[:, None]
        if self.positions is not None:
            return self.positions[:, :, None, None] <= queries
        # What stands before the tile's first query is seen by all of them
        newest = scores[..., rows.start :]
        columns = torch.arange(rows.start, rows.start + newest.shape[4], device=scores.device)
        newest.masked_fill_(columns > queries, -torch.inf)
        return None

    def _given(self, rows: slice, num_key_value_heads: int) -> torch.Tensor | None:
        """The mask of some queries, broadcastable to `[B, H, G, queries, S]`."""
        if self.attn_mask is None:
            return None
        mask = self.attn_mask if self.attn_mask.shape[2] == 1 else self.attn_mask[:, :, rows]
        heads = (1, 1) if mask.shape[1] == 1 else (num_key_value_heads, mask.shape[1] // num_key_value_heads)
        mask = mask.unflatten(1, heads)  # [B or 1, H or 1, G or 1, Q or 1, L]
        if self.positions is None:
            return mask
        batch_size, num_heads, num_slots = self.positions.shape
        index = self.positions.clamp(min=0).long()[:, :, None, None]
        shape = (batch_size, num_heads, *mask.shape[2:4])
        return mask.expand(*shape, -1).gather(4, index.expand(*shape, num_slots))
