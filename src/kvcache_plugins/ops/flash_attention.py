"""Attention of many queries over dense tiles on a CPU: each tile by PyTorch's flash attention, which never writes a
matrix of scores, and the tiles joined by the logarithms of their sums of weights.

A prompt behind a compressed prefix is that: the prefix comes tile by tile, and no layer is ever dense.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a tile, D head dim.
"""

import torch


class FlashAttention:
    """
    `softmax(query keys^T * scale + mask) values`, accumulated over tiles, as `OnlineAttention`. No gradients.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`):
            Queries.
        num_key_value_heads (`int`):
            H.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`):
            Factor of the scores.
    """

    def __init__(self, query: torch.Tensor, num_key_value_heads: int, scale: float | None = None):
        self.dtype, self.scale = query.dtype, scale
        self._query = query.float().unflatten(1, (num_key_value_heads, -1)).contiguous()  # [B, H, G, Q, D]
        self._output: torch.Tensor | None = None  # [B, H, G, Q, D]
        self._log_sum: torch.Tensor | None = None  # [B, H, G, Q, 1]

    def add_tile(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        """
        Attends to one more tile.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`):
                The tile's states.
            mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*):
                Boolean (`True` attends) or added to the scores.
        """
        keys, values = keys.float(), values.float()
        if mask is not None and _hides_nothing(mask):
            mask = None
        output, log_sum = self._attend(keys, values) if mask is None else self._attend_masked(keys, values, mask)
        if self._output is None or self._log_sum is None:
            self._output, self._log_sum = output, log_sum
            return
        joined = torch.logaddexp(self._log_sum, log_sum)
        # Of a row that may attend to nothing so far nothing counts
        reference = joined.masked_fill(joined == -torch.inf, 0)
        self._output.mul_((self._log_sum - reference).exp_()).addcmul_(output, (log_sum - reference).exp_())
        self._log_sum = joined

    def _attend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads of a group are further queries of one head."""
        output, log_sum = _flash(self._query.flatten(2, 3), keys, values, None, self.scale)
        return output.view_as(self._query), log_sum.view(*self._query.shape[:4], 1)

    def _attend_masked(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads of a group are heads, which read the same keys; items and their heads are one dimension."""
        batch_size, num_heads, groups, num_queries, _ = self._query.shape
        length = keys.shape[2]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        mask = mask.float()
        if mask.shape[0] > 1 or mask.shape[1] > 1:
            mask = mask.expand(batch_size, num_heads * groups, num_queries, length)
            mask = mask.reshape(batch_size * num_heads, groups, num_queries, length)
        keys, values = (side.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for side in (keys, values))
        output, log_sum = _flash(self._query.flatten(0, 1), keys, values, mask, self.scale)
        # Rows that are hidden all of the tile come as zeros that weigh 1
        is_hidden = (mask.amax(dim=3, keepdim=True) == -torch.inf).expand(*output.shape[:3], 1)
        log_sum = log_sum[..., None].masked_fill(is_hidden, -torch.inf)
        return output.reshape(self._query.shape), log_sum.view(*self._query.shape[:4], 1)

    def result(self) -> torch.Tensor:
        """
        The attention output `[B, H * G, Q, D]` in the queries' dtype; zero where a query may attend to nothing.
        """
        assert self._output is not None, "no tile was added"
        return self._output.flatten(1, 2).to(self.dtype)


def _hides_nothing(mask: torch.Tensor) -> bool:
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, H, Q, D]`, and the logarithm of the sum of weights `[B, H, Q]`, contiguous."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return output.contiguous(), log_sum.contiguous()
