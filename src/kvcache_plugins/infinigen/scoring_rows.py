"""Scoring by rows of a codec: keys stay on the model's device, are scored and attended to there; values are fetched.

A row of bytes depends on its token alone, so that another token can take its slot. The first tokens of every sequence
stay exact. The codec is fitted to a sequence's tokens when the first of them behind the exact ones is encoded.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dims of keys and values, T tokens, K
slots of a selection, S exact first tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Codec, QueryMoments, Sample
from kvcache_plugins.formats.parts import SelectableRows, SinkStates
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rows import RowFormats
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.kept_selection import KeptSelection
from kvcache_plugins.kernels.ops import TILE_TOKENS, decode_rows
from kvcache_plugins.kernels.prepared_selection import PreparedSelection, prepare_by_rows
from kvcache_plugins.kernels.selective_attention import Selection, attend_selected
from kvcache_plugins.kernels.token_scores import PreparedRows, score_rows
from kvcache_plugins.layers.exact_tokens import States
from kvcache_plugins.layers.finite_check import check_finite
from kvcache_plugins.layers.lazy_layer import LeftPadding
from kvcache_plugins.layers.policies import RowPolicy
from kvcache_plugins.layers.step_plan import DroppedOnCopy

from .pool import TokenPool
from .scoring import Encoded, Scoring


# Newest queries of a prompt to which a codec is fitted
_NUM_QUERIES = 256


class PlannedRows(DroppedOnCopy):
    """
    Rows of all tokens, prepared for kernels as long as the pool does not change.

    Attributes:
        rows (`PreparedRows`): the rows.
        version (`int`): of the pool that they were prepared for. Rows of another version must not be used.
    """

    __slots__ = ("rows", "version")

    def __init__(self, rows: PreparedRows, version: int):
        self.rows = rows
        self.version = version


class ScoringRows(Scoring):
    """
    Rows of keys, exact first tokens, and the codec of keys and values.

    Args:
        policy (`RowPolicy`): makes the codec.
        head_dims (`tuple[int, int]`): D and E.
        layer_idx (`int`): index of the layer, for error messages.
        padding (`LeftPadding`): the layer's.

    Attributes:
        codec (`Codec`): codec of rows that have kernels, fitted once there are `sinks`.
        sinks (two `torch.Tensor` of shape `[B, H, S, D or E]`, *optional*): exact first tokens, once any are encoded.
        moments (`QueryMoments`, *optional*): statistics of recorded queries, to which the codec will be fitted.
    """

    growth = (1 + 1 / 64, 32)

    def __init__(self, policy: RowPolicy, head_dims: tuple[int, int], layer_idx: int, padding: LeftPadding):
        super().__init__(padding)
        self.policy = policy
        self.layer_idx = layer_idx
        self.codec: Codec = policy.codec(*head_dims)
        self.sinks: States | None = None
        self.moments: QueryMoments | None = None
        self._planned: PlannedRows | None = None

    @property
    def least_tokens(self) -> int:
        return 0 if self.sinks is not None else self.policy.least_tokens + self.padding.ends()[0]

    def needs_queries(self, length: int, *, is_prompt: bool) -> bool:
        # A codec that is fitted to few tokens does without
        is_long = length > self.policy.least_tokens - self.policy.num_recorded_queries
        return self.sinks is None and bool(self.codec.layouts) and is_long

    def record_queries(self, query: torch.Tensor, num_heads: int, length: int) -> None:
        """See `Scoring.record_queries`: adds the newest queries to the `moments`."""
        query = query[:, :, -_NUM_QUERIES:].detach()
        valid = self.padding.valid_tokens(length - query.shape[2], query.shape[2], query.device)
        moments = QueryMoments.of(query, num_heads, self.codec.layouts, valid)
        self.moments = moments if self.moments is None else self.moments.plus(moments)

    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        is_first = self.sinks is None
        is_real: torch.Tensor | None = None
        valid: torch.Tensor | None = None
        own_keys, own_values = keys[:, :, :count], values[:, :, :count]
        # Position behind the exact tokens of every sequence
        sinks_stop = self.padding.ends()[1] + self.policy.num_sink_tokens
        if is_first or start <= sinks_stop:
            # With data even if states are on the meta device
            device = torch.device("cpu") if keys.is_meta else keys.device
            index = torch.arange(start, start + keys.shape[2], dtype=torch.int64, device=device)
            index = index - self.padding.first_tokens(keys.shape[0], device)
            check_finite(keys, values, self._is_real(index), self.layer_idx, self.policy.largest)
            self._fit(keys, values, count, start, index)
            self._store_sinks(own_keys, own_values, index[:, :count])
            valid = index[:, :count] >= self.policy.num_sink_tokens
            is_real = self._is_real(index[:, :count])
            if start + count > sinks_stop:
                self.moments = None
        positions = Positions(start, self.padding.counts)
        try:
            rows = self.codec.encode(own_keys, own_values, positions)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        overflow = self.codec.overflow(*rows)
        if overflow is not None:
            overflow = (overflow if valid is None else overflow & valid).any()
        check_finite(own_keys, own_values, is_real, self.layer_idx, self.policy.largest, overflow)
        if is_first:
            sample = Sample(own_keys, own_values, valid, None, positions)
            self.codec = self.codec.with_bias_correction(rows, sample)
        return {"keys": rows[0]}, (rows[1],)

    def _is_real(self, index: torch.Tensor) -> torch.Tensor | None:
        return None if self.padding.counts is None else index >= 0

    def _fit(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int, index: torch.Tensor) -> None:
        """
        Fit the codec to all sequences whose tokens are encoded from now on. `index` `[B, T]` counts the tokens of
        each sequence, from below 0 for padding; see `encode` for the others.
        """
        num_sinks = self.policy.num_sink_tokens
        is_encoded = index[:, count - 1] >= num_sinks
        if self.sinks is None:
            valid = (index >= num_sinks) & is_encoded[:, None]
            positions = Positions(start, self.padding.counts)
            self.codec = self.codec.fit(Sample(keys, values, valid, self.moments, positions))
            return
        for sequence in (is_encoded & (index[:, 0] <= num_sinks)).nonzero().flatten().tolist():
            # Exact tokens that are not among these are replaced by zeros, which are not valid
            skip = int(index[sequence, 0])
            own_keys, own_values = (
                F.pad(states[sequence, None], (0, 0, max(skip, 0), 0))[:, :, max(-skip, 0) :]
                for states in (keys, values)
            )
            valid = torch.arange(own_keys.shape[2], dtype=torch.int64, device="cpu")[None] >= num_sinks
            self.codec = self.codec.refit(sequence, Sample(own_keys, own_values, valid, self.moments))

    def _store_sinks(self, keys: torch.Tensor, values: torch.Tensor, index: torch.Tensor) -> None:
        """Store the exact first tokens among `[B, H, T, D or E]`, whose `index` in each sequence is `[B, T]`."""
        count = self.policy.num_sink_tokens
        held = self.sinks
        if held is None:
            shape = *keys.shape[:2], count
            held = keys.new_zeros(*shape, keys.shape[3]), values.new_zeros(*shape, values.shape[3])
        source = torch.arange(count, dtype=torch.int64, device=keys.device) - index[:, :1].to(keys.device)
        self.sinks = _take((keys, values), source[:, None].expand(-1, keys.shape[1], -1), held)

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        if pool.is_in_order:
            return score_rows(query, self._prepared(pool))
        scores: list[torch.Tensor] = []
        keys = self.rows["keys"][:, :, : self.length]
        slots = torch.arange(self.length, dtype=torch.int64, device=query.device)
        for rows, own_slots in zip(keys.split(TILE_TOKENS, dim=2), slots.split(TILE_TOKENS), strict=True):
            index = self._index_of(pool, own_slots.expand(*rows.shape[:3]))
            scores.append(query @ self._decode_keys(rows, index).transpose(2, 3))
        return torch.cat(scores, dim=3)

    def scores_by(self, steps: KeptSelection, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        return steps.score_rows(query, self._prepared(pool).tokens, pool.version)

    def states_by(
        self, steps: KeptSelection, rows: torch.Tensor, selection: Selection, pool: TokenPool
    ) -> torch.Tensor:
        return steps.decode_rows(rows, selection, self._prepared(pool).tokens, pool.version)

    def _index_of(self, pool: TokenPool, slots: torch.Tensor) -> torch.Tensor:
        """Return the indices, in their sequences without padding, of the tokens in slots `[B, H, K]`."""
        return pool.positions_of(slots) - self.padding.first_tokens(len(slots), slots.device)[:, None]

    def dense(self, rows: torch.Tensor, slots: torch.Tensor, pool: TokenPool) -> States:
        assert self.sinks is not None
        index = self._index_of(pool, slots)
        key_rows = self.rows["keys"].gather(2, slots[..., None].expand(-1, -1, -1, self.rows["keys"].shape[3]))
        dtype = self.sinks[0].dtype
        keys = self._decode_keys(key_rows, index).to(dtype)
        values = self.codec.decode_values(rows).to(dtype)
        return _take(self.sinks, index, (keys, values))

    def _decode_keys(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Decode rows to keys `[B, H, K, D]`, float32, of tokens with any `index` `[B, H, K]` in their sequences."""
        key_format, _ = self._formats(rows.device)
        assert key_format.rope is not None
        return key_format.rope.rotate(decode_rows(rows, key_format, None), *key_format.rope.angles(index))

    def _formats(self, device: torch.device) -> RowFormats:
        formats = self.codec.formats(device)
        assert formats is not None, "the codec has kernels"
        return formats

    def attend(
        self, call: AttentionCall, selection: Selection, pool: TokenPool, tail: States, tail_start: int
    ) -> torch.Tensor | None:
        if not pool.is_in_order:
            return None
        return attend_selected(call, self._prepared(pool), selection, tail, tail_start)

    def prepare_steps(
        self, query: torch.Tensor, scale: float, pool: TokenPool, tail: States
    ) -> PreparedSelection | None:
        return prepare_by_rows(query, scale, self._prepared(pool), tail) if pool.is_in_order else None

    def _prepared(self, pool: TokenPool) -> PreparedRows:
        """Return all tokens as kernels read them."""
        assert self.sinks is not None
        planned = self._planned
        if planned is None or planned.version != pool.version:
            padding = self.padding.counts
            keys = self.rows["keys"]
            sinks = SinkStates(padding, *self.sinks)
            positions = Positions(0, padding)
            tokens = SelectableRows(keys, self.length, pool.pages, self._formats(keys.device), positions, sinks)
            planned = self._planned = PlannedRows(PreparedRows(tokens), pool.version)
        return planned.rows

    def drop_prepared(self) -> None:
        self._planned = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().map(function)
        if self.moments is not None:
            self.moments = self.moments.map(function)
        if self.sinks is not None:
            self.codec = self.codec.map(function)
            self.sinks = function(self.sinks[0]), function(self.sinks[1])

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_tensors()
        if self.sinks is not None:
            yield from (("scales", tensor) for tensor in self.codec.tensors())
            yield from (("residual", tensor) for tensor in self.sinks)
        if self.moments is not None:
            yield from (("scales", tensor) for tensor in (self.moments.squares, self.moments.products))


def _take(states: States, index: torch.Tensor, others: States) -> States:
    """Return states `[B, H, T, D or E]` at `index` `[B, H, K]`, and the `others` where it is out of range."""
    count = states[0].shape[2]
    if count == 0 or index.shape[2] == 0:
        return others
    is_inside = ((index >= 0) & (index < count))[..., None]
    index = index.clamp(0, count - 1)[..., None]
    keys, values = (
        torch.where(is_inside, own.gather(2, index.expand(-1, -1, -1, own.shape[3])), other)
        for own, other in zip(states, others, strict=True)
    )
    return keys, values
