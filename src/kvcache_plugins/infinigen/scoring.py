"""What stays on the accelerator of the keys in the pool, so that their scores can be told without fetching them.

Two ways, told apart by measured fidelity against bytes, not by what the paper chose:

- `ScoringCodes`: all columns in a few bits. Channels are first brought to mean 0 and spread 1 (statistics of the first
  tokens, per head), then every token gets codes around zero and one scale. The mean adds the same to every score of a
  query and drops out of the softmax; the spread goes into the query. So a key needs no zero point, and its row can be
  written anew when another token takes its slot.
- `ScoringColumns`: the paper's partial key cache: some columns of the (skewed) keys, in full precision.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

from collections.abc import Callable, Iterator
from typing import ClassVar

import torch

from kvcache_plugins.ops.gather import code_scores
from kvcache_plugins.ops.quantization import pack


# Tokens from which a channel's mean and spread are told
NUM_FITTED = 512
_TINY = 1e-6
# A Gaussian in four levels is told best with steps of about its spread
_TWO_BIT_STEP = 1.0


class ScoringStates:
    """Base of both: rows `[B, H, capacity, ...]` that grow, and are written anew where tokens are replaced."""

    # By which factor, and how many rows beside, room grows that is used up
    growth: ClassVar[tuple[float, int]] = (1.25, 64)

    def __init__(self) -> None:
        self.length = 0
        self._rows: dict[str, torch.Tensor] = {}

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        """The rows of keys `[B, H, tokens, D]`."""
        raise NotImplementedError

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """
        Products of queries and keys but for what is the same for all keys.

        Args:
            query (`torch.Tensor` of shape `[B, H, G, D]`): queries, float32.

        Returns:
            `torch.Tensor` of shape `[B, H, G, N]`, float32.
        """
        raise NotImplementedError

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        """What was told from the first tokens, `[B, H, ...]`."""
        raise NotImplementedError

    def append(self, keys: torch.Tensor) -> None:
        """Adds the rows of keys `[B, H, tokens, D]` that follow."""
        self.length = self._append_rows(self.encode(keys), self.length)

    def _append_rows(self, encoded: dict[str, torch.Tensor], used: int) -> int:
        """Writes rows `[B, H, new, ...]` behind the first `used`, with more room if need be; how many are there."""
        total = used + next(iter(encoded.values())).shape[2]
        for name, new in encoded.items():
            rows = self._rows.get(name)
            if rows is None or rows.shape[2] < total:
                factor, least = self.growth
                capacity = total if rows is None else max(total, int(factor * rows.shape[2]) + least)
                grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
                if rows is not None:
                    grown[:, :, :used] = rows[:, :, :used]
                rows = self._rows[name] = grown
            rows[:, :, used:total] = new
        return total

    def write(self, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Writes the rows of keys `[B, H, tokens, D]` into slots `[B, H, tokens]`."""
        for name, new in self.encode(keys).items():
            rows = self._rows[name]
            index = slots.to(rows.device).reshape(*slots.shape, *[1] * (rows.dim() - 3)).expand_as(new)
            rows.scatter_(2, index, new)

    def rewrite(self, keys: torch.Tensor) -> None:
        """Writes the rows of all keys `[B, H, N, D]` anew."""
        for name, new in self.encode(keys).items():
            self._rows[name][:, :, : self.length] = new

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on."""
        self.length = min(self.length, length)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self._rows = {name: function(rows) for name, rows in self._rows.items()}
        for name, tensor in self.fitted_tensors().items():
            setattr(self, name, function(tensor))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Part and tensor of everything stored."""
        for rows in self._rows.values():
            yield "scoring", rows[:, :, : self.length]
            yield "spare", rows[:, :, self.length :]
        for tensor in self.fitted_tensors().values():
            yield "scoring", tensor


class ScoringCodes(ScoringStates):
    """
    Keys in 2, 4 or 8 bits a number and one float16 scale a token.

    Args:
        nbits (`int`): bits a code.
    """

    def __init__(self, nbits: int):
        super().__init__()
        self.nbits = nbits
        # The fewest real tokens of an item that the statistics are of
        self.num_fitted = 0
        self.mean: torch.Tensor | None = None
        self.spread: torch.Tensor | None = None

    def fit(self, keys: torch.Tensor, valid: torch.Tensor | None) -> None:
        """
        Takes mean and spread of every channel from the first tokens of each item.

        Args:
            keys (`torch.Tensor` of shape `[B, H, tokens, D]`): the first keys.
            valid (`torch.Tensor` of shape `[B, tokens]`, *optional*): which of them are no padding.
        """
        keys = keys.float()
        if valid is None:
            keys = keys[:, :, :NUM_FITTED]
            weight = keys.new_ones(keys.shape[0], 1, keys.shape[2], 1)
        else:
            weight = (valid & (valid.cumsum(dim=1) <= NUM_FITTED))[:, None, :, None].float()
        count = weight.sum(dim=2, keepdim=True).clamp(min=1)
        mean = (keys * weight).sum(dim=2, keepdim=True) / count
        spread = ((keys - mean).square() * weight).sum(dim=2, keepdim=True).div(count).sqrt()
        # Of a channel that does not move nothing is known: its size stands in
        self.mean, self.spread = mean, torch.maximum(spread, mean.abs() * 0.01 + _TINY)

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        assert self.mean is not None and self.spread is not None
        normal = (keys.float() - self.mean) / self.spread
        top = 2 ** (self.nbits - 1) - 0.5
        if self.nbits == 2:
            scale = normal.square().mean(dim=3, keepdim=True).sqrt() * _TWO_BIT_STEP
        else:
            scale = normal.abs().amax(dim=3, keepdim=True) / top
        scale = scale.clamp(min=_TINY).half()
        codes = (normal / scale.float()).floor().clamp(-(top + 0.5), top - 0.5) + (top + 0.5)
        return {"codes": pack(codes.to(torch.uint8), self.nbits), "scale": scale[..., 0]}

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        assert self.spread is not None
        return code_scores(query * self.spread, self._rows["codes"], self._rows["scale"], self.length, self.nbits)

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        fitted = {"mean": self.mean, "spread": self.spread}
        return {name: tensor for name, tensor in fitted.items() if tensor is not None}


class ScoringColumns(ScoringStates):
    """
    Some columns of the keys, turned before where skewing is asked for, in the keys' own dtype.

    Args:
        keys (`torch.Tensor` of shape `[B, H, tokens, D]`):
            The first keys.
        queries (`torch.Tensor` of shape `[B, H * G, prompt length, D]`, *optional*):
            Queries of the prompt. Without them the columns are those in which keys are large, and nothing is turned.
        valid (`torch.Tensor` of shape `[B, prompt length]`, *optional*):
            Which tokens of the prompt are no padding.
        partial_ratio (`float`):
            Share of the columns that is kept.
        skewing (`str`):
            `"none"`, or `"query-svd"`: columns of the right singular vectors of a group's queries.
    """

    def __init__(
        self,
        keys: torch.Tensor,
        queries: torch.Tensor | None,
        valid: torch.Tensor | None,
        partial_ratio: float,
        skewing: str,
    ):
        super().__init__()
        batch_size, num_heads, count, head_dim = keys.shape
        identity = torch.eye(head_dim, device=keys.device).expand(batch_size, num_heads, head_dim, head_dim)
        keys_used = keys.float() if valid is None else keys.float() * valid[:, None, :count, None]
        turn, query_sums = identity, torch.zeros_like(keys_used[:, :, 0])
        if queries is not None:
            grouped = queries.float().unflatten(1, (num_heads, -1))
            if valid is not None:
                grouped = grouped * valid[:, None, None, :, None]
            groups = grouped.shape[2]
            grouped = grouped.flatten(2, 3)
            if skewing == "query-svd":
                # Eigenvectors of what queries have with themselves are their right singular vectors
                turn = torch.linalg.eigh(grouped.transpose(2, 3) @ grouped).eigenvectors
            query_sums = (grouped @ turn).abs().sum(dim=2) / groups
        sums = query_sums + (keys_used @ turn).abs().sum(dim=2)
        columns = sums.topk(max(1, round(partial_ratio * head_dim)), dim=2).indices
        # `[B, H, D, columns]`: what turns keys and picks columns at once
        self.turn = turn.gather(3, columns[:, :, None].expand(-1, -1, head_dim, -1)).to(keys.dtype)

    def encode(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"columns": keys @ self.turn}

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        columns = self._rows["columns"][:, :, : self.length]
        return (query @ self.turn.to(query.dtype)) @ columns.to(query.dtype).transpose(2, 3)

    def fitted_tensors(self) -> dict[str, torch.Tensor]:
        return {"turn": self.turn}
