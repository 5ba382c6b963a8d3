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

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcache_plugins.codecs.codec import Codec, Positions, QueryMoments, Sample
from kvcache_plugins.codecs.parts import DensePart
from kvcache_plugins.kernels.attention import attend, prepare_coding, prepare_tokens
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.c_structs import TILE
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.masks import combine_masks, hide_first, mask_columns, slice_mask

from .layer_state import BlockState, ExactStates, LayerState, restore_blocks
from .lazy_kv import make_lazy_kv
from .lazy_layer import LazyLayer, MaskedTiles
from .packing import (
    DROP_STEP,
    Block,
    ExactPrefix,
    GroupPacking,
    Packing,
    PreparedParts,
    ResidualBuffer,
    RowBlock,
    RowPacking,
    Split,
    check_finite,
    num_too_old,
)
from .torch_contexts import without_caller_contexts


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
        *("tokens_compressed", "chunks_compressed", "attend_calls", "fused_calls", "kernel_fallbacks"),
        "prompts_without_mask",
    )
    # Whether as many of the newest tokens are exact at any time: see `static_layer`
    _stands_still = False
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
        # Of packed tokens, following each other, the oldest first; the last may be recent ones
        self.blocks: list[Any] = []
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
    def buffer(self) -> ResidualBuffer | None:
        """The newest tokens, exact."""
        if self._plain is not None:
            self._end_plain(*self._plain)
        return self._buffer

    @buffer.setter
    def buffer(self, buffer: ResidualBuffer | None) -> None:
        self._buffer: ResidualBuffer | None = buffer
        self._plain: tuple[torch.Tensor, torch.Tensor] | None = None

    @without_caller_contexts
    def _end_plain(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        first = 0 if self.prefix is None else self.prefix.num_slots
        self.buffer = ResidualBuffer(keys[:, :, first:], values[:, :, first:], self._buffer_limit)

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
            return states if self._length <= self._first_heard else self._lazy(states)
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
        return make_lazy_kv(self, kind[0], kind[1], self._length, self.dtype, self.device)

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
        block, most_recent = self.blocks[-1] if self.blocks else None, packing.recent_length
        if not isinstance(block, RowBlock) or not block.is_open or block.stop != start:
            return False
        if block.is_recent != (most_recent > 0) or start < self._prefix_stop:
            return False
        older: RowBlock | None = None
        num_aged = num_too_old(block.length + count, most_recent) if block.is_recent else 0
        if num_aged:
            # They join the block before
            older = self.blocks[-2] if len(self.blocks) > 1 and self.blocks[-2].is_open else None
            if older is None or num_aged > block.length:
                return False
        # The call takes no mask, and not more than a tile
        if self._valid_tokens(start, count) is not None or max(count, num_aged) > TILE:
            return False
        codec, coding, states = self._codec_of(block), prepared.coding, buffer.tensors()
        if coding is None or coding.codec is not codec or coding.padding is not self.padding:
            coding = prepare_coding(codec, self.codec, states[0], self.padding, packing.largest)
            prepared.coding = coding
        if coding is None:
            return False
        kept = block.kept_for(count, most_recent or self._most_rows, num_aged)
        joined = None if older is None else older.kept_for(num_aged, self._most_rows)
        is_moved = buffer.capacity_without(count) == buffer.capacity
        rows = coding.append(states, count, start, kept, is_moved * packing.num_kept, joined)
        if rows is None:
            return False
        block.take(rows[:2], kept, count)
        if is_moved:
            buffer.length -= count
        else:
            without_caller_contexts(buffer.drop_first)(count)
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
            else:
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
        if prefix is not None and not prefix.is_uniform:
            return None
        if prefix is not None and prefix.num_slots:
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
            padding = torch.zeros(self.batch_size, dtype=torch.long, device="cpu") if counts is None else counts.cpu()
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
                numbers = torch.arange(start, num_exact, dtype=torch.int64, device="cpu")
                valid = (numbers >= end[:, None]) & ~pending[:, None]
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
        # What no query to come sees is not packed, and no padding of all sequences
        has_passed = self.sliding_window is not None and not self.record_past
        passed = max(start, self._first_seen(length)) if has_passed else start
        first = passed if counts is None else min(max(passed, self._left_padding.ends()[0]), length)
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
        if passed > start:
            self._forget_before(passed)
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
            valid = (torch.arange(own[0].shape[2], dtype=torch.int64, device="cpu") >= sinks)[None]
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
        valid = None if counts is None else self._valid_tokens(start, keys.shape[2])
        if start < self._prefix_stop:
            assert self.prefix is not None
            # With its data even where states have none
            end = self.prefix.end if first_end is None or not keys.is_meta else first_end
            valid = torch.arange(start, start + keys.shape[2], dtype=torch.int64, device=end.device) >= end[:, None]
        recent = None if is_prompt or first_end is not None else packing.recent_codec(self.codec)
        codec, positions = self.codec if recent is None else recent, Positions(start, counts)
        try:
            if isinstance(packing, GroupPacking):
                block: Any = packing.encode(codec, (keys, values), start, valid, is_prompt=is_prompt)
            else:
                rows = codec.encode(keys, values, positions)
                block = RowBlock(rows[0], rows[1], start, keys.shape[2], is_recent=recent is not None)
        except ValueError as error:
            # The codec notices, and here it is said, what is not finite
            check_finite(keys, values, valid, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        if isinstance(block, RowBlock):
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
        self._counters["chunks_compressed"] += 1 if isinstance(block, RowBlock) else block.num_chunks
        prepared, self._prepared = self._prepared, None
        if first_end is not None:
            self.blocks.append(block)
            return
        num_aged, num_blocks = 0, len(self.blocks)
        if recent is None:
            self._age()
        joined = self._add(block)
        if recent is not None:
            num_aged = num_too_old(self.blocks[-1].length, packing.recent_length)
        if num_aged:
            self._age(num_aged)
        is_same = joined is not None and joined is self.blocks[-1] and len(self.blocks) == num_blocks
        if is_same and prepared is not None and prepared.extend(self.blocks[-2:] if num_aged else self.blocks[-1:]):
            self._prepared = prepared

    def _add(self, block: Block) -> Block | None:
        """
        Adds a block that follows, perhaps later, where a window has passed all that there was; to the last one if both
        are open and of one kind, and then returns that.
        """
        newest = self.blocks[-1] if self.blocks else None
        if newest is not None and block.start > newest.stop:
            self.blocks, newest = [], None
        if newest is not None and newest.is_recent == block.is_recent:
            if newest.is_recent and not newest.is_open:
                # There is one block of them, which a copy may share
                newest.resize(newest.length + block.length)
                newest.is_open = True
            if newest.is_open and block.is_open:
                newest.append(block, self.packing.recent_length if block.is_recent else self._most_rows)
                return self.blocks[-1]
        self.blocks.append(block)
        return None

    def _age(self, count: int | None = None) -> None:
        """Codes the first `count` recent tokens, all by default, anew, as all older ones are."""
        if not self.blocks or not self.blocks[-1].is_recent:
            return
        recent = self.blocks.pop()
        count, self._prepared = recent.length if count is None else count, None
        rows = recent.keys[:, :, :count], recent.values[:, :, :count]
        keys, values = self.codec.recode(rows, self._codec_of(recent))
        self._add(RowBlock(keys, values, recent.start, count))
        if count < recent.length:
            recent.drop_first(count)
            self.blocks.append(recent)

    def _codec_of(self, block: Block) -> Any:
        return self.packing.recent_codec(self.codec) if block.is_recent else self.codec

    def _keep_newest(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        """Has the buffer hold the newest of all tokens behind the packed ones before."""
        # They are not plain any more
        buffer, first = self._buffer, keys.shape[2] - count
        if buffer is None or buffer.length != keys.shape[2]:
            limit = self.packing.residual_length
            self._buffer = ResidualBuffer(keys[:, :, first:], values[:, :, first:], limit)
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
                columns = torch.arange(block.start, stop, dtype=torch.int64, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield block.part(self._codec_of(block), self.padding, mask)

    def _columns(self, attn_mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
        """The mask's columns of the tokens from position `start` to `stop`, of which some may be out of sight."""
        first = self._first_visible
        if start >= first:
            return slice_mask(attn_mask, start - first, stop - first)
        return hide_first(slice_mask(attn_mask, 0, stop - first), first - start, stop - start, self.device)

    def materialize(self, side: str) -> torch.Tensor:
        first, position = self._first_visible, self.exact_start
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        held = [(block.start, block.part(self._codec_of(block), self.padding, None)) for block in self.blocks]
        for keys, values, length in self._exact_tail():
            held.append((position, DensePart(keys, values, length, None)))
            position += length
        for position, part in held:
            for keys, values, start, stop in part.tiles({side}):
                states = (keys if side == "keys" else values)[:, :, max(first - position - start, 0) :]
                end = max(position + stop - first, 0)
                dense[:, :, end - states.shape[2] : end] = states
        # Where it spans tokens of blocks too, theirs mean nothing
        if self.prefix is not None:
            self.prefix.write_dense(side, dense, first)
        return dense

    def dense_tiles(self, mask: torch.Tensor | None) -> MaskedTiles:
        for part in self._parts(mask):
            for keys, values, start, stop in part.tiles():
                yield keys.to(self.dtype), values.to(self.dtype), slice_mask(part.mask, start, stop)

    def activate_past_recording(self) -> None:
        """Lets go of nothing from now on until a `crop`, which can then take back all updates since the last one."""
        self.record_past = True

    def _let_go(self) -> None:
        """Drops what no query to come sees, some rows at a time."""
        first, count = self._first_seen(self._length), len(self.blocks)
        if first <= self._held_start:
            return
        self.blocks = [block for block in self.blocks if block.stop > first]
        num_dropped = max(first - self.blocks[0].start, 0) // DROP_STEP * DROP_STEP if self.blocks else 0
        if num_dropped:
            self.blocks[0].drop_first(num_dropped)
        if num_dropped or len(self.blocks) < count:
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
                self._shorten(self._length - count)
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
        self.blocks = [block for block in self.blocks if block.start < length]
        if self.blocks and self.blocks[-1].stop > length:
            self.blocks[-1].truncate(length - self.blocks[-1].start)
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
        for block in self.blocks:
            # Nothing is added to it from now on: that would be into room that copies share
            block.is_open = False
            yield from (tensor for side in block.sides() for tensor in side.values())
        if self.codec is not None and self._pending_sequences is None:
            yield from self.codec.tensors()
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.values, self.prefix.start, self.prefix.count)

    def stats(self) -> dict[str, int]:
        lengths = {"tokens_cached": self._length, "tokens_exact": self._num_exact() if self.is_initialized else 0}
        return {**lengths, **self._counters, "dense_reads": self.dense_reads}

    def _num_exact(self) -> int:
        """Tokens that are exact and have not been let go of, of the sequence that has most of them packed."""
        start, in_front, all_held = self.exact_start, 0, self.sliding_window is None
        if self.prefix is not None:
            has_sinks = isinstance(self.packing, RowPacking) and all_held
            in_front = min(self.packing.num_sink_tokens if has_sinks else self.prefix.num_slots, self._length)
        if all_held:
            in_front = max(in_front, self.blocks[0].start if self.blocks else start)
        return self._length - start + in_front

    def state(self) -> LayerState:
        """Everything that it holds, as it is: nothing is copied."""
        self.settle_prompt()
        self._add_newest_queries()
        batch_size, num_heads, _, key_head_dim = self.states_shape("keys")
        pending, buffer = self._pending_sequences, self.buffer
        blocks: list[Block] = [each for each in self.blocks if each.length]
        return LayerState(
            dtype=self.dtype,
            batch_size=batch_size,
            num_heads=num_heads,
            key_head_dim=key_head_dim,
            value_head_dim=self._shapes["values"][3],
            length=self._length,
            held_start=self._held_start,
            is_open=bool(self.blocks) and self.blocks[-1].is_open and self.blocks[-1].length > 0,
            counters=dict(self._counters),
            padding=self.padding,
            prefix=self.prefix,
            blocks=[BlockState(each.start, each.length, *each.stored(), each.is_recent) for each in blocks],
            buffer=None if buffer is None else ExactStates(buffer.keys, buffer.values),
            tables=self.codec.state() if isinstance(self.codec, Codec) else None,
            moments=self._moments,
            pending=None if pending is None else pending.to(torch.uint8),
        )

    @without_caller_contexts
    def restore(self, state: LayerState, device: torch.device, path: str = "state") -> None:
        """Takes over a state that may come from anywhere, or raises a `ValueError` that names `path`."""
        if state.counters.keys() != set(self.counter_names):
            raise ValueError(f"`{path}.counters` has to be of {sorted(self.counter_names)}")
        self.codec, self.blocks = restore_blocks(state, self.packing, self.sliding_window, path)
        self._prepared = None
        self._length, self._counters = state.length, dict(state.counters)
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.dtype, self.batch_size = state.dtype, state.batch_size
        self.prefix, self.padding = state.prefix, state.padding
        exact, limit = state.buffer, self.packing.residual_length
        self.buffer = None if exact is None else ResidualBuffer(exact.keys, exact.values, limit)
        self._prefix_stop = 0 if state.prefix is None else int(state.prefix.end.max())
        self._held_start, self._moments = state.held_start, state.moments
        self._unfitted = self.packing.codec(state.key_head_dim, state.value_head_dim)
        self._pending_sequences = None if state.pending is None else state.pending.bool()
        self.is_initialized, self.device = True, device
        self.map_tensors(lambda tensor: tensor.to(device))
