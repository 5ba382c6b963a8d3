"""One layer of transform-coded keys and values: when a token is coded, and attention over all of them.

A prompt is coded right after attention has seen it, and with it the table is made that codes all that follows.
Decoded tokens wait in a short buffer, and are coded at the *beginning* of an update: what the newest update brought is
exact, so a rollback of it finds its tokens as they were. Nothing is shared between tokens, so they may be dropped one
by one.

    [ first tokens of each item, exact ] [ rows of the prompt ] [ rows of decoded tokens ] [ buffer, exact ]
"""

from collections.abc import Callable, Collection, Iterator

import torch

from kvcache_plugins.gear.dense_tiles import dense_tiles
from kvcache_plugins.gear.storage import ExactPrefix
from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.dispatch import choose_kernel
from kvcache_plugins.ops.masking import combine_masks, mask_columns, slice_mask
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.transform_coding.attention import attend, has_triton_kernel
from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder
from kvcache_plugins.ops.transform_coding.parts import CodedPart, RowCoder
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout, candidate_layouts
from kvcache_plugins.ops.transform_coding.statistics import QueryMoments

from .config import TransformConfig
from .layer_state import TransformLayerState
from .prompt_coder import make_prompt_coder, replace_item
from .storage import CodedBlock, DecodableBlock
from .waiting_items import join_prefix, shorten_prefix


# Newest queries of a prompt that say what errors of keys do
_NUM_QUERIES = 256
# An update of this many times `residual_length` tokens is coded as soon as attention has seen it
_PROMPT_FACTOR = 4


class TransformLayer(PromptLayer):
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
        calibrated (`BasisCoder`, *optional*):
            How tokens are coded, if a calibration says so. Otherwise it is the prompt that does.
    """

    counter_names = (
        "tokens_compressed",
        "chunks_compressed",
        "attend_calls",
        "fused_calls",
        "written_out_calls",
        "kernel_fallbacks",
        "prompts_without_mask",
    )

    def __init__(
        self,
        config: TransformConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        frequencies: tuple[float, ...] | None = None,
        calibrated: BasisCoder | None = None,
    ):
        self.config, self.frequencies, self.calibrated = config, frequencies, calibrated
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.prefix: ExactPrefix | None = None
        self.coder: RowCoder | BasisCoder | None = None
        self.blocks: list[CodedBlock] = []
        self.buffer: ResidualBuffer | None = None
        self._moments: QueryMoments | None = None
        # Items that have no table yet, as they had too few tokens when others got theirs, `[batch_size]`
        self._waiting_items: torch.Tensor | None = None
        self._waiting = False
        # Rows before that may be of tokens that the prefix holds
        self._prefix_stop = 0
        # Whether decoded tokens may join the last block
        self._is_open = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self.calibrated is not None:
            self.calibrated.check_shapes(key_states, value_states, self.layer_idx)
        super().lazy_initialization(key_states, value_states)
        self.layouts: list[RotaryLayout] = candidate_layouts(self.frequencies, key_states.shape[3])

    def _is_prompt(self, count: int) -> bool:
        return count >= _PROMPT_FACTOR * self.config.residual_length

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        self._learn_padding(None if is_causal else attn_mask)
        self._note_queries(query)
        self.settle_prompt()

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        if is_causal:
            shape = (query.shape[2], self._length)
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
        kernel, is_fallback = choose_kernel(query)
        if kernel == "triton" and not has_triton_kernel(self.coder):
            kernel, is_fallback = "torch", True
        output = attend(query, self._parts(attn_mask), self._shapes["keys"][1], scale, kernel)
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += kernel != "torch"
        self._counters["kernel_fallbacks"] += is_fallback
        self._learn_padding(None if is_causal else attn_mask)
        self._note_queries(query)
        self.settle_prompt()
        return output

    def _note_queries(self, query: torch.Tensor) -> None:
        """Adds the newest queries to what the table will be made of, until there is one."""
        if self.calibrated is not None or (self.coder is not None and not self._waiting):
            return
        query = query.detach()[:, :, -_NUM_QUERIES:]
        valid = self._valid_tokens(self._length - query.shape[2], query.shape[2])
        moments = QueryMoments.of(query, self._shapes["keys"][1], self.layouts, valid)
        self._moments = moments if self._moments is None else self._moments.plus(moments)

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[DensePart | CodedPart]:
        """Everything held, each token once, with its columns of the mask."""
        prefix = self.prefix
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions, self.batch_size, self._length)
            mask = mask if prefix.is_uniform else combine_masks(mask, prefix.in_use)
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for block in self.blocks:
            mask = slice_mask(attn_mask, block.start, block.stop)
            if prefix is not None and not prefix.is_uniform and block.start < self._prefix_stop:
                # Blocks also span padding of shorter items, and tokens that the prefix holds
                columns = torch.arange(block.start, block.stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            assert self.coder is not None
            yield CodedPart(block.keys, block.values, self.coder, block.start, self.padding, block.length, mask)
        position = self._exact_start
        for keys, values, length in self._exact_tail():
            yield DensePart(keys, values, length, slice_mask(attn_mask, position, position + length))
            position += length

    def _exact_tail(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Keys, values and their tokens in use, of what stands behind the coded ones."""
        if self.buffer is not None and self.buffer.length:
            yield *self.buffer.tensors(), self.buffer.length
        if self._pending is not None:
            yield *self._pending, self._pending[0].shape[2]

    @property
    def _exact_start(self) -> int:
        """Position of the first token behind the coded ones."""
        return self._length - sum(length for *_, length in self._exact_tail())

    def _before_update(self) -> None:
        buffer = self.buffer
        if buffer is not None and buffer.length >= self.config.residual_length:
            self._code_tail(buffer.keys, buffer.values)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        if self.buffer is not None and self.buffer.length:
            keys = torch.cat([self.buffer.keys, keys], dim=2)
            values = torch.cat([self.buffer.values, values], dim=2)
        if not self._code_tail(keys, values):
            self.buffer = None
            self._append(keys, values)

    def _code_tail(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """
        Codes all tokens that are exact and not of the prefix, once an item has enough of them for a table. Of items
        that have not, they go to the prefix.
        """
        start, length = self._length - keys.shape[2], self._length
        padding = torch.zeros(self.batch_size, dtype=torch.long) if self.padding is None else self.padding.cpu()
        least = self.config.shortest_prompt if self.calibrated is None else self.config.num_sink_tokens + 1
        has_enough = length - padding >= least
        if self.coder is None and not bool(has_enough.any()):
            return False
        check_finite(keys, values, self._valid_tokens(start, keys.shape[2]), self.layer_idx)
        if self.coder is None:
            start = self._begin(keys, values, padding, has_enough)
        elif self._waiting:
            self._serve_waiting(keys, values, padding, has_enough)
        assert self.coder is not None
        tail = keys.shape[2] - (length - start)
        self._add_rows(*self.coder.encode(keys[:, :, tail:], values[:, :, tail:], start, self.padding), start)
        self.buffer = None
        return True

    def _begin(self, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, has_enough: torch.Tensor) -> int:
        """Makes the tables of all tokens so far, and the prefix; returns the first token to be coded."""
        length, device, sinks = keys.shape[2], keys.device, self.config.num_sink_tokens
        # More may be padding than there are tokens so far
        count = torch.where(has_enough, sinks, (length - padding).clamp(min=0))
        first = int((padding + count)[has_enough].min())
        valid = (torch.arange(first, length) >= (padding + sinks)[:, None]) & has_enough[:, None]
        self.coder = self.calibrated or make_prompt_coder(
            self.config,
            self.layouts,
            self._moments,
            keys[:, :, first:],
            values[:, :, first:],
            valid,
            first,
            self.padding,
        )
        self._is_open = False
        start = padding.to(device, copy=True)
        slots = (start[:, None] + torch.arange(int(count.max()), device=device)).clamp(max=length - 1)
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
        assert self.coder is not None and self.prefix is not None and self._waiting_items is not None
        waiting, first = self._waiting_items.cpu(), self._length - keys.shape[2]
        held = join_prefix(self.prefix, keys, values, first, padding, waiting)
        for item in (waiting & has_enough).nonzero().flatten().tolist():
            tokens = slice(int(held.count[item]))
            own = held.keys[item, None, :, tokens], held.values[item, None, :, tokens]
            if isinstance(self.coder, RowCoder):
                replace_item(self.coder, item, self.config, self.layouts, self._moments, *own)
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
            self.blocks[-1].append(keys, values)
        else:
            self.blocks.append(CodedBlock(keys, values, start, count))
            self._is_open = True
        self._counters["tokens_compressed"] += count
        self._counters["chunks_compressed"] += 1

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.buffer is None:
            self.buffer = ResidualBuffer(keys, values, self.config.residual_length)
        self.buffer.append(keys, values)

    def materialize(self, side: str) -> torch.Tensor:
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        blocks = [DecodableBlock(block, self.coder, self.padding) for block in self.blocks]
        held = self.prefix, blocks, self._exact_tail(), self._exact_start
        return dense_tiles(sides, self.states_shape, *held, self.dtype, self.device)

    def _drop_newest(self, count: int) -> None:
        exact_start, length = self._exact_start, self._length - count
        if self.buffer is not None:
            self.buffer.drop_last(min(count, self.buffer.length))
        if length >= exact_start:
            return
        last = self.blocks[-1]
        self.blocks = [block for block in self.blocks if block.start < length]
        if not self.blocks or self.blocks[-1] is not last:
            self._is_open = False
        if self.blocks and self.blocks[-1].stop > length:
            self.blocks[-1].truncate(length - self.blocks[-1].start)
        if self.prefix is not None:
            self.prefix.truncate(length)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)
        if self._moments is not None:
            self._moments = self._moments.map(function)
        if self.coder is not None:
            self.coder = self.coder.map(function)
        if self._waiting_items is not None:
            self._waiting_items = function(self._waiting_items)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block in self.blocks:
            for rows in (block.keys, block.values):
                yield "codes", rows[:, :, : block.length]
                yield "spare", rows[:, :, block.length :]
        if self.coder is not None:
            yield from (("scales", tensor) for tensor in self.coder.tensors())
        if self._moments is not None:
            yield from (("scales", tensor) for tensor in (self._moments.squares, self._moments.products))
        if self.buffer is not None:
            yield from (("residual", tensor) for tensor in self.buffer.tensors())
        if self.prefix is not None:
            yield from (("residual", self.prefix.keys), ("residual", self.prefix.values))
            yield from (("index", self.prefix.start), ("index", self.prefix.count))
        if self._waiting_items is not None:
            yield "index", self._waiting_items

    def shared_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.calibrated is not None:
            yield from (("calibration", tensor) for tensor in self.calibrated.shared_tensors())

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
        if self.coder is not None and not self._waiting:
            yield from self.coder.tensors()
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.values, self.prefix.start, self.prefix.count)

    def stats(self) -> dict[str, int]:
        exact = self._length
        if self.prefix is not None and self.blocks:
            coded = sum(block.length for block in self.blocks)
            exact -= coded - max(self.config.num_sink_tokens - self.blocks[0].start, 0)
        return {
            "tokens_cached": self._length,
            "tokens_exact": exact,
            **self._counters,
            "dense_reads": self.dense_reads,
        }

    def state(self) -> TransformLayerState:
        """All that it holds, as it is: nothing is copied."""
        self.settle_prompt()
        (batch_size, num_heads, _, key_head_dim), value_head_dim = self.states_shape("keys"), self._shapes["values"][3]
        return TransformLayerState(
            dtype=self.dtype,
            batch_size=batch_size,
            num_heads=num_heads,
            key_head_dim=key_head_dim,
            value_head_dim=value_head_dim,
            length=self._length,
            counters=dict(self._counters),
            prefix=self.prefix,
            coder=self.coder,
            blocks=self.blocks,
            is_open=self._is_open,
            buffer=self.buffer,
            padding=self.padding,
            moments=self._moments,
            waiting_items=self._waiting_items,
        )

    def restore(self, state: TransformLayerState, device: torch.device) -> None:
        """Takes over what `state()` of another layer gave, on a device."""
        self._length, self._counters = state.length, dict.fromkeys(self.counter_names, 0) | state.counters
        self.prefix, self.coder, self.blocks, self.buffer = state.prefix, state.coder, state.blocks, state.buffer
        self.padding, self._moments, self._waiting_items = state.padding, state.moments, state.waiting_items
        self._is_open, self._waiting = state.is_open, state.waiting_items is not None
        self._prefix_stop = 0 if state.prefix is None else int(state.prefix.end.max())
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.layouts = candidate_layouts(self.frequencies, state.key_head_dim)
        self.dtype, self.device, self.batch_size = state.dtype, device, state.batch_size
        self.is_initialized = True
        if any(tensor.device != device for _, tensor in self.named_tensors()):
            self.map_tensors(lambda tensor: tensor.to(device))
