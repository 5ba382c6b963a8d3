"""Layers that pack every token as a row of bytes.

    [ prefix ] [ rows of prompts and older tokens ] [ recent rows, with more bits ] [ tail: exact, newest ]

Rows of a prompt and of older decoded tokens have the codec's bits. Newly packed decoded tokens have more bits, as they
are read most; once there are more than `recent_length` of them, the oldest are requantized.

The codec is fitted to a prompt, which may be short: a first turn, or a chunk of a longer one. Once the sequence is
four times as long as it was then, the codec is fitted again, to all tokens, for those that follow. Older rows keep the
codec that they have, as coding them again would add its error to theirs; recent rows are coded again. The schedule
depends on nothing but lengths.

Where the model's layer attends to a window, positions stay those of the sequence; states, masks and tiles begin at the
first token that the newest queries see, as in Transformers' own sliding layer. Tokens that no later query sees are
evicted before the next update, some rows at a time, so that the newest update can always be taken back unless it was
longer than the window; with `activate_past_recording` nothing is evicted before a `crop`.

Legend: B batch, H key/value heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch

from kvcache_plugins.codecs.codec import Codec, QueryMoments, Sample
from kvcache_plugins.files.schema import MAX_INTEGER
from kvcache_plugins.formats.parts import OpaqueRowPart, RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.c_structs import TILE
from kvcache_plugins.kernels.engine import MAX_NUM_QUERIES
from kvcache_plugins.kernels.ops import to_dtype

from .compressed_layer import CompressedLayer
from .exact_tokens import ExactPrefix
from .finite_check import check_finite
from .layer_state import LayerState, restore_row_segments
from .policies import RowPolicy
from .segments import RowSegment
from .step_plan import CompiledPlan, StepPlan


# Rows that a window evicts together: few enough to cost little memory, and enough that moving the others is cheap
DROP_STEP = 64
# Newest queries of a prompt that are recorded
_NUM_QUERIES = 256
# Growth of a sequence after which its codec is fitted again. With 2 KL is a few percent lower, but tables take twice
# the bytes
_FIT_GROWTH = 4
# Newest tokens that it is fitted to then, at most
_MOST_FITTED = 2048


class Split(NamedTuple):
    """
    Division of a first prompt: first tokens of every sequence that stay exact `[B]`, on the CPU; position of the first
    packed token; and sequences `[B]` that are too short for a table, and stay exact whole.
    """

    num_exact: torch.Tensor
    first: int
    unfitted: torch.Tensor


class RowLayer(CompressedLayer[RowSegment, Codec]):
    """
    A layer of rows.

    Args:
        policy (`RowPolicy`): when tokens are packed.
        layer_idx, attention_mask: as in `LazyLayer`.
        sliding_window (`int`, *optional*): tokens that a query sees, itself among them; all by default.

    Attributes:
        record_past (`bool`): True if nothing is evicted before a `crop`. An emptied layer does not record.
    """

    policy: RowPolicy
    max_compiled_queries = MAX_NUM_QUERIES

    def __init__(
        self,
        policy: RowPolicy,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        sliding_window: int | None = None,
    ) -> None:
        self.sliding_window = sliding_window
        super().__init__(policy, layer_idx, attention_mask)

    @property
    def is_sliding(self) -> bool:  # type: ignore[override]
        """True if queries see a window."""
        return self.sliding_window is not None

    @property
    def _max_capacity(self) -> int | None:
        """Largest capacity that is reserved ahead for a segment of a windowed layer."""
        return None if self.sliding_window is None else self.sliding_window - 1 + DROP_STEP

    def _clear(self) -> None:
        super()._clear()
        self.record_past = False
        self._moments: QueryMoments | None = None
        # Queries of single tokens that the moments do not count yet
        self._newest_queries: list[torch.Tensor] = []
        # True for sequences that had too few tokens for a table when others got theirs, `[B]`
        self._unfitted_sequences: torch.Tensor | None = None

    def _before_update(self) -> None:
        super()._before_update()
        if not self.record_past:
            self._evict_out_of_window()

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        super()._store_prompt(keys, values, is_first=is_first)
        if not is_first and not self.record_past:
            self._evict_out_of_window()

    def _commit(self, keys: torch.Tensor, values: torch.Tensor, *, is_prompt: bool) -> None:
        exact_start = self._length - keys.shape[2]
        # Position from which on tokens may be packed
        start = exact_start
        is_first = self.codec is None
        first_end = None
        fitted = None
        num_kept = 0
        if self.policy.keeps_whole_tail or not (is_prompt or is_first):
            num_kept = min(self.policy.num_kept, keys.shape[2])
        num_old = keys.shape[2] - num_kept
        if is_first:
            split = self._split(num_old)
            if split is None:
                self._set_tail(keys, values, keys.shape[2])
                return
            first_end = self._fit(keys[:, :, :num_old], values[:, :, :num_old], split)
            start = split.first
        elif self._unfitted_sequences is not None:
            self._fit_late_sequences(keys[:, :, :num_old], values[:, :, :num_old], start)
        elif self._length >= self._next_fit:
            fitted = self._fit_again(keys, values, start)
        # Tokens that no later query sees are not packed, and no padding that all sequences have
        has_passed = self.sliding_window is not None and not self.record_past
        first_seen = max(start, self._first_seen(self._length)) if has_passed else start
        first = first_seen
        if self.padding is not None:
            first = min(max(first, self._left_padding.ends()[0]), self._length)
        count = max(self._length - num_kept - first, 0)
        if count:
            tokens = slice(first - exact_start, num_old)
            self._pack(keys[:, :, tokens], values[:, :, tokens], first, first_end, fitted, is_prompt=is_prompt)
        if first_seen > start:
            self._mark_evicted(first_seen)
        self._set_tail(keys, values, self._length - first - count)

    def _split(self, length: int) -> Split | None:
        """Divide a first prompt, or return `None` if all sequences are too short to fit the codec."""
        padding = self._left_padding.on_host(self.batch_size)
        num_real = length - padding
        # Where tokens are packed as they come, no sequence waits for more
        has_enough = num_real >= (self.policy.least_tokens if self.policy.residual_length else 0)
        if not bool(has_enough.any()):
            return None
        # Padding may be longer than the sequence so far
        num_exact = torch.where(has_enough, self.policy.num_sink_tokens, num_real.clamp(min=0))
        return Split(num_exact, int((padding + num_exact)[has_enough].min()), ~has_enough)

    def _fit(self, keys: torch.Tensor, values: torch.Tensor, split: Split) -> torch.Tensor:
        """Fit the codec to a first prompt, and make the prefix; return the positions `[B]` where that ends."""
        num_exact = keys.shape[2]
        if self._newest_queries:
            self._add_newest_queries()
        valid = self._left_padding.valid_tokens(0, num_exact, self.device)
        check_finite(keys, values, valid, self.layer_idx, self.policy.largest)
        padding = self._left_padding.on_host(self.batch_size)
        end = padding + split.num_exact
        positions = torch.arange(split.first, num_exact, dtype=torch.int64, device="cpu")
        valid = (positions >= end[:, None]) & ~split.unfitted[:, None]
        packed = keys[:, :, split.first :], values[:, :, split.first :]
        sample = Sample(*packed, valid, self._moments, Positions(split.first, self.padding))
        self.codec = self._unfitted.fit(sample)
        if self.policy.residual_length:
            prefix = ExactPrefix.of(keys, values, padding, split.num_exact)
            self.storage.set_prefix(prefix, int(end.max()))
        self._set_unfitted(split.unfitted)
        return end

    def _set_unfitted(self, unfitted: torch.Tensor) -> None:
        self._unfitted_sequences = unfitted.to(self.device) if bool(unfitted.any()) else None
        if self._unfitted_sequences is None:
            self._moments = None

    def _fit_late_sequences(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Fit tables of sequences that have enough tokens now; the prefix holds all tokens of the others."""
        prefix = self.storage.prefix
        assert prefix is not None and self._unfitted_sequences is not None and self.codec is not None
        self.invalidate_plan()
        self._add_newest_queries()
        valid = self._left_padding.valid_tokens(start, keys.shape[2], self.device)
        check_finite(keys, values, valid, self.layer_idx, self.policy.largest)
        split, padding = self._split(start + keys.shape[2]), self._left_padding.on_host(self.batch_size)
        unfitted = self._unfitted_sequences.cpu()
        held = prefix.joined(keys, values, start, padding, unfitted)
        fitted = torch.zeros_like(unfitted) if split is None else unfitted & ~split.unfitted
        sinks = self.policy.num_sink_tokens
        for number in fitted.nonzero().flatten().tolist():
            tokens = slice(int(held.count[number]))
            own = held.keys[number, None, :, tokens], held.values[number, None, :, tokens]
            valid = (torch.arange(own[0].shape[2], dtype=torch.int64, device="cpu") >= sinks)[None]
            self.codec = self.codec.refit(number, Sample(*own, valid, self._moments))
        kept = prefix.count.cpu().clamp(min=sinks)
        limits = torch.where(fitted, kept, start + keys.shape[2])
        shortened = held.shortened(limits)
        self.storage.set_prefix(shortened, int(shortened.end.max()))
        self._set_unfitted(unfitted & ~fitted)

    # Later fits

    @property
    def _next_fit(self) -> int:
        """Length of the sequence at which the codec is fitted again."""
        codec = self.codec
        if codec is None or not codec.fitted_length or self._unfitted_sequences is not None:
            return MAX_INTEGER
        # Padding that all sequences have is no growth
        return self._left_padding.ends()[0] + _FIT_GROWTH * codec.fitted_length

    def _fit_again(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> Codec:
        """Return a codec that is fitted to the newest packed tokens and to exact ones behind them, from `start` on."""
        valid = self._left_padding.valid_tokens(start, keys.shape[2], self.device)
        check_finite(keys, values, valid, self.layer_idx, self.policy.largest)
        if self._newest_queries:
            self._add_newest_queries()
        first = self._length - _MOST_FITTED
        newest = [each for each in self.storage.segments if each.length and each.stop > first]
        held = [self._decode(each, max(first - each.start, 0)) for each in newest]
        keys = torch.cat([*(each[0] for each in held), keys], dim=2)
        values = torch.cat([*(each[1] for each in held), values], dim=2)
        start = self._length - keys.shape[2]
        valid = self._mark_packable(start, keys, None)
        if valid is None:
            valid = torch.ones(self.batch_size, keys.shape[2], dtype=torch.bool, device="cpu")
        return self._unfitted.fit(Sample(keys, values, valid, self._moments, Positions(start, self.padding)))

    def _decode(self, segment: RowSegment, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the tokens of a segment but the `first` ones."""
        codec, rows = segment.codec or self._codec_of(segment.is_recent), slice(first, segment.length)
        keys = codec.decode_keys(segment.keys[:, :, rows], Positions(segment.start + first, self.padding))
        return to_dtype(keys, self.dtype), to_dtype(codec.decode_values(segment.values[:, :, rows]), self.dtype)

    def _replace_codec(self, fitted: Codec) -> None:
        """Use a codec from now on: recent rows are coded again, older ones keep the codec that they have."""
        self.invalidate_plan()
        assert self.codec is not None
        # Without its finer formats, which no rows have any more
        replaced = self.codec.map(lambda tensor: tensor)
        finer = self._finer(fitted)
        for segment in self.storage.segments:
            if not segment.length:
                # Capacity for rows of any codec
                continue
            if segment.is_recent:
                assert finer is not None
                where = Positions(segment.start, self.padding)
                segment.keys, segment.values = finer.encode(*self._decode(segment, 0), where)
                segment.is_open = True
            elif segment.codec is None:
                segment.codec = replaced
                segment.is_open = False
        self.codec = fitted
        self._moments = None

    def _pack(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        first_end: torch.Tensor | None,
        fitted: Codec | None,
        *,
        is_prompt: bool,
    ) -> None:
        """
        Encode tokens from position `start` on.

        Args:
            first_end (`torch.Tensor` of shape `[B]`, *optional*): end of the prefix of a first prompt, on the CPU.
            fitted (`Codec`, *optional*): codec that was fitted again, and takes the place of the layer's.
        """
        assert self.codec is not None
        is_first = first_end is not None
        valid = self._mark_packable(start, keys, first_end)
        is_recent = not is_prompt and not is_first and self._recent_codec is not None
        where = Positions(start, self.padding)
        codec = self._finer(fitted or self.codec) if is_recent else fitted or self.codec
        assert codec is not None
        try:
            rows = codec.encode(keys, values, where)
        except ValueError as error:
            # The codec notices, and this says, what is not finite
            check_finite(keys, values, valid, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        overflow = codec.overflow(*rows)
        if overflow is not None:
            # Padding may be anything, and tokens of the prefix are exact as well
            overflow = (overflow if valid is None else overflow & valid).any()
        # Tokens that the codec is fitted to have been checked
        new = slice(0) if is_first or fitted is not None else slice(None)
        check_finite(keys[:, :, new], values[:, :, new], valid, self.layer_idx, self.policy.largest, overflow)
        sample = Sample(keys, values, valid, None, where)
        if is_first:
            self.codec = self.codec.with_bias_correction(rows, sample)
        elif fitted is not None:
            # A few decoded tokens have a large part of their errors in common, whatever follows
            self._replace_codec(fitted if is_recent else fitted.with_bias_correction(rows, sample))
        if not is_recent and not is_first:
            self._requantize_recent()
        segment = RowSegment(*rows, start, keys.shape[2], is_recent=is_recent)
        self.storage.add(segment, self.policy.recent_length if is_recent else self._max_capacity)
        newest = self.storage.newest
        if is_recent and newest is not None:
            self._requantize_recent(self._num_to_requantize(newest.length))
        self._counters["tokens_compressed"] += keys.shape[2]
        self._counters["chunks_compressed"] += 1

    def _num_to_requantize(self, length: int) -> int:
        """Number of `length` recent tokens that get the bits of the older ones."""
        return length - self.policy.num_recent_kept if length > self.policy.recent_length else 0

    def _requantize_recent(self, count: int | None = None) -> None:
        """Requantize the first `count` recent tokens, by default all, to the bits of the older ones."""
        recent = self.storage.newest
        if recent is None or not recent.is_recent or count == 0:
            return
        assert self.codec is not None
        if not recent.length:
            self.storage.segments.pop()
            return
        count = recent.length if count is None else count
        rows = recent.keys[:, :, :count], recent.values[:, :, :count]
        older = RowSegment(*self.codec.requantize(rows, self.policy.recent_nbits), recent.start, count)
        self.storage.segments.pop()
        self.storage.add(older, self._max_capacity)
        if count < recent.length:
            recent.drop_first(count)
            self.storage.segments.append(recent)

    def _codec_of(self, is_recent: bool) -> Codec:
        """Return the codec of recent rows, or of all others."""
        codec = self._recent_codec if is_recent else self.codec
        assert codec is not None
        return codec

    @property
    def _recent_codec(self) -> Codec | None:
        """Codec of recent rows; `None` if they have no more bits than others."""
        return None if self.codec is None else self._finer(self.codec)

    def _finer(self, codec: Codec) -> Codec | None:
        """Return the codec of recent rows beside that of others; `None` if there are no recent rows."""
        return codec.with_more_bits(self.policy.recent_nbits) if self.policy.recent_length else None

    def _part(self, segment: RowSegment, mask: torch.Tensor | None) -> RowPart | OpaqueRowPart:
        positions = Positions(segment.start, self.padding)
        codec = segment.codec or self._codec_of(segment.is_recent)
        return codec.part(segment.keys, segment.values, positions, segment.length, mask)

    # Packing in place, by the plan of a step

    def _pack_by_plan(self, plan: StepPlan) -> bool:
        storage, policy = self.storage, self.policy
        tail, newest = storage.tail, storage.newest
        if self._records_queries or not isinstance(plan, CompiledPlan) or policy.keeps_whole_tail or tail is None:
            return False
        # A plan has no parts of empty segments
        if newest is None or not newest.is_open or not newest.length:
            return False
        start, count = self._length - tail.length, tail.length - policy.num_kept
        if newest.is_recent != (self._recent_codec is not None) or newest.stop != start or start < storage.prefix_stop:
            return False
        num_requantized = self._num_to_requantize(newest.length + count) if newest.is_recent else 0
        # Oldest recent rows join the segment before, if it takes rows; rows of the tail stay recent
        older = storage.segments[-2] if num_requantized and len(storage.segments) > 1 else None
        if num_requantized and (older is None or not older.is_open or not older.length):
            return False
        if num_requantized > newest.length:
            return False
        # The kernel takes no mask, and at most a tile
        if max(count, num_requantized) > TILE or self._left_padding.ends()[1] > start:
            return False
        growth = newest.plan_growth(count, policy.recent_length or self._max_capacity, num_requantized)
        older_growth = None if older is None else older.plan_growth(num_requantized, self._max_capacity)
        own_formats = self._codec_of(newest.is_recent).formats(self.device)
        older_formats = self._codec_of(False).formats(self.device)
        if own_formats is None or older_formats is None:
            return False
        formats = own_formats, older_formats
        rows = plan.encode(tail, formats, policy.num_kept, start, (growth, older_growth), self.padding, policy.largest)
        if rows is None:
            return False
        newest.adopt(rows[:2], growth, count)
        self._counters["tokens_compressed"] += count
        self._counters["chunks_compressed"] += 1
        changed = [newest]
        if older is not None and older_growth is not None:
            older.adopt(rows[2:], older_growth, num_requantized)
            changed = [older, newest]
        storage.version += 1
        return plan.replace_rows([self._part(segment, None) for segment in changed], storage.version)

    # Windows

    def activate_past_recording(self) -> None:
        """Evict nothing from now on until a `crop`, which can then take back all updates since the last one."""
        self.record_past = True

    def _evict_out_of_window(self) -> None:
        """Drop tokens that no later query sees, some rows at a time."""
        storage = self.storage
        first = self._first_seen(self._length)
        if first <= storage.first_held:
            return
        seen = [segment for segment in storage.segments if segment.stop > first]
        oldest = seen[0] if seen else None
        num_dropped = 0 if oldest is None else max(first - oldest.start, 0) // DROP_STEP * DROP_STEP
        if oldest is not None and num_dropped:
            oldest.drop_first(num_dropped)
        if num_dropped or len(seen) < len(storage.segments):
            storage.segments = seen
            storage.version += 1
            self._mark_evicted(self.exact_start if oldest is None else oldest.start)

    def _mark_evicted(self, position: int) -> None:
        # Sequences without a table have all their tokens in the prefix
        self.storage.mark_evicted(position, keeps_prefix=self._unfitted_sequences is not None)

    def can_crop(self, count: int) -> bool:
        length = self._length - count
        return length <= 0 or self._is_uncommitted(count) or self._first_seen(length) >= self.storage.first_held

    def crop(self, tokens_to_remove: int) -> None:
        """See `LazyLayer.crop`; a layer that records the past evicts what it need not hold any more."""
        super().crop(tokens_to_remove)
        if self.record_past and self.is_initialized:
            self.commit_prompt()
            # The next update's queries are the first to see the window; queries of before saw more
            self._num_new = 0
            self._evict_out_of_window()

    def _drop_newest(self, count: int) -> None:
        super()._drop_newest(count)
        newest = self.storage.newest
        if newest is None or newest.codec is None:
            return
        # All rows of the layer's codec were dropped
        self.codec = newest.codec
        for segment in self.storage.segments:
            if segment.codec is self.codec:
                segment.codec = None

    def crop_tokens(self, count: int) -> None:
        if self.sliding_window is not None and not self._is_uncommitted(count):
            self.commit_prompt()
        if not self.can_crop(count):
            raise ValueError(
                f"`crop` of {count} tokens would go back to {self._length - count}, but a window of "
                f"{self.sliding_window} tokens has evicted tokens that were seen there: call "
                "`activate_past_recording()` of the cache before the tokens that are to be taken back"
            )
        super().crop_tokens(count)
        if self._length and not (self._uses_queries or self._records_queries):
            # Queries of dropped tokens alone
            self._moments, self._newest_queries = None, []

    # Queries that the codec is fitted to

    @property
    def _uses_queries(self) -> bool:
        """True if a codec is still to be fitted to queries for the first time."""
        return bool(self._unfitted.layouts) and (self.codec is None or self._unfitted_sequences is not None)

    @property
    def _records_queries(self) -> bool:
        if self._uses_queries:
            return self._length > self._dense.first_recorded
        # An update by many tokens has enough queries of its own
        num_before = self.policy.num_recorded_queries if self._uncommitted_prompt is None else 0
        return self._length >= self._next_fit - num_before

    @property
    def _num_recorded_queries(self) -> int:
        return self.policy.num_recorded_queries if self._uses_queries else 0

    def on_exact_attention(self, call: AttentionCall) -> None:
        """See `LazyLayer.on_exact_attention`. Queries of a prompt that is refused are not kept."""
        moments = self._moments
        newest_queries = self._newest_queries
        try:
            super().on_exact_attention(call)
        except BaseException:
            self._moments = moments
            self._newest_queries = newest_queries
            raise

    def _record_queries(self, query: torch.Tensor) -> None:
        if query.shape[2] > 1 or self._uncommitted_prompt is not None or self.padding is not None:
            query = query[:, :, -_NUM_QUERIES:]
            count = query.shape[2]
            valid = self._left_padding.valid_tokens(self._length - count, count, self.device)
            self._moments = self._with_moments(query, valid)
            return
        # A new list, as a copy of the layer may hold the same; single queries are added up several at a time
        self._newest_queries = [*self._newest_queries, query]
        if len(self._newest_queries) == self.policy.residual_length:
            self._add_newest_queries()

    def _add_newest_queries(self) -> None:
        self._moments, self._newest_queries = self._all_moments(), []

    def _all_moments(self) -> QueryMoments | None:
        """Return the moments with those of the newest queries."""
        if not self._newest_queries:
            return self._moments
        return self._with_moments(torch.cat(self._newest_queries, dim=2), None)

    def _with_moments(self, query: torch.Tensor, valid: torch.Tensor | None) -> QueryMoments:
        moments = QueryMoments.of(query, self._shapes["keys"][1], self._unfitted.layouts, valid)
        return moments if self._moments is None else self._moments.plus(moments)

    # Everything stored

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._map_stored(function)
        for codec, segments in self._replaced_codecs():
            mapped = codec.map(function)
            for segment in segments:
                segment.codec = mapped
        self._add_newest_queries()
        if self._moments is not None:
            self._moments = self._moments.map(function)
        if self._unfitted_sequences is not None:
            self._unfitted_sequences = function(self._unfitted_sequences)

    def _replaced_codecs(self) -> Iterator[tuple[Codec, list[RowSegment]]]:
        """List codecs that the layer's has taken the place of, with the segments that keep them."""
        for codec, segments in groupby(self.storage.segments, key=lambda segment: segment.codec):
            if codec is not None:
                yield codec, list(segments)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super()._stored_tensors()
        for codec, _ in self._replaced_codecs():
            yield from (("scales", tensor) for tensor in codec.tensors())
        if self._moments is not None:
            yield from (("scales", tensor) for tensor in (self._moments.squares, self._moments.products))
        yield from (("scales", query) for query in self._newest_queries)
        if self._unfitted_sequences is not None:
            yield "index", self._unfitted_sequences

    def share(self) -> Iterator[torch.Tensor]:
        yield from super().share()
        for codec, _ in self._replaced_codecs():
            yield from codec.tensors()

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.policy.shared_codec is not None:
            yield from (("calibration", tensor) for tensor in self.policy.shared_codec.shared_tensors())

    @property
    def _shares_codec(self) -> bool:
        return self._unfitted_sequences is None

    @property
    def _num_exact_in_front(self) -> int:
        if self.storage.prefix is None or self.sliding_window is not None:
            return super()._num_exact_in_front
        return min(self.policy.num_sink_tokens, self._length)

    def state(self) -> LayerState:
        state = super().state()
        unfitted = self._unfitted_sequences
        held = [segment for segment in self.storage.segments if segment.length]
        tables = [None if each.codec is None else each.codec.state() for each in held]
        return replace(
            state,
            blocks=[replace(block, tables=own) for block, own in zip(state.blocks, tables, strict=True)],
            tables=None if self.codec is None else self.codec.state(),
            moments=self._all_moments() if self._uses_queries or self._records_queries else None,
            pending=None if unfitted is None else unfitted.to(torch.uint8),
        )

    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        self._moments = state.moments
        self._unfitted_sequences = None if state.pending is None else state.pending.bool()
        super().restore(state, device, path)
        if self._moments is not None and not (self._uses_queries or self._records_queries):
            raise ValueError(f"`{path}.moments` are of queries that no codec will be fitted to")

    def _restore_packed(self, state: LayerState, path: str) -> tuple[Codec | None, list[RowSegment]]:
        return restore_row_segments(state, self.policy, self.sliding_window, path)
