"""Attention whose weights are seen, a tile of queries at a time: they tell heavy hitters from other tokens.

Fused attention never shows its weights, and the matrix of all of them would be as large as the prompt squared. So
scores are computed for as many queries as fit a tile of fixed size, over all tokens at once: a row of the softmax is
whole within its tile, and what is left of a tile is its output and its sums. Arithmetic is in float32.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, S slots, in no order, each with a token
or free, L positions of the sequence, D head dim.
"""

from collections.abc import Iterator

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.masks import slice_mask


# Scores of a tile, over the whole batch and all heads, by device: what stays in the caches of a CPU (with tiles eight
# times as large or small a prompt's weights take half as long again), and on others enough to pay for a launch.
# Tensors without data (`meta`), on which caches are sized, fill no cache
_TILE_NUMBERS = {"cpu": 1 << 21, "meta": 1 << 50}
_MANY_NUMBERS = 1 << 25


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
        is_bool = mask is not None and mask.dtype == torch.bool
        if mask is not None:
            scores = scores.masked_fill_(~mask, -torch.inf) if is_bool else scores.add_(mask)
        if sinks is not None:
            return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
        if mask is None:
            return scores.softmax(dim=-1)
        nothing = ~mask.any(dim=-1, keepdim=True) if is_bool else scores.amax(dim=-1, keepdim=True) == -torch.inf
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


def weigh(call: AttentionCall, keys: torch.Tensor, mask: SlotMask) -> Iterator[tuple[slice, torch.Tensor]]:
    """
    Softmax weights, a tile of queries after another.

    Args:
        call (`AttentionCall`):
            What is attended with, `[B, H * G, Q, D]`; its mask is not looked at.
        keys (`torch.Tensor` of shape `[B, H, S, D]`):
            Keys.
        mask (`SlotMask`):
            What each query may attend to.

    Yields:
        The tile's queries, and their weights `[B, H, G, queries, S]` in float32, all zero where a query may attend to
        nothing. Slots that none of them may attend to can be missing at the end.
    """
    query = call.query
    (batch_size, num_heads, num_queries, head_dim), num_key_value_heads = query.shape, keys.shape[1]
    scale = head_dim**-0.5 if call.scale is None else call.scale
    keys = keys.float().transpose(2, 3)
    tile_numbers = _TILE_NUMBERS.get(query.device.type, _MANY_NUMBERS)
    tile_length = max(1, tile_numbers // (batch_size * num_heads * keys.shape[3]))
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.float().expand(batch_size, num_heads, num_queries, 1).unflatten(1, (num_key_value_heads, -1))
    for start in range(0, num_queries, tile_length):
        rows = slice(start, min(start + tile_length, num_queries))
        tile = (query[:, :, rows].float() * scale).reshape(batch_size, num_key_value_heads, -1, head_dim)
        scores = tile @ keys[..., : mask.num_slots(rows.stop)]
        if call.softcap is not None:
            scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
        scores = scores.view(batch_size, num_key_value_heads, -1, rows.stop - start, scores.shape[3])
        yield rows, mask.softmax(scores, rows, None if sinks is None else sinks[:, :, :, rows])


def sum_weights(
    call: AttentionCall, keys: torch.Tensor, mask: SlotMask, real_queries: torch.Tensor | None
) -> torch.Tensor:
    """
    Weights that tokens get from all queries together.

    Args:
        call, keys, mask: as in `weigh`.
        real_queries (`torch.Tensor` of shape `[B, Q]`, *optional*):
            Which queries are not padding. What padding attends to says nothing.

    Returns:
        `torch.Tensor` of shape `[B, H, S]`, summed over the queries and over the heads of a group.
    """
    total = keys.new_zeros(keys.shape[:3], dtype=torch.float32)
    for rows, weights in weigh(call, keys, mask):
        if real_queries is not None:
            weights = weights * real_queries[:, None, None, rows, None]
        total[:, :, : weights.shape[4]] += weights.sum(dim=(2, 3))
    return total


def attend_and_weigh(
    call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, mask: SlotMask
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """
    Attention, a tile of queries after another.

    Args:
        call, keys, mask: as in `weigh`.
        values (`torch.Tensor` of shape `[B, H, S, value head dim]`):
            Values.

    Yields:
        The tile's queries, their output `[B, H * G, queries, value head dim]` in the queries' dtype, and the weights
        that it was made with, `[B, H, queries, S]`, summed over the heads of a group.
    """
    batch_size, num_heads = call.query.shape[:2]
    values = values.float()
    for rows, weights in weigh(call, keys, mask):
        output = weights.flatten(2, 3) @ values[:, :, : weights.shape[4]]
        output = output.view(batch_size, num_heads, rows.stop - rows.start, values.shape[3])
        yield rows, output.to(call.query.dtype), weights.sum(dim=2)
