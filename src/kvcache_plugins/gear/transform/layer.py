"""One layer of transform-coded keys and values: when a token is coded, and attention over all of them.

A prompt is coded right after attention has seen it, and with it the table is made that codes all that follows.
Decoded tokens wait in a short buffer, and are coded at the *beginning* of an update: what the newest update brought is
exact, so a rollback of it finds its tokens as they were. Nothing is shared between tokens, so they may be dropped one
by one.

    [ first tokens of each item, exact ] [ rows of the prompt ] [ rows of decoded tokens ] [ buffer, exact ]
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugins.codecs.codec import Codec, Positions, QueryMoments
from kvcache_plugins.codecs.parts import CodedPart
from kvcache_plugins.codecs.prompt_codec import PromptCodec
from kvcache_plugins.codecs.rope import RotaryLayout, candidate_layouts
from kvcache_plugins.gear.replayable import ReplayableMixin
from kvcache_plugins.gear.storage import ExactPrefix
from kvcache_plugins.kernels.attention import attend, prepare_tokens
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.layers.prompt_layer import PromptLayer

from .config import DROP_STEP, TransformConfig
from .layer_state import TransformLayerState
from .storage import CodedBlock, DecodableBlock
from .waiting_items import join_prefix, shorten_prefix


if TYPE_CHECKING:
    from kvcache_plugins.kernels.compiled import PreparedCall

# Newest queries of a prompt that say what errors of keys do
_NUM_QUERIES = 256
# Before a table is made of a sequence that grows token by token, tokens whose queries are heard
_NUM_HEARD = 32
# A prompt's own scales reach it, though deviations end with float16
_LARGEST = 2.0**22


class TransformLayer(ReplayableMixin[CodedBlock], PromptLayer):
    """
    Keys and values of one layer, every token of them coded by itself.

    Args:
        config (`TransformConfig`):
            How many bits.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
        frequencies (`tuple[float, ...]`, *optional*):
            Of the keys' rotary embedding, radians a token of every pair of channels.
        fixed (`Codec`, *optional*):
            How tokens are coded, if that does not depend on the prompt, as by a calibration.
        sliding_window (`int`, *optional*):
            Tokens that a query sees, itself among them; all by default.
    """

    config: TransformConfig
    num_heard = _NUM_HEARD
    counter_names = (
        "tokens_compressed",
        "chunks_compressed",
        "attend_calls",
        "fused_calls",
        "kernel_fallbacks",
        "prompts_without_mask",
    )

    def __init__(
        self,
        config: TransformConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        frequencies: tuple[float, ...] | None = None,
        fixed: Codec | None = None,
        sliding_window: int | None = None,
    ):
        self.config, self.frequencies, self.fixed = config, frequencies, fixed
        super().__init__(layer_idx, attention_mask)
        self._slide(sliding_window)

    def _clear(self) -> None:
        super()._clear()
        self.codec: Codec | None = None
        self._moments: QueryMoments | None = None
        # Queries of single tokens that these do not count yet
        self._newest_queries: list[torch.Tensor] = []
        # Items that have no table yet, as they had too few tokens when others got theirs, `[batch_size]`
        self._waiting_items: torch.Tensor | None = None
        self._waiting = False
        # Rows before that may be of tokens that the prefix holds
        self._prefix_stop = 0
        # Whether decoded tokens may join the last block
        self._is_open = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.fixed is not None:
            try:
                self.fixed.check_shapes(key_states, value_states)
            except ValueError as error:
                raise ValueError(f"layer {self.layer_idx}: {error}") from None
        super().lazy_initialization(key_states, value_states)
        self.layouts: list[RotaryLayout] = candidate_layouts(self.frequencies, key_states.shape[3])

    def _attend_parts(self, call: AttentionCall, parts: Iterator[Any]) -> tuple[torch.Tensor, str, bool]:
        has_kernels = call.is_plain and (self.fixed is None or self.fixed.has_kernels)
        kernel, is_fallback = choose_kernel(call.query) if has_kernels else ("torch", False)
        heads = self._shapes["keys"][1]
        return attend(call.query, parts, heads, call.scale, kernel, call.softcap, call.sinks), kernel, is_fallback

    def _token_call(self, query: torch.Tensor, parts: list[Any], scale: float | None) -> "PreparedCall | None":
        return prepare_tokens(query, parts, self._shapes["keys"][1], scale)

    def _note_queries(self, query: torch.Tensor) -> None:
        """Adds the newest queries to what the table will be made of, until there is one."""
        if not self._needs_queries:
            return
        if query.shape[2] == 1 and self.padding is None:
            # Added up several at a time. A new list, as a copy of the layer may hold the same
            self._newest_queries = [*self._newest_queries, query.detach() if query.requires_grad else query]
            if len(self._newest_queries) == self.config.residual_length:
                self._add_newest_queries()
            return
        query = query.detach()[:, :, -_NUM_QUERIES:]
        self._add_moments(query, self._valid_tokens(self._length - query.shape[2], query.shape[2]))

    def _add_newest_queries(self) -> None:
        if self._newest_queries:
            queries, self._newest_queries = self._newest_queries, []
            self._add_moments(torch.cat(queries, dim=2), None)

    def _add_moments(self, query: torch.Tensor, valid: torch.Tensor | None) -> None:
        moments = QueryMoments.of(query, self._shapes["keys"][1], self.layouts, valid)
        self._moments = moments if self._moments is None else self._moments.plus(moments)

    def _block_part(self, block: CodedBlock, mask: torch.Tensor | None) -> CodedPart:
        assert self.codec is not None
        return CodedPart(
            block.keys, block.values, self.codec, Positions(block.start, self.padding), block.length, mask
        )

    def _may_overlap(self, number: int, block: CodedBlock, prefix: ExactPrefix) -> bool:
        return not prefix.is_uniform and block.start < self._prefix_stop

    @property
    def _needs_queries(self) -> bool:
        """Until there is a table."""
        return self.fixed is None and (self.codec is None or self._waiting)

    @property
    def _buffer_limit(self) -> int:
        # Of the first tokens, all in the buffer, no table is made until there are enough of them
        limit = self.config.residual_length
        return limit if self.codec is not None else max(limit, self._least_tokens)

    @property
    def _least_tokens(self) -> int:
        """Tokens that an item has to have for a table."""
        return self.config.shortest_prompt if self.fixed is None else self.config.num_sink_tokens + 1

    def _compress_buffer(self) -> None:
        assert self.buffer is not None
        self._code_tail(self.buffer.keys, self.buffer.values)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        if self.buffer is not None and self.buffer.length:
            keys = torch.cat([self.buffer.keys, keys], dim=2)
            values = torch.cat([self.buffer.values, values], dim=2)
        if not self._code_tail(keys, values):
            self.buffer = None
            self._append(keys, values)
        if not is_first and not self.record_past:
            self._let_go()

    def _code_tail(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """
        Codes all tokens that are exact and not of the prefix, once an item has enough of them for a table. Of items
        that have not, they go to the prefix.
        """
        start, length = self._length - keys.shape[2], self._length
        padding = torch.zeros(self.batch_size, dtype=torch.long) if self.padding is None else self.padding.cpu()
        has_enough = length - padding >= self._least_tokens
        if self.codec is None and not bool(has_enough.any()):
            return False
        valid = self._valid_tokens(start, keys.shape[2])
        self._add_newest_queries()
        if self.codec is None or self._waiting:
            # Nothing is made of what is refused
            check_finite(keys, values, valid, self.layer_idx, _LARGEST)
        is_new = self.codec is None
        if is_new:
            start = self._begin(keys, values, padding, has_enough)
        elif self._waiting:
            self._serve_waiting(keys, values, padding, has_enough)
        assert self.codec is not None
        first = start + self._num_passed(length - start)
        tail = keys.shape[2] - (length - first)
        coded, positions = (keys[:, :, tail:], values[:, :, tail:]), Positions(first, self.padding)
        rows = self.codec.encode(*coded, positions)
        check_finite(keys, values, valid, self.layer_idx, _LARGEST, self._is_beyond(rows, first))
        if is_new:
            self.codec = self.codec.without_shared_errors(rows, *coded, self._counting(first), positions)
        if first > start:
            self.blocks, self._is_open = [], False
            self._forget_before(first)
        self._add_rows(*rows, first)
        self._release_buffer()
        return True

    def _is_beyond(self, rows: tuple[torch.Tensor, torch.Tensor], start: int) -> torch.Tensor | None:
        """Says if scales of rows `[B, H, T, R]` from index `start` on end before their tokens do, on their device."""
        assert self.codec is not None
        is_beyond = self.codec.too_large(*rows)
        if is_beyond is None:
            return None
        if start < self._prefix_stop:
            # What stands for padding, or is exact as well, may be anything
            counts = self._counting(start)
            is_beyond = is_beyond if counts is None else is_beyond & counts
        return is_beyond.any()

    def _counting(self, start: int) -> torch.Tensor | None:
        """Says which tokens from index `start` on are read as rows, `[B, T]`: neither padding nor of the prefix."""
        if self.prefix is None:
            return self._valid_tokens(start, self._length - start)
        return torch.arange(start, self._length, device=self.device) >= self.prefix.end[:, None]

    def _begin(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, has_enough: torch.Tensor) -> int:
        """Makes the tables of all tokens so far, and the prefix; returns the first token to be coded."""
        length, device, sinks = keys.shape[2], keys.device, self.config.num_sink_tokens
        # More may be padding than there are tokens so far
        count = torch.where(has_enough, sinks, (length - padding).clamp(min=0))
        first = int((padding + count)[has_enough].min())
        self.codec = self.fixed
        if self.codec is None:
            valid = (torch.arange(first, length) >= (padding + sinks)[:, None]) & has_enough[:, None]
            dims = keys.shape[3], values.shape[3]
            codec = PromptCodec(dims, self.config.code_bytes(*dims), self.layouts, self.config.quantizer)
            self.codec = codec.fit(
                keys[:, :, first:], values[:, :, first:], valid, self._moments, Positions(first, self.padding)
            )
        self._is_open = False
        # On the CPU like the padding that they are from
        slots = (padding[:, None] + torch.arange(int(count.max()))).clamp(max=length - 1).to(device)
        start = padding.to(device, copy=True)
        exact_keys, exact_values = (
            states.gather(2, slots[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3]))
            for states in (keys, values)
        )
        is_uniform = not bool(padding.any()) and bool(has_enough.all())
        self.prefix = ExactPrefix(exact_keys, exact_values, start=start, count=count.to(device), is_uniform=is_uniform)
        self._prefix_stop = int((padding + count).max())
        self._set_waiting(~has_enough)
        return first

    def _serve_waiting(
        self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, has_enough: torch.Tensor
    ) -> None:
        """Makes tables for items that now have enough tokens, and takes into the prefix those of all others."""
        assert self.codec is not None and self.prefix is not None and self._waiting_items is not None
        waiting, first = self._waiting_items.cpu(), self._length - keys.shape[2]
        held = join_prefix(self.prefix, keys, values, first, padding, waiting)
        for item in (waiting & has_enough).nonzero().flatten().tolist():
            tokens = slice(int(held.count[item]))
            own = held.keys[item, None, :, tokens], held.values[item, None, :, tokens]
            valid = (torch.arange(own[0].shape[2]) >= self.config.num_sink_tokens)[None]
            self.codec = self.codec.refit(item, *own, valid, self._moments)
        kept = self.prefix.count.cpu().clamp(min=self.config.num_sink_tokens)
        self.prefix = shorten_prefix(held, torch.where(waiting & has_enough, kept, self._length))
        self._prefix_stop = int(self.prefix.end.max())
        self._set_waiting(waiting & ~has_enough)

    def _set_waiting(self, waiting: torch.Tensor) -> None:
        self._waiting = bool(waiting.any())
        self._waiting_items = waiting.to(self.device) if self._waiting else None
        if not self._waiting:
            self._moments = None

    def _add_rows(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        count = keys.shape[2]
        if self._is_open:
            most = None if self.sliding_window is None else self.sliding_window - 1 + DROP_STEP
            self.blocks[-1].append(keys, values, most)
        else:
            self.blocks.append(CodedBlock(keys, values, count, start))
            self._is_open = True
        self._counters["tokens_compressed"] += count
        self._counters["chunks_compressed"] += 1

    def kernel_kind(self) -> Hashable:
        """The same for layers that run the same kernels over states of the same sizes."""
        kind = None if self.fixed is None else self.fixed.kernel_kind
        return self.config, self.frequencies is None, kind

    def open_block(self) -> CodedBlock:
        """See `ReplayableMixin.open_block`."""
        if not self._is_open:
            assert self.codec is not None
            heads = self.batch_size, self._shapes["keys"][1], 0
            keys, values = (
                torch.zeros(*heads, size, dtype=torch.uint8, device=self.device) for size in self.codec.row_sizes
            )
            self.blocks.append(CodedBlock(keys, values, 0, self._exact_start))
            self._is_open = True
        return self.blocks[-1]

    def coded_by(self) -> object:
        """See `ReplayableMixin.coded_by`."""
        return self.codec

    def is_replayable(self) -> bool:
        """See `ReplayableMixin.is_replayable`."""
        return super().is_replayable() and not self._waiting

    def _tiled_blocks(self) -> Sequence[DecodableBlock]:
        return [DecodableBlock(block, self.codec, self.padding) for block in self.blocks]

    def _num_droppable(self, block: CodedBlock, count: int) -> int:
        return count // DROP_STEP * DROP_STEP

    def _needs_prefix(self) -> bool:
        # Items that wait for a table have all their tokens in it
        return self._waiting

    def _after_cut(self, newest: CodedBlock | None) -> None:
        if not self.blocks or self.blocks[-1] is not newest:
            self._is_open = False

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._add_newest_queries()
        super()._map_stored(function)
        if self._moments is not None:
            self._moments = self._moments.map(function)
        if self.codec is not None:
            self.codec = self.codec.map(function)
        if self._waiting_items is not None:
            self._waiting_items = function(self._waiting_items)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block in self.blocks:
            for rows in (block.keys, block.values):
                yield "codes", rows[:, :, : block.length]
                yield "spare", rows[:, :, block.length :]
        if self.codec is not None:
            yield from (("scales", tensor) for tensor in self.codec.tensors())
        self._add_newest_queries()
        if self._moments is not None:
            yield from (("scales", tensor) for tensor in (self._moments.squares, self._moments.products))
        yield from self._exact_tensors()
        if self._waiting_items is not None:
            yield "index", self._waiting_items

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.fixed is not None:
            yield from (("calibration", tensor) for tensor in self.fixed.shared_tensors())

    def share(self) -> Iterator[torch.Tensor]:
        """
        Every tensor that a copy of this layer may have in common with it, as neither writes to it from now on: rows,
        tables, and the exact tokens in front.
        """
        self.settle_prompt()
        # Further rows would be written into the room that the last block has left
        self._is_open = False
        for block in self.blocks:
            yield from (block.keys, block.values)
        if self.codec is not None and not self._waiting:
            yield from self.codec.tensors()
        yield from self._prefix_tensors()

    def _num_exact(self) -> int:
        if self.prefix is None or not self.blocks:
            return self._length
        coded = sum(block.length for block in self.blocks)
        return self._length - coded + max(self.config.num_sink_tokens - self.blocks[0].start, 0)

    def state(self) -> TransformLayerState:
        """All that it holds, as it is: nothing is copied."""
        exact = self._exact_state()
        self._add_newest_queries()
        return TransformLayerState(
            **exact,
            codec=self.codec,
            is_open=self._is_open and self.blocks[-1].length > 0,
            moments=self._moments,
            waiting_items=self._waiting_items,
        )

    def restore(self, state: TransformLayerState, device: torch.device) -> None:
        """Takes over what `state()` of another layer gave, on a device."""
        self._restore_exact(state)
        self.blocks, self.codec = state.blocks, state.codec
        self._moments, self._waiting_items = state.moments, state.waiting_items
        self._is_open, self._waiting = state.is_open, state.waiting_items is not None
        self._prefix_stop = 0 if state.prefix is None else int(state.prefix.end.max())
        self.layouts = candidate_layouts(self.frequencies, state.key_head_dim)
        self._place_on(device)
