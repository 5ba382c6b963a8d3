"""Keeps on the accelerator what of the pool's tokens scores need, so that scores can be told without fetching keys.

Of exact keys that is a copy: `ScoringCodes` has all columns in a few bits, `ScoringColumns` the paper's partial key
cache. `coded_rows` has the keys themselves.

Legend: B batch, H key/value heads, G query heads a key/value head, D head dim, N slots in use.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch

from kvcache_plugins.formats.bits import pack
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.tokens import ChoosingCall, attend_chosen, choose_by_codes, code_scores
from kvcache_plugins.layers.exact_tokens import States

from .pool import TokenPool
from .selection import Selection


# Tokens from which a channel's mean and spread are told
NUM_FITTED = 512
_TINY = 1e-6
# A Gaussian in four levels is told best with steps of about its spread
_TWO_BIT_STEP = 1.0

# What is kept here of tokens, by name, and the parts of the pool's rows
Encoded = tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]


class ScoringStates:
    """
    Rows `[B, H, capacity, ...]` by name, the first `length` in use, that grow and are written anew where tokens are
    replaced. The pool's rows are keys and values as they are, side by side, unless a subclass says otherwise.
    """

    # By which factor, and how many rows beside, capacity grows that is used up
    growth: ClassVar[tuple[float, int]] = (1.25, 64)

    def __init__(self) -> None:
        self.length = 0
        self.rows: dict[str, torch.Tensor] = {}
        # What was told from the first tokens, `[B, H, ...]` each
        self.fitted: dict[str, torch.Tensor] = {}

    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        """Makes what is stored of the first `count` exact tokens `[B, H, T, D or E]` from position `start` on."""
        return self.encode_keys(keys[:, :, :count]), (keys[:, :, :count], values[:, :, :count])

    def encode_keys(self, keys: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Makes the rows of keys `[B, H, tokens, D]`."""
        raise NotImplementedError

    def dense(self, rows: torch.Tensor, slots: torch.Tensor, pool: TokenPool) -> States:
        """Returns keys and values `[B, H, K, D or E]` of the pool's rows in slots `[B, H, K]`."""
        keys, values = rows.split(pool.dims, dim=3)
        return keys, values

    def prepare(self, query: torch.Tensor, scale: float, pool: TokenPool, window: States) -> ChoosingCall | None:
        """Describes steps with queries like these `[B, H, G, D]` over the pool as it is; `None` if no kernel does."""
        return None

    def attend(
        self, call: AttentionCall, selection: Selection, pool: TokenPool, newest: States, start: int
    ) -> torch.Tensor | None:
        """
        Attends as `InfiniGenLayer.attend_selection` to the tokens chosen and to the `newest` `[B, H, W, D or E]` from
        position `start` on, by the kernel that reads all where they stand, under a mask of `[B, 1, 1, tokens]`; `None`
        if it cannot.
        """
        slots, count = selection.slots, selection.count
        mask = None if call.mask is None else call.mask[:, 0, 0]
        positions = None if mask is None else pool.positions_of(slots)
        assert call.scale is not None
        return attend_chosen(call.query, pool.pages, slots, count, *newest, call.scale, mask, start, positions)

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        """Multiplies queries `[B, H, G, D]` with the pool's keys, but for what all have in common: `[B, H, G, N]`."""
        raise NotImplementedError

    def append(self, encoded: Mapping[str, torch.Tensor]) -> None:
        """Adds rows `[B, H, tokens, ...]`, as `encode` made them, with more capacity if need be."""
        used = self.length
        total = used + next(iter(encoded.values())).shape[2]
        for name, new in encoded.items():
            rows = self.rows.get(name)
            if rows is None or rows.shape[2] < total:
                factor, least = self.growth
                capacity = total if rows is None else max(total, int(factor * rows.shape[2]) + least)
                grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
                if rows is not None:
                    grown[:, :, :used] = rows[:, :, :used]
                rows = self.rows[name] = grown
            rows[:, :, used:total] = new
        self.length = total

    def write(self, slots: torch.Tensor, encoded: Mapping[str, torch.Tensor]) -> None:
        """Writes rows `[B, H, tokens, ...]` into slots `[B, H, tokens]`."""
        for name, new in encoded.items():
            rows = self.rows[name]
            index = slots.to(rows.device).reshape(*slots.shape, *[1] * (rows.dim() - 3)).expand_as(new)
            rows.scatter_(2, index, new)

    def truncate(self, length: int) -> None:
        """Forgets the rows from `length` on."""
        self.length = min(self.length, length)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every tensor by `function` of it."""
        self.rows = {name: function(rows) for name, rows in self.rows.items()}
        self.fitted = {name: function(tensor) for name, tensor in self.fitted.items()}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Lists part and tensor of everything stored."""
        for rows in self.rows.values():
            yield "scoring", rows[:, :, : self.length]
            yield "spare", rows[:, :, self.length :]
        yield from (("scoring", tensor) for tensor in self.fitted.values())


class ScoringCodes(ScoringStates):
    """
    Keys in 2, 4 or 8 bits a number and one float16 scale a token.

    Channels are first brought to mean 0 and spread 1 (statistics of the first tokens, per head). The mean adds the
    same to every score of a query and drops out of the softmax; the spread goes into the query. So a key needs no zero
    point, and its row can be written anew when another token takes its slot.
    """

    def __init__(self, nbits: int, keys: torch.Tensor, valid: torch.Tensor | None, num_real: int):
        super().__init__()
        self.nbits = nbits
        self.refit(keys, valid, num_real)

    def refit(self, keys: torch.Tensor, valid: torch.Tensor | None, num_real: int) -> None:
        """
        Takes mean and spread of channels from sequences' first valid `[B, tokens]` keys `[B, H, tokens, D]` and writes
        the rows of all keys anew; the sequence that has the fewest valid ones has `num_real`.
        """
        self.num_fitted = num_real
        keys = keys.float()
        if valid is None:
            first = keys[:, :, :NUM_FITTED]
            weight = keys.new_ones(keys.shape[0], 1, first.shape[2], 1)
        else:
            first, weight = keys, (valid & (valid.cumsum(dim=1) <= NUM_FITTED))[:, None, :, None].float()
        is_known = weight.sum(dim=2, keepdim=True) > 0
        count = weight.sum(dim=2, keepdim=True).clamp(min=1)
        mean = (first * weight).sum(dim=2, keepdim=True) / count
        spread = ((first - mean).square() * weight).sum(dim=2, keepdim=True).div(count).sqrt()
        # Of a channel that does not move nothing is known: its size stands in
        spread = torch.maximum(spread, mean.abs() * 0.01 + _TINY)
        # Nor of a sequence that is all padding so far: divided by next to nothing its keys would overflow
        self.fitted = {"mean": mean, "spread": torch.where(is_known, spread, 1.0)}
        if self.length:
            for name, new in self.encode_keys(keys).items():
                self.rows[name][:, :, : self.length] = new

    def encode_keys(self, keys: torch.Tensor) -> Mapping[str, torch.Tensor]:
        normal = (keys.float() - self.fitted["mean"]) / self.fitted["spread"]
        top = 2 ** (self.nbits - 1) - 0.5
        if self.nbits == 2:
            scale = normal.square().mean(dim=3, keepdim=True).sqrt() * _TWO_BIT_STEP
        else:
            scale = normal.abs().amax(dim=3, keepdim=True) / top
        scale = scale.clamp(min=_TINY).half()
        codes = (normal / scale.float()).floor().clamp(-(top + 0.5), top - 0.5) + (top + 0.5)
        return {"codes": pack(codes.to(torch.uint8), self.nbits), "scale": scale[..., 0]}

    def prepare(self, query: torch.Tensor, scale: float, pool: TokenPool, window: States) -> ChoosingCall:
        codes = self.rows["codes"], self.rows["scale"], self.fitted["spread"]
        return choose_by_codes(query, scale, *codes, self.length, self.nbits, pool.pages, window)

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        query, rows = query * self.fitted["spread"], self.rows
        return code_scores(query, rows["codes"], rows["scale"], self.length, self.nbits)


class ScoringColumns(ScoringStates):
    """
    The paper's partial key cache: a share of the keys' columns, in their own dtype.

    They are the columns in which the prompt's queries `[B, H * G, prompt length, D]`, if known, and the first keys are
    large, where `valid`: with the skewing `"query-svd"` after both were turned to the right singular vectors of a
    group's queries, if known.
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
        turn = torch.eye(head_dim, dtype=torch.float32, device=keys.device)
        turn = turn.expand(batch_size, num_heads, head_dim, head_dim)
        keys_used = keys.float() if valid is None else keys.float() * valid[:, None, :count, None]
        query_sums = torch.zeros_like(keys_used[:, :, 0])
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
        turn = turn.gather(3, columns[:, :, None].expand(-1, -1, head_dim, -1))
        self.fitted = {"turn": turn.to(keys.dtype)}

    def encode_keys(self, keys: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"columns": keys @ self.fitted["turn"]}

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        columns = self.rows["columns"][:, :, : self.length]
        return (query @ self.fitted["turn"].to(query.dtype)) @ columns.to(query.dtype).transpose(2, 3)
