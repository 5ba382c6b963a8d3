"""Tokens of a pool as rows of a codec: keys stay where they are scored and attended to, values are what is fetched.

A token is a row of bytes in need of no other, so that another token can take its slot. The first tokens of every
sequence are exact; it gets its table from all tokens that it has when the first other one moves into the pool.

Legend: B batch, H key/value heads, G query heads a key/value head, D and E head dimensions of keys and values, T
tokens, K slots, S first tokens that stay exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Codec, QueryMoments, Sample
from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.formats.parts import SelectableRows, SinkStates
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.ops import TILE_TOKENS
from kvcache_plugins.kernels.tokens import ChoosingCall, attend_chosen, choose_by_rows, score_rows
from kvcache_plugins.layers.lazy_layer import LeftPadding
from kvcache_plugins.layers.packing import RowPacking, States, check_finite

from .pool import TokenPool
from .scoring import Encoded, ScoringStates
from .selection import Selection


class CodedRows(ScoringStates):
    """
    Key rows of a layer, its exact first tokens, and the codec of keys and values, which a packing makes for head dims
    D, E. `moments` are of the queries that the codec will be fitted to, if any were heard.
    """

    growth = (1 + 1 / 64, 32)

    def __init__(self, packing: RowPacking, head_dims: tuple[int, int], layer_idx: int, padding: LeftPadding):
        super().__init__()
        self.packing, self.layer_idx, self.padding = packing, layer_idx, padding
        codec = packing.codec(*head_dims)
        assert isinstance(codec, RowCodec)
        self.codec, self.is_fitted = codec, False
        self.moments: QueryMoments | None = None
        # Keys and values `[B, H, S, D or E]`, once any have been stored
        self.sinks: States | None = None
        # What `append` puts in force: codec, exact tokens and moments of what was encoded last
        self._encoded: tuple[Any, Any, QueryMoments | None] | None = None
        self._tokens: SelectableRows | None = None

    def needs_queries(self, length: int) -> bool:
        """Tells whether queries that make a sequence `length` long are to be heard: those of few tokens are not."""
        is_long = length > self.packing.least_tokens - self.packing.num_heard
        return not self.is_fitted and bool(self.codec.layouts) and is_long

    def hear(self, query: torch.Tensor, num_heads: int, valid: torch.Tensor | None) -> None:
        """Adds queries `[B, H * G, Q, D]`, of which some count, to what the codec will be fitted to."""
        moments = QueryMoments.of(query.detach(), num_heads, self.codec.layouts, valid)
        self.moments = moments if self.moments is None else self.moments.plus(moments)

    def encode(self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int) -> Encoded:
        """Codes tokens, see `ScoringStates.encode`; a `ValueError` if they cannot be stored."""
        codec: Codec = self.codec
        sinks, moments, valid = self.sinks, self.moments, None
        if not self.is_fitted or start <= self.padding.ends()[1] + self.packing.num_sink_tokens:
            # With its data even where states have none
            on = torch.device("cpu") if keys.is_meta else keys.device
            number = torch.arange(start, start + keys.shape[2], dtype=torch.int64, device=on)
            number = number - self.padding.first_tokens(keys.shape[0], on)
            check_finite(keys, values, self._real(number), self.layer_idx, self.packing.largest)
            codec = self._fitted_codec(keys, values, count, start, number)
            sinks = self._exact_first(keys[:, :, :count], values[:, :, :count], number[:, :count])
            valid = number[:, :count] >= self.packing.num_sink_tokens
            if start + count > self.padding.ends()[1] + self.packing.num_sink_tokens:
                moments = None
        keys, values, positions = keys[:, :, :count], values[:, :, :count], Positions(start, self.padding.counts)
        try:
            rows = codec.encode(keys, values, positions)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        overflow = codec.overflow(*rows)
        if overflow is not None:
            overflow = (overflow if valid is None else overflow & valid).any()
        real = None if valid is None else self._real(number[:, :count])
        check_finite(keys, values, real, self.layer_idx, self.packing.largest, overflow)
        if not self.is_fitted:
            codec = codec.with_bias_correction(rows, Sample(keys, values, valid, None, positions))
        self._encoded = codec, sinks, moments
        return {"keys": rows[0]}, (rows[1],)

    def _real(self, number: torch.Tensor) -> torch.Tensor | None:
        return None if self.padding.counts is None else number >= 0

    def _fitted_codec(
        self, keys: torch.Tensor, values: torch.Tensor, count: int, start: int, number: torch.Tensor
    ) -> Codec:
        """
        Returns a codec that knows all sequences of which tokens are coded from now on; as `encode`, with the tokens'
        `number` `[B, T]` in their sequences, below 0 for padding.
        """
        codec: Codec = self.codec
        sinks = self.packing.num_sink_tokens
        begins = number[:, count - 1] >= sinks
        if not self.is_fitted:
            valid = (number >= sinks) & begins[:, None]
            positions = Positions(start, self.padding.counts)
            return codec.fit(Sample(keys, values, valid, self.moments, positions))
        for row in (begins & (number[:, 0] <= sinks)).nonzero().flatten().tolist():
            # Where its exact tokens have been there is nothing, which counts for nothing
            skip = int(number[row, 0])
            own, other = (
                F.pad(states[row, None], (0, 0, max(skip, 0), 0))[:, :, max(-skip, 0) :] for states in (keys, values)
            )
            valid = torch.arange(own.shape[2], dtype=torch.int64, device="cpu")[None] >= sinks
            codec = codec.refit(row, Sample(own, other, valid, self.moments))
        return codec

    def _exact_first(self, keys: torch.Tensor, values: torch.Tensor, number: torch.Tensor) -> States:
        """Returns the exact tokens, with those of `[B, H, T, D or E]` that are; `number` `[B, T]` is theirs."""
        count, held = self.packing.num_sink_tokens, self.sinks
        if held is None:
            room = *keys.shape[:2], count
            held = keys.new_zeros(*room, keys.shape[3]), values.new_zeros(*room, values.shape[3])
        place = torch.arange(count, dtype=torch.int64, device=keys.device) - number[:, :1].to(keys.device)
        return _exact_at((keys, values), place[:, None].expand(-1, keys.shape[1], -1), held)

    def append(self, encoded: Mapping[str, torch.Tensor]) -> None:
        super().append(encoded)
        assert self._encoded is not None
        (self.codec, self.sinks, self.moments), self._encoded = self._encoded, None
        self.is_fitted, self._tokens = True, None

    def scores(self, query: torch.Tensor, pool: TokenPool) -> torch.Tensor:
        if pool.is_in_order:
            return score_rows(query, self._stored(pool))
        keys, scores = self.rows["keys"][:, :, : self.length], []
        slots = torch.arange(self.length, dtype=torch.int64, device=query.device)
        for rows, each in zip(keys.split(TILE_TOKENS, dim=2), slots.split(TILE_TOKENS), strict=True):
            states = self.codec.decode_keys_at(rows, self._numbers(pool, each.expand(*rows.shape[:3])))
            scores.append(query @ states.transpose(2, 3))
        return torch.cat(scores, dim=3)

    def _numbers(self, pool: TokenPool, slots: torch.Tensor) -> torch.Tensor:
        """Returns the numbers in their sequences of the tokens in slots `[B, H, K]`."""
        return pool.positions_of(slots) - self.padding.first_tokens(len(slots), slots.device)[:, None]

    def dense(self, rows: torch.Tensor, slots: torch.Tensor, pool: TokenPool) -> States:
        numbers = self._numbers(pool, slots)
        own = self.rows["keys"].gather(2, slots[..., None].expand(-1, -1, -1, self.rows["keys"].shape[3]))
        keys, values = self.codec.decode_keys_at(own, numbers), self.codec.decode_values(rows)
        assert self.sinks is not None
        dtype = self.sinks[0].dtype
        return _exact_at(self.sinks, numbers, (keys.to(dtype), values.to(dtype)))

    def attend(
        self, call: AttentionCall, selection: Selection, pool: TokenPool, newest: States, start: int
    ) -> torch.Tensor | None:
        if not pool.is_in_order:
            return None
        assert call.scale is not None
        mask, chosen = None if call.mask is None else call.mask[:, 0, 0], (selection.slots, selection.count)
        return attend_chosen(call.query, self._stored(pool), *chosen, *newest, call.scale, mask, start)

    def prepare(self, query: torch.Tensor, scale: float, pool: TokenPool, window: States) -> ChoosingCall | None:
        return choose_by_rows(query, scale, self._stored(pool), window) if pool.is_in_order else None

    def _stored(self, pool: TokenPool) -> SelectableRows:
        """Returns all tokens, in the same object until they are others, somewhere else, or behind other padding."""
        assert self.sinks is not None
        padding, tokens = self.padding.counts, self._tokens
        is_as_told = tokens is not None and tokens.length == self.length and tokens.pages is pool.pages
        if tokens is None or not is_as_told or tokens.sinks.first is not padding:
            sinks, positions, keys = SinkStates(padding, *self.sinks), Positions(0, padding), self.rows["keys"]
            formats = self.codec.formats(keys.device)
            self._tokens = tokens = SelectableRows(keys, self.length, pool.pages, formats, positions, sinks)
        return tokens

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().map(function)
        self._tokens = None
        if self.moments is not None:
            self.moments = self.moments.map(function)
        if self.sinks is not None:
            self.codec, self.sinks = self.codec.map(function), (function(self.sinks[0]), function(self.sinks[1]))

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().named_tensors()
        if self.sinks is not None:
            yield from (("scales", tensor) for tensor in self.codec.tensors())
            yield from (("residual", tensor) for tensor in self.sinks)
        if self.moments is not None:
            yield from (("scales", tensor) for tensor in (self.moments.squares, self.moments.products))

    def __getstate__(self) -> dict[str, object]:
        # A copy's pages may be elsewhere
        return {**self.__dict__, "_tokens": None}


def _exact_at(exact: States, places: torch.Tensor, others: States) -> States:
    """Returns tokens of `exact` `[B, H, T, D or E]` at places `[B, H, K]`, and the `others` where there is none."""
    count = exact[0].shape[2]
    if count == 0 or places.shape[2] == 0:
        return others
    is_one, places = ((places >= 0) & (places < count))[..., None], places.clamp(0, count - 1)[..., None]
    keys, values = (
        torch.where(is_one, states.gather(2, places.expand(-1, -1, -1, states.shape[3])), other)
        for states, other in zip(exact, others, strict=True)
    )
    return keys, values
