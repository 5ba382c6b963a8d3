"""Attention over dense tiles that arrive one after another: the reference in plain PyTorch.

The softmax is kept online (running maximum, running sum), so no tile needs to outlive its turn. Grouped-query heads
share a tile, which is never expanded. Arithmetic is in float32.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, T tokens of a tile, D head dim.
"""

import torch


class OnlineAttention:
    """
    `softmax(query keys^T * scale + mask) values`, accumulated over tiles.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`):
            Queries.
        num_key_value_heads (`int`):
            H.
        scale (`float`, *optional*, defaults to `1 / sqrt(D)`):
            Factor of the scores.
        softcap (`float`, *optional*):
            Bound that scores are kept within by a hyperbolic tangent, before the mask.
        sinks (`torch.Tensor`, *optional*):
            Scores of a token without a value, which broadcast to `[B, H * G, Q, 1]`.
    """

    def __init__(
        self,
        query: torch.Tensor,
        num_key_value_heads: int,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ):
        batch_size, num_heads, num_queries, head_dim = query.shape
        self.query_shape, self.dtype = query.shape, query.dtype
        self.softcap, self.sinks = softcap, sinks
        self.groups = num_heads // num_key_value_heads
        scale = head_dim**-0.5 if scale is None else scale
        self.query = (query.float() * scale).reshape(
            batch_size, num_key_value_heads, self.groups * num_queries, head_dim
        )
        self.maximum = self.query.new_full((*self.query.shape[:3], 1), -torch.inf)
        self.sum = torch.zeros_like(self.maximum)
        self.output: torch.Tensor | None = None

    def add_tile(self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> None:
        """
        Attends to one more tile.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`):
                The tile's states.
            mask (`torch.Tensor` of shape broadcastable to `[B, H * G, Q, T]`, *optional*):
                Boolean (`True` attends) or added to the scores.
        """
        scores = self.query @ keys.float().transpose(-1, -2)
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if mask is not None:
            scores = self._apply_mask(scores, mask)
        maximum = torch.maximum(self.maximum, scores.amax(dim=-1, keepdim=True))
        # A row that may attend to nothing so far has no maximum to subtract
        reference = torch.where(maximum.isinf(), 0, maximum)
        weights = scores.sub_(reference).exp_()
        decay = (self.maximum - reference).exp()
        contribution = weights @ values.float()
        self.sum = self.sum * decay + weights.sum(dim=-1, keepdim=True)
        self.output = contribution if self.output is None else self.output * decay + contribution
        self.maximum = maximum

    def _apply_mask(self, scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch_size, num_heads, num_queries, _ = self.query_shape
        by_head = scores.view(batch_size, num_heads, num_queries, -1)
        masked = by_head.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else by_head + mask.float()
        return masked.view(scores.shape)

    def result(self) -> torch.Tensor:
        """
        The attention output `[B, H * G, Q, value head dim]` in the queries' dtype; zero where a query may attend to
        nothing.
        """
        assert self.output is not None, "no tile was added"
        total = self.sum
        if self.sinks is not None:
            # However much larger than all scores they are, they have no value that could overflow
            reference = torch.where(self.maximum.isinf(), 0, self.maximum).view(*self.query_shape[:3], 1)
            total = total + (self.sinks.float() - reference).exp().view(total.shape)
        output = self.output / torch.where(total > 0, total, 1)
        return output.view(*self.query_shape[:3], -1).to(self.dtype)
