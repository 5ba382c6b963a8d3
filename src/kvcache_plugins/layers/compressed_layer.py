"""One layer of packed tokens: when a token is packed, and attention over all of them.

    [ prefix: exact, first tokens of each sequence ] [ blocks: packed ] [ recent: finer ] [ buffer: exact, newest ]

The life of a token: `update` hands it out exact; a prompt is packed right after attention has seen it, layer by layer,
so that never more than one layer's prompt is dense at a time, and with it the codec is fitted that packs all that
follows. A decoded token waits in the buffer, of which all, or of rows the older part, is packed at the *beginning* of
an update: a rollback (`crop`) of the newest update, as in assisted decoding, finds its tokens exact.

Where the model's layer attends to a window, positions stay those of the sequence; states, masks and tiles begin at the
first token that the newest queries see, as in Transformers' own sliding layer. What no query to come sees is let go of
before the next update, some rows at a time, so that the newest one can always be taken back, unless it was longer than
the window; with `activate_past_recording` nothing is let go of before a `crop`.

Legend: B batch, H key/value heads, G query heads a key/value head, Q queries, T tokens, D head dim.
"""

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from kvcache_plugins.codecs.codec import Codec, Positions, QueryMoments, Sample
from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import attend, prepare_coding, prepare_tokens
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.masks import combine_masks, hide_first, mask_columns, slice_mask

from .contexts import in_own_context
from .layer_state import BlockState, ExactStates, LayerState, restore_blocks
from .lazy_layer import LazyLayer
from .lazy_states import stored_states
from .packing import (
    DROP_STEP,
    Block,
    ExactPrefix,
    GroupPacking,
    PackedTokens,
    Packing,
    PreparedParts,
    RowBlock,
    RowPacking,
    Split,
    check_finite,
)
from .residual_buffer import ResidualBuffer


# An update of this many times `residual_length` tokens is a prompt of its own
_PROMPT_FACTOR = 4
# Columns that a mask which is kept is a multiple of: one column alone would stand for all
_MASK_STEP = 8
# Newest queries of a prompt that say what errors of keys do
_NUM_QUERIES = 256


class CompressedLayer(LazyLayer):
    """
    Keys and values of one layer: exact first tokens, packed tokens, and an exact tail.

    While nothing is packed and tokens come one by one, it is what a dense layer is: two tensors of all tokens
    (`_plain`), of which the buffer is made when it is asked for.

    Args:
        packing (`Packing`): How its tokens are packed.
        layer_idx, attention_mask: As in `LazyLayer`.
        sliding_window (`int`, *optional*): Tokens that a query sees, itself among them; all by default.

    Attributes:
        codec: how packed tokens are read; `None` before the first are packed.
        record_past (`bool`): whether nothing is let go of before a `crop`. An emptied layer does not, so that it is
            like a new one.
        on_first_prompt (`Callable`, *optional*): called with the layer and queries before its first prompt is packed.
    """

    counter_names = (
        "tokens_compressed",
        "chunks_compressed",
        "attend_calls",
        "fused_calls",
        "kernel_fallbacks",
        "prompts_without_mask",
    )
    on_first_prompt: Callable[["CompressedLayer", torch.Tensor], None] | None = None
    # Of plain tokens: with how many there is something to be packed, and after how many queries are shown
    _plain_limit = _first_heard = 0

    def __init__(
        self,
        packing: Packing,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        sliding_window: int | None = None,
    ):
        assert sliding_window is None or not isinstance(packing, GroupPacking)
        self.packing = packing
        self.sliding_window, self.is_sliding = sliding_window, sliding_window is not None
        # Tokens beyond which a block has no room before it needs it
        self._most_rows = None if sliding_window is None else sliding_window - 1 + DROP_STEP
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.record_past = False
        # Position before which everything has been let go of
        self._held_start = 0
        self.prefix: ExactPrefix | None = None
        # Position before which blocks may be of tokens that the prefix holds
        self._prefix_stop = 0
        self.packed = PackedTokens()
        self.buffer = None
        self._prepared: PreparedParts | None = None
        self.codec: Any = None
        self._moments: QueryMoments | None = None
        # Queries of single tokens that these do not count yet
        self._newest_queries: list[torch.Tensor] = []
        # Sequences that have no table yet, as they had too few tokens when others got theirs, `[B]`
        self._pending_sequences: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        codec = self.packing.codec(key_states.shape[3], value_states.shape[3])
        try:
            codec.check_shapes(key_states, value_states)
        except ValueError as error:
            raise ValueError(f"layer {self.layer_idx}: {error}") from None
        self._unfitted = codec
        super().lazy_initialization(key_states, value_states)

    @property
    def blocks(self) -> list[Any]:
        """Blocks of packed tokens, the oldest first."""
        return self.packed.blocks

    @property
    def buffer(self) -> ResidualBuffer | None:
        """The newest tokens, exact."""
        if self._plain is not None:
            self._end_plain(*self._plain)
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: ResidualBuffer | None) -> None:
        self._buffer: ResidualBuffer | None = buffer
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = None

    @in_own_context
    def _end_plain(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        first = 0 if self.prefix is None else self.prefix.num_slots
        self.buffer = ResidualBuffer.of(keys[:, :, first:], values[:, :, first:], self._buffer_limit)

    @property
    def _buffer_limit(self) -> int:
        """Tokens in the buffer with which the next update packs it."""
        # No codec is fitted to the first tokens, all in the buffer, until there are enough of them
        limit = self.packing.residual_length
        return limit if self.codec is not None else max(limit, self.packing.least_tokens)

    def _exact_tail(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Keys, values and their tokens in use, of what stands behind the packed ones."""
        if self.buffer is not None and self.buffer.length:
            yield *self.buffer.tensors(), self.buffer.length
        if self._pending is not None:
            yield *self._pending, self._pending[0].shape[2]

    @property
    def exact_start(self) -> int:
        """Position of the first token behind the packed ones."""
        return self._length - sum(length for *_, length in self._exact_tail())

    def _is_prompt(self, count: int) -> bool:
        return 0 < _PROMPT_FACTOR * self.packing.residual_length <= count

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LazyLayer.update`: a token like the last one is stored here, if nothing more is to be done."""
        if torch.compiler.is_dynamo_compiling() or torch.is_grad_enabled():
            return super().update(key_states, value_states)
        kind = key_states.shape, value_states.shape, key_states.dtype, value_states.dtype, key_states.device
        if kind != self._token_kind:
            return super().update(key_states, value_states)
        plain, prepared, buffer = self._plain, self._prepared, self._buffer
        if plain is not None and self._length < self._plain_limit:
            # As a dense layer does
            states = torch.cat((plain[0], key_states), dim=-2), torch.cat((plain[1], value_states), dim=-2)
            self._plain, self._length = states, self._length + 1
            return states if self._length <= self._first_heard else self._lazy(*states)
        if prepared is None or buffer is None or (buffer.length >= prepared.limit and not self._code_again()):
            return super().update(key_states, value_states)
        newest = None
        if prepared.call is not None and buffer.left is None and buffer.length < buffer.capacity:
            newest = prepared.call.accept(key_states, value_states)
        if newest is not None:
            # The call writes it
            buffer.left, buffer.length = newest, buffer.length + 1
        elif torch.is_inference_mode_enabled():
            return super().update(key_states, value_states)
        else:
            buffer.append(key_states, value_states)
        self._length += 1
        return stored_states(self, kind[0], kind[1], self._length, self.dtype, self.device)

    def _before_update(self) -> None:
        if self._num_new > 1:
            self._prepared = None
        buffer = self.buffer
        if buffer is not None and buffer.length >= self._buffer_limit:
            self._commit(buffer.keys, buffer.values, is_prompt=False)
        if not self.record_past:
            self._let_go()

    def _code_again(self) -> bool:
        """Codes what has waited for long enough right behind the newest rows, if that is all that is to be done."""
        prepared, buffer, packing = self._prepared, self.buffer, self.packing
        if prepared is None or prepared.call is None or self._stands_still or buffer is None:
            return False
        start, count = self._length - buffer.length, buffer.length - packing.num_kept
        found = self.packed.joined(start, count, packing.recent_length)
        if found is None or start < self._prefix_stop or self._valid_tokens(start, count) is not None:
            return False
        block, older, num_aged = found
        codec, coding, states = self._codec_of(block), prepared.coding, buffer.tensors()
        if coding is None or coding.codec is not codec or coding.padding is not self.padding:
            coding = prepare_coding(codec, self.codec, states[0], self.padding, packing.largest)
            prepared.coding = coding
        if coding is None:
            return False
        kept = block.kept_for(count, packing.recent_length or self._most_rows, num_aged)
        joined = None if older is None else older.kept_for(num_aged, self._most_rows)
        is_moved = buffer.capacity_without(count) == buffer.capacity
        rows = coding.append(states, count, start, kept, is_moved * packing.num_kept, joined)
        if rows is None:
            return False
        block.take(rows[:2], kept, count)
        if is_moved:
            buffer.length -= count
        else:
            in_own_context(buffer.drop_first)(count)
        self._counters["tokens_compressed"] += count
        self._counters["chunks_compressed"] += 1
        if older is not None and joined is not None:
            older.take(rows[2:], joined, num_aged)
        if prepared.extend([block] if older is None else [older, block]):
            return True
        self._prepared = None
        return False

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.packing.residual_length or self.codec is None:
            if self.buffer is None:
                self.buffer = ResidualBuffer(keys, values, self.packing.residual_length)
            self.buffer.append(keys, values)
            return
        # Packed as they come; they are not counted yet
        self._length += keys.shape[2]
        try:
            self._commit(keys, values, is_prompt=False)
        finally:
            self._length -= keys.shape[2]

    def _forget_places(self) -> None:
        """Forgets what was prepared for tokens where they stand, as they move or are dropped."""
        self._prepared = None

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        self._forget_places()
        if self.buffer is not None and self.buffer.length:
            keys = torch.cat([self.buffer.keys, keys], dim=2)
            values = torch.cat([self.buffer.values, values], dim=2)
        self._commit(keys, values, is_prompt=True)
        if not is_first and not self.record_past:
            self._let_go()

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        prefix, buffer = self.prefix, self.buffer
        if self.blocks or buffer is None:
            return None
        if self._first_visible:
            # The buffer may begin before the window does; a prefix is of a sequence that has no room in one
            skipped = self._first_visible - self.exact_start
            return None if skipped < 0 else (buffer.keys[:, :, skipped:], buffer.values[:, :, skipped:])
        states, num_in_front = (buffer.keys, buffer.values), 0
        if prefix is not None and prefix.num_slots:
            if not prefix.is_uniform:
                return None
            num_in_front = prefix.num_slots
            states = torch.cat((prefix.keys, states[0]), dim=2), torch.cat((prefix.values, states[1]), dim=2)
        self._plain_limit = num_in_front + self._buffer_limit
        if self.sliding_window is not None:
            self._plain_limit = min(self._plain_limit, self.sliding_window)
        self._first_heard = self._plain_limit - self.packing.num_heard * self._needs_queries
        if self._length < self._plain_limit:
            self._buffer, self._plain = None, states
        return states

    def _commit(self, keys: torch.Tensor, values: torch.Tensor, *, is_prompt: bool) -> None:
        """Packs exact tokens `[B, H, T, D]`, all those behind the packed ones; what cannot be packed stays exact."""
        packing, length, is_first, end = self.packing, self._length, self.codec is None, None
        num_exact = keys.shape[2]
        start = length - num_exact
        most = 0 if is_prompt or is_first else packing.num_kept
        num_kept = min(packing.residual_length if self._stands_still else most, num_exact)
        counts = self._left_padding.counts
        if is_first or self._pending_sequences is not None:
            padding = torch.zeros(self.batch_size, dtype=torch.long) if counts is None else counts.cpu()
            split = packing.split(padding, length - (0 if is_first else num_kept))
            if is_first and split is None:
                self._keep_newest(keys, values, num_exact)
                return
            if self._newest_queries:
                self._add_newest_queries()
            # Nothing is made of what is refused
            valid = None if counts is None else self._valid_tokens(start, num_exact)
            check_finite(keys, values, valid, self.layer_idx, packing.largest)
            if is_first:
                # The codec is fitted to all tokens so far
                assert split is not None
                start, end, pending = split.first, padding + split.num_exact, split.pending
                valid = (torch.arange(start, num_exact) >= end[:, None]) & ~pending[:, None]
                packed, positions = (keys[:, :, start:], values[:, :, start:]), Positions(start, counts)
                self.codec = self._unfitted.fit(Sample(*packed, valid, self._moments, positions))
                if packing.residual_length:
                    self.prefix = ExactPrefix.of(keys, values, padding, split.num_exact)
                    self._prefix_stop = int(end.max())
            else:
                self._prepared = None
                old = slice(num_exact - num_kept)
                pending = self._serve_pending(keys[:, :, old], values[:, :, old], start, padding, split)
            self._pending_sequences = pending.to(self.device) if bool(pending.any()) else None
            if self._pending_sequences is None:
                self._moments = None
        # What no query to come sees is not packed
        has_passed = self.sliding_window is not None and not self.record_past
        first = max(start, self._first_seen(length)) if has_passed else start
        count = max(length - first - num_kept, 0)
        if isinstance(packing, GroupPacking):
            count = packing.num_packed(count, is_prompt=is_prompt)
        skipped = num_exact - (length - first)
        if count:
            tokens = slice(skipped, skipped + count)
            try:
                self._pack(keys[:, :, tokens], values[:, :, tokens], first, end, is_prompt=is_prompt)
            except ValueError:
                if is_first:
                    self.codec = self.prefix = self._pending_sequences = None
                raise
        if first > start:
            self._forget_before(first)
        if skipped + count == num_exact:
            self._buffer = None
        else:
            self._keep_newest(keys, values, num_exact - skipped - count)

    def _serve_pending(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, padding: torch.Tensor, split: Split | None
    ) -> torch.Tensor:
        """Makes tables of sequences that have enough tokens now; returns the others, which the prefix holds whole."""
        assert self.prefix is not None and self._pending_sequences is not None
        pending, sinks = self._pending_sequences.cpu(), self.packing.num_sink_tokens
        held = self.prefix.joined(keys, values, start, padding, pending)
        served = torch.zeros_like(pending) if split is None else pending & ~split.pending
        for number in served.nonzero().flatten().tolist():
            tokens = slice(int(held.count[number]))
            own = held.keys[number, None, :, tokens], held.values[number, None, :, tokens]
            valid = (torch.arange(own[0].shape[2]) >= sinks)[None]
            self.codec = self.codec.refit(number, Sample(*own, valid, self._moments))
        kept = self.prefix.count.cpu().clamp(min=sinks)
        self.prefix = held.shortened(torch.where(served, kept, self._length))
        self._prefix_stop = int(self.prefix.end.max())
        return pending & ~served

    def _pack(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, first_end: torch.Tensor | None, *, is_prompt: bool
    ) -> None:
        """
        Adds tokens from position `start` on to a block. If they cannot be stored, what is stored stays as it was.
        Where none are packed yet, exact tokens in front end at `first_end` `[B]`, on the CPU.
        """
        packing, counts = self.packing, self._left_padding.counts
        is_grouped = isinstance(packing, GroupPacking)
        valid = None if counts is None else self._valid_tokens(start, keys.shape[2])
        if start < self._prefix_stop:
            assert self.prefix is not None
            # With its data even where states have none
            end = self.prefix.end if first_end is None or not keys.is_meta else first_end
            valid = torch.arange(start, start + keys.shape[2], device=end.device) >= end[:, None]
        recent = None if is_prompt or first_end is not None else packing.recent_codec(self.codec)
        codec, positions = self.codec if recent is None else recent, Positions(start, counts)
        try:
            if isinstance(packing, GroupPacking):
                block: Any = packing.encode(codec, (keys, values), start, valid, is_prompt=is_prompt)
            else:
                rows = codec.encode(keys, values, positions)
                block = RowBlock(rows[0], rows[1], start, keys.shape[2])
        except ValueError as error:
            # The codec notices, and here it is said, what is not finite
            check_finite(keys, values, valid, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        if not is_grouped:
            too_large = codec.too_large(block.keys, block.values)
            if too_large is not None:
                # What stands for padding, or is exact as well, may be anything
                too_large = (too_large if valid is None else too_large & valid).any()
            # Tokens that the codec is fitted to have been read
            new = slice(None) if first_end is None else slice(0)
            check_finite(keys[:, :, new], values[:, :, new], valid, self.layer_idx, packing.largest, too_large)
            if first_end is not None:
                self.codec = self.codec.without_shared_errors(rows, Sample(keys, values, valid, None, positions))
        self._counters["tokens_compressed"] += block.length
        self._counters["chunks_compressed"] += block.num_chunks if is_grouped else 1
        prepared, self._prepared = self._prepared, None
        if first_end is not None:
            self.packed.blocks.append(block)
            self.packed.is_open = not (is_prompt and is_grouped)
            return
        num_aged, num_blocks = 0, len(self.blocks)
        if recent is not None:
            joined = self.packed.add_recent(block, packing.recent_length)
            # Where there are too many, the older half is coded as all others
            if self.blocks[-1].length > packing.recent_length:
                num_aged = self.blocks[-1].length - packing.recent_length // 2
        else:
            if self.packed.has_recent:
                self._age(self.packed.newest.length)
            joined = self.packed.add(block, self._most_rows, is_joining=not (is_prompt and is_grouped))
        if num_aged:
            self._age(num_aged)
        is_same = joined is not None and joined is self.blocks[-1] and len(self.blocks) == num_blocks
        if is_same and prepared is not None and prepared.extend(self.blocks[-2:] if num_aged else self.blocks[-1:]):
            self._prepared = prepared

    def _age(self, count: int) -> None:
        """Codes the first `count` recent tokens anew, as all older ones are."""
        recent = self.packed.newest
        rows = recent.keys[:, :, :count], recent.values[:, :, :count]
        keys, values = self.codec.recode(rows, self._codec_of(recent))
        self.packed.age(RowBlock(keys, values, recent.start, count), self._most_rows)
        self._prepared = None

    def _codec_of(self, block: Block) -> Any:
        return self.packing.recent_codec(self.codec) if block.is_recent else self.codec

    def _keep_newest(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """Has the buffer hold the newest of all tokens behind the packed ones before."""
        # They are not plain any more
        buffer, first = self._buffer, keys.shape[2] - count
        if buffer is None or buffer.length != keys.shape[2]:
            limit = self.packing.residual_length
            self._buffer = ResidualBuffer.of(keys[:, :, first:], values[:, :, first:], limit)
        elif first:
            buffer.drop_first(first)

    @property
    def _needs_queries(self) -> bool:
        return bool(self._unfitted.layouts) and (self.codec is None or self._pending_sequences is not None)

    def _add_newest_queries(self) -> None:
        if self._newest_queries:
            queries, self._newest_queries = self._newest_queries, []
            self._add_moments(torch.cat(queries, dim=2), None)

    def _add_moments(self, query: torch.Tensor, valid: torch.Tensor | None) -> None:
        moments = QueryMoments.of(query, self._shapes["keys"][1], self._unfitted.layouts, valid)
        self._moments = moments if self._moments is None else self._moments.plus(moments)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if not self.packing.residual_length:
            # What attention is over is packed
            self._learn_padding(call.mask)
            self.settle_prompt()
        query, mask, heads = call.query, call.full_mask(self.lazy_length()), self._shapes["keys"][1]
        kernel, is_fallback = "torch", False
        if call.is_plain and self._unfitted.has_kernels:
            kernel, is_fallback = choose_kernel(query, self.packing.most_compiled, self._unfitted)
        output = self._attend_prepared(query, call.scale, kernel) if mask is None and kernel != "torch" else None
        if output is None:
            output = attend(query, self._parts(mask), heads, call.scale, kernel, call.softcap, call.sinks)
            self._counters["attend_calls"] += 1
            self._counters["fused_calls"] += kernel != "torch"
            self._counters["kernel_fallbacks"] += is_fallback
        self.on_exact_attention(call)
        return output

    def attend_again(self, query: torch.Tensor, num_tokens: int, scale: float | None) -> torch.Tensor | None:
        prepared, buffer = self._prepared, self._buffer
        if prepared is None or prepared.call is None or buffer is None or num_tokens != self._length:
            return None
        if query.requires_grad:
            return None
        output = prepared.call.attend(query, scale, buffer.storage, buffer.length, buffer.left)
        if output is not None:
            # It has been written
            buffer.left = None
            self._counters["attend_calls"] += 1
            self._counters["fused_calls"] += 1
        return output

    def _attend_prepared(self, query: torch.Tensor, scale: float | None, kernel: str) -> torch.Tensor | None:
        """Prepares a call for these and the tokens to come, if all that they change is the buffer, and makes it."""
        parts, prepared, buffer = list(self._parts(None)), self._prepared, self.buffer
        if prepared is None or prepared.is_tried or prepared.limit == 0 or buffer is None or self._needs_queries:
            return None
        prepared.is_tried = True
        if not buffer.length or torch.compiler.is_dynamo_compiling():
            return None
        prepared.call = prepare_tokens(query, parts, self._shapes["keys"][1], scale, kernel)
        return self.attend_again(query, self._length, scale)

    def on_exact_attention(self, call: AttentionCall) -> None:
        self._learn_padding(call.mask)
        query = call.query.detach() if call.query.requires_grad else call.query
        # Queries of what is projected are of other heads
        is_own, is_first = call.project is None, self._pending is not None and self.codec is None
        if is_own and is_first and self.on_first_prompt is not None:
            self.on_first_prompt(self, query)
        if is_own and self._needs_queries:
            # What a codec will be fitted to. Single ones are added up several at a time
            if query.shape[2] > 1 or self.padding is not None:
                query = query[:, :, -_NUM_QUERIES:]
                self._add_moments(query, self._valid_tokens(self._length - query.shape[2], query.shape[2]))
            else:
                # A new list, as a copy of the layer may hold the same
                self._newest_queries = [*self._newest_queries, query]
                if len(self._newest_queries) == self.packing.residual_length:
                    self._add_newest_queries()
        if self._pending is not None:
            self.settle_prompt()

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[Any]:
        """Everything held, each token once, with its columns of the mask."""
        if attn_mask is None and self._pending is None and self.sliding_window is None:
            if self._prepared is None:
                limit = self._buffer_limit if self.blocks and self.buffer is not None else 0
                self._prepared = PreparedParts(list(self.packed_parts(None)), limit)
            yield from self._prepared.parts
        else:
            yield from self.packed_parts(attn_mask)
        position, first = self.exact_start, self._first_visible
        for keys, values, length in self._exact_tail():
            if position + length > first:
                yield DensePart(keys, values, length, self._columns(attn_mask, position, position + length))
            position += length

    def packed_parts(self, attn_mask: torch.Tensor | None) -> Iterator[Any]:
        """Prefix and blocks, with their columns of the mask."""
        prefix, first = self.prefix, self._first_visible
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions - first, self.batch_size, self._length - first)
            if not prefix.is_uniform or first:
                mask = combine_masks(mask, prefix.in_use & (prefix.positions >= first))
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for block in self.blocks:
            stop = block.start + block.length
            if stop <= first or not block.length:
                continue
            mask = self._columns(attn_mask, block.start, stop)
            if prefix is not None and block.start < self._prefix_stop:
                if mask is None and self.device.type == "cpu":
                    # No longer than needed, as it is kept
                    stop = min(stop, -(-int(prefix.end.max()) // _MASK_STEP) * _MASK_STEP + block.start)
                columns = torch.arange(block.start, stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield block.part(self._codec_of(block), self.padding, mask)

    def _columns(self, attn_mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
        """The mask's columns of the tokens from position `start` to `stop`, of which some may be out of sight."""
        first = self._first_visible
        if start >= first:
            return slice_mask(attn_mask, start - first, stop - first)
        return hide_first(slice_mask(attn_mask, 0, stop - first), first - start, stop - start, self.device)

    def materialize(self, side: str) -> torch.Tensor:
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        first = position = self._first_visible
        prefix, stop = self.prefix, 0 if self.prefix is None else self.prefix.stop()
        for start, end, stored in self._stored_tiles(sides):
            tiles = [(end, stored)]
            if position < start:
                # Tokens that are in no block: the prefix, and padding
                shapes = {
                    side: (*self.states_shape(side)[:2], start - position, self._shapes[side][3]) for side in sides
                }
                empty = {
                    side: torch.zeros(shape, dtype=self.dtype, device=self.device) for side, shape in shapes.items()
                }
                tiles.insert(0, (start, empty))
            for tile_end, tile in tiles:
                if tile_end <= position:
                    continue
                states = {side: tile[side][:, :, position - tile_end :].to(self.dtype) for side in sides}
                if prefix is not None and position < stop:
                    for side, own in states.items():
                        prefix.write_dense(side, own, position)
                yield slice(position - first, tile_end - first), states
                position = tile_end

    def _stored_tiles(self, sides: Collection[str]) -> Iterator[tuple[int, int, dict[str, torch.Tensor]]]:
        """Blocks and the exact tail in order, with the positions that they begin and end at; the last may be empty."""
        for block in self.blocks:
            part = block.part(self._codec_of(block), self.padding, None)
            for keys, values, first, stop in part.tiles(sides):
                yield block.start + first, block.start + stop, {"keys": keys, "values": values}
        end = self.exact_start
        for keys, values, length in self._exact_tail():
            start, end = end, end + length
            exact = {"keys": keys[:, :, :length], "values": values[:, :, :length]}
            yield start, end, exact
        yield end, end, {}

    def activate_past_recording(self) -> None:
        """Lets go of nothing from now on until a `crop`, which can then take back all updates since the last one."""
        self.record_past = True

    def _let_go(self) -> None:
        """Drops what no query to come sees, some rows at a time."""
        first = self._first_seen(self._length)
        if first <= self._held_start:
            return
        if self.packed.drop_before(first):
            self._forget_before(self.blocks[0].start if self.blocks else self.exact_start)

    def _forget_before(self, position: int) -> None:
        """Takes down that no tokens are left before a position, and lets go of a prefix that ends there."""
        self._held_start = max(position, self._held_start)
        # Sequences that have no table have all their tokens in the prefix
        if self.prefix is not None and self._pending_sequences is None and self.prefix.stop() <= position:
            self.prefix = None

    def can_crop(self, count: int) -> bool:
        length = self._length - count
        return length <= 0 or self._is_newest(count) or self._first_seen(length) >= self._held_start

    def _is_newest(self, count: int) -> bool:
        """Whether the newest `count` tokens, not all, still wait to be stored."""
        return self._pending is not None and self._pending[0].shape[2] == count < self._length

    def crop(self, tokens_to_remove: int) -> None:
        """See `LazyLayer.crop`; a layer that records the past lets go of it here."""
        super().crop(tokens_to_remove)
        if self.record_past and self.is_initialized:
            self.settle_prompt()
            self._let_go()

    def crop_tokens(self, count: int) -> None:
        if self.sliding_window is not None:
            is_newest = self._is_newest(count)
            if not is_newest:
                self.settle_prompt()
            if not self.can_crop(count):
                raise ValueError(
                    f"`crop` of {count} tokens would go back to {self._length - count}, but a window of "
                    f"{self.sliding_window} tokens has let go of what was seen there: call "
                    "`activate_past_recording()` of the cache before the tokens that are to be taken back"
                )
            if is_newest:
                self._pending = None
                self._length -= count
                self._num_new = 0
                return
        super().crop_tokens(count)
        self._num_new = max(self._num_new - count, 0)

    def _drop_newest(self, count: int) -> None:
        self._forget_places()
        exact_start, length = self.exact_start, self._length - count
        if self.buffer is not None:
            self.buffer.drop_last(min(count, self.buffer.length))
        if length >= exact_start:
            return
        self.packed.truncate(length)
        if self.prefix is not None:
            self.prefix.truncate(length)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forget_places()
        self._add_newest_queries()
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)
        if self._moments is not None:
            self._moments = self._moments.map(function)
        if self.codec is not None:
            self.codec = self.codec.map(function)
        if self._pending_sequences is not None:
            self._pending_sequences = function(self._pending_sequences)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Which keeps some beside
        self._prepared = None
        for block in self.blocks:
            yield from block.named_tensors()
        if self.codec is not None:
            yield from (("scales", tensor) for tensor in self.codec.tensors())
        self._add_newest_queries()
        if self._moments is not None:
            yield from (("scales", tensor) for tensor in (self._moments.squares, self._moments.products))
        if self.buffer is not None:
            yield from (("residual", tensor) for tensor in self.buffer.tensors())
        if self.prefix is not None:
            yield from (("residual", self.prefix.keys), ("residual", self.prefix.values))
            yield from (("index", self.prefix.start), ("index", self.prefix.count))
        if self._pending_sequences is not None:
            yield "index", self._pending_sequences

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.packing.fixed is not None:
            yield from (("calibration", tensor) for tensor in self.packing.fixed.shared_tensors())

    def share(self) -> Iterator[torch.Tensor]:
        """Yields what a copy of this layer may have in common with it, as neither writes to it from now on."""
        self.settle_prompt()
        self._forget_places()
        yield from self.packed.share()
        if self.codec is not None and self._pending_sequences is None:
            yield from self.codec.tensors()
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.values, self.prefix.start, self.prefix.count)

    def stats(self) -> dict[str, int]:
        lengths = {"tokens_cached": self._length, "tokens_exact": self._num_exact() if self.is_initialized else 0}
        return {**lengths, **self._counters, "dense_reads": self.dense_reads}

    def _num_exact(self) -> int:
        """Tokens that are exact and have not been let go of, of the sequence that has most of them packed."""
        if self.sliding_window is not None:
            in_front = 0 if self.prefix is None else min(self.prefix.num_slots, self._length)
            return self._length - self.exact_start + in_front
        exact = self._length - sum(block.length for block in self.blocks)
        if self.prefix is None or not self.blocks:
            return exact
        has_rows = isinstance(self.packing, RowPacking)
        in_front = min(self.packing.num_sink_tokens if has_rows else self.prefix.num_slots, self._length)
        return exact + max(in_front - self.blocks[0].start, 0)

    def state(self) -> LayerState:
        """Everything that it holds, as it is: nothing is copied."""
        self.settle_prompt()
        self._add_newest_queries()
        batch_size, num_heads, _, key_head_dim = self.states_shape("keys")
        pending, buffer = self._pending_sequences, self.buffer
        stored = [(each, *each.stored()) for each in self.blocks if each.length]
        held = [BlockState(each.start, each.length, keys, values, each.is_recent) for each, keys, values in stored]
        return LayerState(
            dtype=self.dtype,
            batch_size=batch_size,
            num_heads=num_heads,
            key_head_dim=key_head_dim,
            value_head_dim=self._shapes["values"][3],
            length=self._length,
            held_start=self._held_start,
            is_open=self.packed.is_open and self.blocks[-1].length > 0,
            counters=dict(self._counters),
            padding=self.padding,
            prefix=self.prefix,
            blocks=held,
            buffer=None if buffer is None else ExactStates(buffer.keys, buffer.values),
            tables=self.codec.state() if isinstance(self.codec, Codec) else None,
            moments=self._moments,
            pending=None if pending is None else pending.to(torch.uint8),
        )

    @in_own_context
    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        """Takes over a state that may come from anywhere, or raises a `ValueError` that names `path`."""
        if state.counters.keys() != set(self.counter_names):
            raise ValueError(f"`{path}.counters` has to be of {sorted(self.counter_names)}")
        self.codec, blocks = restore_blocks(state, self.packing, self.sliding_window, path)
        self.packed = PackedTokens(blocks, is_open=state.is_open)
        self._prepared = None
        self._length, self._counters = state.length, dict(state.counters)
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.dtype, self.batch_size = state.dtype, state.batch_size
        self.prefix, self.padding = state.prefix, state.padding
        exact, limit = state.buffer, self.packing.residual_length
        self.buffer = None if exact is None else ResidualBuffer.of(exact.keys, exact.values, limit)
        self._prefix_stop = 0 if state.prefix is None else int(state.prefix.end.max())
        self._held_start, self._moments = state.held_start, state.moments
        self._unfitted = self.packing.codec(state.key_head_dim, state.value_head_dim)
        self._pending_sequences = None if state.pending is None else state.pending.bool()
        self.is_initialized, self.device = True, device
        self.map_tensors(lambda tensor: tensor.to(device))
