"""Scoring data on the model's device, by which queries score the pool's tokens without their keys being fetched.

A copy of the pool's exact keys stays on the device: `ScoringCodes` has all columns in a few bits, `ScoringColumns` is
the paper's partial key cache. `ScoringRows`, in `scoring_rows`, has the keys themselves as rows of a codec.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, K slots of a
selection, N slots in use, W tokens of the tail.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

import torch

from kvcache_plugins.formats.bits import pack
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.kept_selection import KeptSelection
from kvcache_plugins.kernels.prepared_selection import PreparedSelection, prepare_by_codes
from kvcache_plugins.kernels.selective_attention import Selection, attend_selected
from kvcache_plugins.kernels.token_scores import KeyCodes, score_codes
from kvcache_plugins.layers.exact_tokens import States
from kvcache_plugins.layers.lazy_layer import LeftPadding

from .config import InfiniGenConfig
from .pool import TokenPool


# Tokens to which mean and spread of a channel are fitted
_NUM_FITTED = 512
_TINY = 1e-6
# Largest scale, a float16
_LARGEST = torch.finfo(torch.float16).max
# Four levels represent a Gaussian best with steps of about its spread
_TWO_BIT_STEP = 1.0

# Rows by name, which stay here, and parts of the pool's rows
Encoded = tuple[Mapping[str, torch.Tensor], Sequence[torch.Tensor]]


class Scoring(ABC):
    """
    Rows `[B, H, capacity, ...]` by name: row i is that of the token in slot i of the pool.

    A token is encoded, stored in the pool, and then stored here (`encode`, `TokenPool.append`, `store`). The pool's
    rows are exact keys and values side by side by default.

    Attributes:
        padding (`LeftPadding`): the layer's.
        length (`int`): rows in use, N.
        rows (`dict[str, torch.Tensor]`): the rows.
        fitted (`dict[str, torch.Tensor]`): parameters `[B, H, ...]` that `encode` has fitted to the first tokens.
    """

    # Growth of a full capacity: factor, and rows in addition
    growth: ClassVar[tuple[float, int]] = (1.25, 64)

    def __init__(self, padding: LeftPadding):
        self.padding = padding
        self.length = 0
        self.rows: dict[str, torch.Tensor] = {}
        self.fitted: dict[str, torch.Tensor] = {}

    @property
    def least_tokens(self) -> int:
        """Number of tokens that the next `encode` needs."""
        return 0

    def needs_queries(self, length: int, *, is_prompt: bool) -> bool:
        """Return whether to record queries, of a prompt or not, when the sequence has `length` tokens."""
        return False

    def record_queries(self, query: torch.Tensor, num_heads: int, length: int) -> None:
        """Record the newest queries `[B, H * G, Q, D]` of a sequence of `length` tokens, for the next `encode`."""
        raise NotImplementedError

    @abstractmethod
    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        """
        Encode the first `count` of exact tokens `[B, H, T, D or E]` from position `start` on; a `ValueError` if they
        cannot be stored. Parameters are fitted, so that this is to be called on a copy if the pool may be full.
        """

    @abstractmethod
    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        """Multiply queries `[B, H, G, D]` with all keys, up to a constant of each query: `[B, H, G, N]`."""

    @abstractmethod
    def scores_by(self, steps: KeptSelection, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        """Multiply queries of `KeptSelection.aligned` with all keys by a kept launch; see `score_codes` there."""

    def states_by(
        self, steps: KeptSelection, rows: torch.Tensor, selection: Selection, pool: TokenPool
    ) -> torch.Tensor:
        """Return keys and values side by side, `[B, H, K, D + E]`, of the fetched rows of a selection."""
        return rows

    def dense(self, rows: torch.Tensor, slots: torch.Tensor, pool: TokenPool) -> States:
        """Return keys and values `[B, H, K, D or E]` of the pool's rows in slots `[B, H, K]`."""
        keys, values = rows.split(pool.dims, dim=3)
        return keys, values

    def attend(
        self, call: AttentionCall, selection: Selection, pool: TokenPool, tail: States, tail_start: int
    ) -> torch.Tensor | None:
        """
        Attend as `InfiniGenLayer.attend_selection` to selected tokens and the `tail` `[B, H, W, D or E]` from position
        `tail_start` on, under a mask `[B, 1, 1, tokens]`, by the kernel that reads rows where they are stored; `None`
        if there is no such kernel.
        """
        positions = None if call.mask is None else pool.positions_of(selection.slots)
        return attend_selected(call, pool.pages, selection, tail, tail_start, positions)

    def prepare_steps(
        self, query: torch.Tensor, scale: float, pool: TokenPool, tail: States
    ) -> PreparedSelection | None:
        """Prepare steps with queries like `query` `[B, H, G, D]` over the current pool; `None` without a kernel."""
        return None

    def drop_prepared(self) -> None:
        """Free what was prepared for the pool, which will change."""
        return None

    def store(
        self, rows: Mapping[str, torch.Tensor], num_appended: int, taken: Sequence[torch.Tensor], pool: TokenPool
    ) -> None:
        """
        Store rows `[B, H, tokens, ...]` of `encode`: the first `num_appended` behind those in use, the others in the
        slots `[B, H, tokens]` that were `taken`, in order.
        """
        start = num_appended
        self._append({name: new[:, :, :start] for name, new in rows.items()})
        for slots in taken:
            stop = start + slots.shape[2]
            self._write(slots, {name: new[:, :, start:stop] for name, new in rows.items()})
            start = stop

    def _append(self, new_rows: Mapping[str, torch.Tensor]) -> None:
        used = self.length
        total = used + next(iter(new_rows.values())).shape[2]
        self.rows = dict(self.rows)
        for name, new in new_rows.items():
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

    def _write(self, slots: torch.Tensor, new_rows: Mapping[str, torch.Tensor]) -> None:
        for name, new in new_rows.items():
            rows = self.rows[name]
            index = slots.to(rows.device).reshape(*slots.shape, *[1] * (rows.dim() - 3)).expand_as(new)
            rows.scatter_(2, index, new)

    def truncate(self, length: int) -> None:
        """Drop the rows from `length` on."""
        self.length = min(self.length, length)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every tensor by `function` of it."""
        self.rows = {name: function(rows) for name, rows in self.rows.items()}
        self.fitted = {name: function(tensor) for name, tensor in self.fitted.items()}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield memory category and tensor of everything stored."""
        for rows in self.rows.values():
            yield "scoring", rows[:, :, : self.length]
            yield "spare", rows[:, :, self.length :]
        yield from (("scoring", tensor) for tensor in self.fitted.values())


class ScoringCodes(Scoring):
    """
    Keys in 2, 4 or 8 bits a number, and one float16 scale a token.

    Channels are normalized to mean 0 and spread 1 (by statistics of the first tokens, per head). The mean adds the
    same to every score of a query and drops out of the softmax; queries are multiplied with the spread. So a key needs
    no zero point, and its row can be replaced when another token takes its slot.
    """

    def __init__(self, config: InfiniGenConfig, padding: LeftPadding):
        super().__init__(padding)
        assert config.scoring_nbits is not None
        self.nbits = config.scoring_nbits
        self._pool_tokens = config.pool_tokens
        # Tokens of the shortest sequence to which mean and spread were fitted
        self._num_fitted = 0

    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        keys, values = keys[:, :, :count], values[:, :, :count]
        if not self.fitted:
            first = keys[:, :, : self._pool_tokens]
            self._fit(first, max(first.shape[2] - self.padding.ends()[1], 0))
        return self._encode(keys), (keys, values)

    def store(
        self, rows: Mapping[str, torch.Tensor], num_appended: int, taken: Sequence[torch.Tensor], pool: TokenPool
    ) -> None:
        super().store(rows, num_appended, taken, pool)
        num_real = max(self.length - self.padding.ends()[1], 0)
        if taken or self._num_fitted >= min(num_real, _NUM_FITTED):
            return
        # Statistics of few tokens are replaced as long as all tokens are in the pool
        keys = torch.cat([page.split(pool.dims, dim=3)[0] for page, *_ in pool.iter_pages()], dim=2)
        self._fit(keys, num_real)
        # Rows of their own, as the layer may go back to the scoring data of before
        spare = {name: rows[:, :, self.length :] for name, rows in self.rows.items()}
        self.rows = {name: torch.cat([new, spare[name]], dim=2) for name, new in self._encode(keys).items()}

    def _fit(self, keys: torch.Tensor, num_real: int) -> None:
        """
        Fit mean and spread of channels to the first real tokens of keys `[B, H, tokens, D]`, which begin at position
        0; the shortest sequence has `num_real` real tokens.
        """
        self._num_fitted = num_real
        keys = keys.float()
        valid = self.padding.valid_tokens(0, keys.shape[2], keys.device)
        if valid is None:
            keys = keys[:, :, :_NUM_FITTED]
            weight = keys.new_ones(keys.shape[0], 1, keys.shape[2], 1)
        else:
            weight = (valid & (valid.cumsum(dim=1) <= _NUM_FITTED))[:, None, :, None].float()
        is_known = weight.sum(dim=2, keepdim=True) > 0
        count = weight.sum(dim=2, keepdim=True).clamp(min=1)
        mean = (keys * weight).sum(dim=2, keepdim=True) / count
        spread = ((keys - mean).square() * weight).sum(dim=2, keepdim=True).div(count).sqrt()
        # A constant channel has no spread: its size replaces it
        spread = torch.maximum(spread, mean.abs() * 0.01 + _TINY)
        # A sequence without real tokens has none either: divided by next to nothing its keys would overflow
        self.fitted = {"mean": mean, "spread": torch.where(is_known, spread, 1.0)}

    def _encode(self, keys: torch.Tensor) -> Mapping[str, torch.Tensor]:
        normal = (keys.float() - self.fitted["mean"]) / self.fitted["spread"]
        top = 2 ** (self.nbits - 1) - 0.5
        if self.nbits == 2:
            scale = normal.square().mean(dim=3, keepdim=True).sqrt() * _TWO_BIT_STEP
        else:
            scale = normal.abs().amax(dim=3, keepdim=True) / top
        # A channel that did not vary among the first tokens may be far from its mean now
        scale = scale.clamp(_TINY, _LARGEST).half()
        codes = (normal / scale.float()).floor().clamp(-(top + 0.5), top - 0.5) + (top + 0.5)
        return {"codes": pack(codes.to(torch.uint8), self.nbits), "scale": scale[..., 0]}

    @property
    def _keys(self) -> KeyCodes:
        return KeyCodes(self.rows["codes"], self.rows["scale"], self.fitted["spread"], self.length, self.nbits)

    def prepare_steps(self, query: torch.Tensor, scale: float, pool: TokenPool, tail: States) -> PreparedSelection:
        return prepare_by_codes(query, scale, self._keys, pool.pages, tail)

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        return score_codes(query, self._keys)

    def scores_by(self, steps: KeptSelection, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        return steps.score_codes(query, self._keys)


class ScoringColumns(Scoring):
    """
    The paper's partial key cache: a share of the keys' columns, in their own dtype.

    These are the columns in which the first keys and the prompt's queries, if they were recorded, are large. With the
    skewing `"query-svd"` both are first rotated to the right singular vectors of the queries of each key/value head.
    """

    def __init__(self, config: InfiniGenConfig, padding: LeftPadding):
        super().__init__(padding)
        self._config = config
        # Rotation `[B, H, D, D]` by skewing, and sums of the rotated queries' magnitudes `[B, H, D]`
        self._query_statistics: States | None = None

    def needs_queries(self, length: int, *, is_prompt: bool) -> bool:
        # The prompt's only, if some of its tokens move into the pool at once
        return is_prompt and length > self._config.recent

    def record_queries(self, query: torch.Tensor, num_heads: int, length: int) -> None:
        """See `Scoring.record_queries`: keeps the rotation that belongs to the queries, and their sizes by column."""
        valid = self.padding.valid_tokens(length - query.shape[2], query.shape[2], query.device)
        grouped = query.float().unflatten(1, (num_heads, -1))
        if valid is not None:
            grouped = grouped * valid[:, None, None, :, None]
        groups = grouped.shape[2]
        grouped = grouped.flatten(2, 3)
        rotation = _identity(grouped)
        if self._config.skewing == "query-svd":
            # Right singular vectors of queries are eigenvectors of their second moments
            rotation = torch.linalg.eigh(grouped.transpose(2, 3) @ grouped).eigenvectors
        self._query_statistics = rotation, (grouped @ rotation).abs().sum(dim=2) / groups

    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        keys, values = keys[:, :, :count], values[:, :, :count]
        if not self.fitted:
            self._fit(keys[:, :, : self._config.pool_tokens])
        return {"columns": keys @ self.fitted["rotation"]}, (keys, values)

    def _fit(self, keys: torch.Tensor) -> None:
        """Choose columns for keys `[B, H, tokens, D]`, which begin at position 0."""
        valid = self.padding.valid_tokens(0, keys.shape[2], keys.device)
        real = keys.float() if valid is None else keys.float() * valid[:, None, :, None]
        rotation, query_sizes = self._query_statistics or (_identity(real), torch.zeros_like(real[:, :, 0]))
        self._query_statistics = None
        sizes = query_sizes + (real @ rotation).abs().sum(dim=2)
        assert self._config.partial_ratio is not None
        head_dim = keys.shape[3]
        columns = sizes.topk(max(1, round(self._config.partial_ratio * head_dim)), dim=2).indices
        # Rotates keys and selects columns at once, `[B, H, D, columns]`
        rotation = rotation.gather(3, columns[:, :, None].expand(-1, -1, head_dim, -1))
        self.fitted = {"rotation": rotation.to(keys.dtype)}

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        columns = self.rows["columns"][:, :, : self.length]
        return (query @ self.fitted["rotation"].to(query.dtype)) @ columns.to(query.dtype).transpose(2, 3)

    def scores_by(self, steps: KeptSelection, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        return steps.score_columns(query, self.rows["columns"], self.length, self.fitted["rotation"])


def _identity(states: torch.Tensor) -> torch.Tensor:
    """Return identity matrices `[B, H, D, D]` for states `[B, H, any, D]`."""
    dim = states.shape[3]
    return torch.eye(dim, dtype=torch.float32, device=states.device).expand(*states.shape[:2], dim, dim)
