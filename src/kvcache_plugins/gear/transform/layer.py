"""One layer of transform-coded keys and values: when a token is coded, and attention over all of them.

A prompt is coded right after attention has seen it, and with it the table is made that codes all that follows. Decoded
tokens wait in a short buffer, and are coded at the *beginning* of an update: what the newest update brought is exact, so
a rollback of it finds its tokens as they were. Nothing is shared between tokens, so they may be dropped one by one.

    [ first tokens of each item, exact ] [ rows of the prompt ] [ rows of decoded tokens ] [ buffer, exact ]
"""

from collections.abc import Callable, Iterator

import torch

from kvcache_plugins.gear.compression import check_finite
from kvcache_plugins.gear.storage import ExactPrefix
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.dispatch import choose_kernel
from kvcache_plugins.ops.masking import combine_masks, mask_columns, slice_mask
from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.rotation import rotate
from kvcache_plugins.ops.transform_coding.attention import attend
from kvcache_plugins.ops.transform_coding.parts import CodedPart, RowCoder
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout, candidate_layouts
from kvcache_plugins.ops.transform_coding.statistics import (
    Angles,
    QueryMoments,
    make_key_table,
    make_value_table,
)

from .config import TransformConfig
from .storage import CodedBlock


# Tokens that a table is made of, at least; before that all are exact
MIN_TOKENS = 64
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
    """

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
    ):
        self.config, self.frequencies = config, frequencies
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.prefix: ExactPrefix | None = None
        self.coder: RowCoder | None = None
        self.blocks: list[CodedBlock] = []
        self.buffer: ResidualBuffer | None = None
        self._moments: QueryMoments | None = None
        # Whether decoded tokens may join the last block
        self._is_open = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.layouts: list[RotaryLayout] = candidate_layouts(self.frequencies, key_states.shape[3])

    def _is_prompt(self, count: int) -> bool:
        return count >= _PROMPT_FACTOR * self.config.residual_length

    def on_exact_attention(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> None:
        self._learn_padding(attn_mask)
        self._note_queries(query)
        self.settle_prompt()

    def attend(
        self, query: torch.Tensor, attn_mask: torch.Tensor | None, *, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        if is_causal:
            shape = (query.shape[2], self._length)
            attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()[None, None]
        kernel, is_fallback = choose_kernel(query)
        output = attend(query, self._parts(attn_mask), self._shapes["keys"][1], scale, kernel)
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += kernel != "torch"
        self._counters["kernel_fallbacks"] += is_fallback
        self._learn_padding(attn_mask)
        self._note_queries(query)
        self.settle_prompt()
        return output

    def _note_queries(self, query: torch.Tensor) -> None:
        """Adds the newest queries to what the table will be made of, until there is one."""
        if self.coder is not None:
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
        for number, block in enumerate(self.blocks):
            mask = slice_mask(attn_mask, block.start, block.stop)
            if number == 0 and prefix is not None and not prefix.is_uniform:
                # The first block also spans padding of shorter items, and tokens that the prefix holds
                columns = torch.arange(block.start, block.stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            assert self.coder is not None
            yield CodedPart(
                block.keys, block.values, self.coder, block.start, self.padding, block.length, mask
            )
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
        """Codes all tokens that are exact and not of the prefix, if there are enough for a table."""
        start = self._length - keys.shape[2]
        if self.coder is None:
            if start or self._length - self._longest_padding() < self.config.num_sink_tokens + MIN_TOKENS:
                return False
            self._begin(keys, values)
        else:
            check_finite(keys, values, self._valid_tokens(start, keys.shape[2]), self.layer_idx)
            self._add_rows(*self.coder.encode(keys, values, start, self.padding), start)
        self.buffer = None
        return True

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes the table of all tokens so far, codes them and keeps the first ones exact."""
        length, device = keys.shape[2], keys.device
        padding = torch.zeros(self.batch_size, dtype=torch.long) if self.padding is None else self.padding.cpu()
        prefix_end = padding + self.config.num_sink_tokens
        valid = torch.arange(length, device=device) >= prefix_end.to(device)[:, None]
        check_finite(keys, values, self._valid_tokens(0, length), self.layer_idx)
        first = int(prefix_end.min())
        coder = self._make_coder(keys[:, :, first:], values[:, :, first:], valid[:, first:], first)
        rows = coder.encode(keys[:, :, first:], values[:, :, first:], first, self.padding)
        slots = torch.arange(self.config.num_sink_tokens, device=device) + padding.to(device)[:, None]
        slots = slots[:, None, :, None]
        self.prefix = ExactPrefix(
            *(states.gather(2, slots.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)),
            start=padding.to(device),
            count=torch.full((self.batch_size,), self.config.num_sink_tokens, device=device),
            is_uniform=self._longest_padding() == 0,
        )
        self.coder, self._moments = coder, None
        self._add_rows(*rows, first)
        self._is_open = False

    def _make_coder(self, keys: torch.Tensor, values: torch.Tensor, valid: torch.Tensor, start: int) -> RowCoder:
        angles = [Angles.at(layout, start, keys.shape[2], self.padding, keys.device) for layout in self.layouts]
        key_table, layout = make_key_table(
            keys, valid, self._moments, self.layouts, angles, self.config.key_bytes(keys.shape[3])
        )
        value_table = make_value_table(rotate(values), valid, self.config.value_bytes(values.shape[3]))
        return RowCoder(key_table, value_table, self.layouts[layout])

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
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for block in self.blocks:
            assert self.coder is not None
            block.write_dense(side, self.coder, self.padding, dense)
        # After the blocks: the first one may also span the places of these
        if self.prefix is not None:
            self.prefix.write_dense(side, dense)
        position = self._exact_start
        for keys, values, length in self._exact_tail():
            dense[:, :, position : position + length] = (keys if side == "keys" else values)[:, :, :length]
            position += length
        return dense

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
