"""`OnlineAttention`: attention over tiles of dense keys and values, in plain PyTorch.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a tile, D head dim.
"""

import torch

from .engine import choose_flash


# Scores that are made at a time, float32
_MOST_SCORES = 2**26


class OnlineAttention:
    """
    `softmax(query keys^T * scale + mask) values`, accumulated over tiles: each tile on its own, joined to the others
    by the logarithm of its sum of weights, so that only one tile is in memory. Arithmetic is in float32; arguments are
    those of `attention.attend`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        num_key_value_heads: int,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ):
        self.dtype, self.scale = query.dtype, query.shape[3] ** -0.5 if scale is None else scale
        self._softcap, self._sinks = softcap, sinks
        self._query = query.float().unflatten(1, (num_key_value_heads, -1))  # [B, H, G, Q, D]
        self._output: torch.Tensor | None = None  # [B, H, G, Q, value head dim]
        self._log_sum = self._query.new_full((), -torch.inf)  # [B, H, G, Q, 1]

    def add_tile(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        """
        Attend to one more tile.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`): the tile's states.
            mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*): boolean (`True` attends) or
                added to the scores.
        """
        keys, values = keys.float(), values.float()
        if self._softcap is None and choose_flash(self._query.flatten(1, 2), values.shape[3]):
            output, log_sum = self._by_flash(keys, values, mask)
        else:
            # A prompt's scores of all heads may be more than a GPU holds
            most = max(_MOST_SCORES // max(self._query[..., :1, 0].numel() * keys.shape[2], 1), 1)
            found = []
            for first, query in enumerate(self._query.split(most, dim=3)):
                own = mask[:, :, first * most :][:, :, :most] if mask is not None and mask.shape[2] > 1 else mask
                found.append(self._by_products(query, keys, values, own))
            output, log_sum = found[0]
            if len(found) > 1:
                output, log_sum = (torch.cat(each, dim=3) for each in zip(*found, strict=True))
        if self._output is None:
            self._output, self._log_sum = output, log_sum
            return
        joined = torch.logaddexp(self._log_sum, log_sum)
        # A row that is fully masked so far has no weight
        reference = joined.masked_fill(joined == -torch.inf, 0)
        self._output = torch.addcmul(
            self._output * (self._log_sum - reference).exp(), output, (log_sum - reference).exp()
        )
        self._log_sum = joined

    def result(self) -> torch.Tensor:
        """
        Return the attention output `[B, H * G, Q, value head dim]` in the queries' dtype; zero where a query may
        attend to nothing.
        """
        assert self._output is not None, "there is nothing to attend to"
        output = self._output.flatten(1, 2)
        if self._sinks is not None:
            # Sinks take the share of the weights that a token with their score would
            output = output * (self._log_sum.flatten(1, 2) - self._sinks.float()).sigmoid()
        return output.to(self.dtype)

    def _by_products(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend by products of matrices, with heads of a group as further queries of one head."""
        scores = (query * self.scale).flatten(2, 3) @ keys.transpose(2, 3)
        scores = scores.view(*query.shape[:4], -1)
        if self._softcap is not None:
            scores = (scores / self._softcap).tanh() * self._softcap
        if mask is not None:
            by_head = scores.flatten(1, 2)
            masked = by_head.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else by_head + mask.float()
            scores = masked.view(scores.shape)
        maximum = scores.amax(dim=4, keepdim=True)
        maximum = maximum.masked_fill(maximum.isinf(), 0)
        weights = (scores - maximum).exp_()
        total = weights.sum(dim=4, keepdim=True)
        sums = (weights.flatten(2, 3) @ values).view(*query.shape[:4], -1)
        return sums / torch.where(total > 0, total, 1), maximum + total.log()

    def _by_flash(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend by PyTorch's flash attention, which never writes a matrix of scores. No gradients."""
        batch_size, num_heads, groups, num_queries, _ = self._query.shape
        # Flash attention assumes contiguous channels, which the output of a convolution has not
        keys, values = (side if side.stride(3) == 1 else side.contiguous() for side in (keys, values))
        if mask is None or (bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())):
            output, log_sum = _flash(self._query.flatten(2, 3), keys, values, None, self.scale)
            return output.reshape(self._query.shape), log_sum.reshape(*self._query.shape[:4], 1)
        # Heads of a group become heads, which read the same keys; sequences and their heads become one dimension
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=torch.float32, device="cpu").masked_fill_(~mask, -torch.inf)
        mask = mask.float()
        if mask.shape[0] > 1 or mask.shape[1] > 1:
            mask = mask.expand(batch_size, num_heads * groups, num_queries, keys.shape[2])
            mask = mask.reshape(batch_size * num_heads, groups, num_queries, -1)
        keys, values = (side.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for side in (keys, values))
        output, log_sum = _flash(self._query.flatten(0, 1), keys, values, mask, self.scale)
        # Flash attention returns fully masked rows as zeros of weight 1
        is_hidden = (mask.amax(dim=3, keepdim=True) == -torch.inf).expand(*output.shape[:3], 1)
        log_sum = log_sum[..., None].masked_fill(is_hidden, -torch.inf)
        return output.reshape(self._query.shape), log_sum.reshape(*self._query.shape[:4], 1)


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[B, H, Q, D]`, and the logarithm of the sum of weights `[B, H, Q]`."""
    output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.contiguous(), keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return output, log_sum
