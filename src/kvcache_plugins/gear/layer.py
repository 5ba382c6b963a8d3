"""One layer of a GEAR cache: when what is compressed, and attention over all of it.

The life of a token: `update` hands it out exact; a prompt is compressed right after attention has seen it, layer by
layer, so that never more than one layer's prompt is dense at a time; a decoded token waits in the buffer, and chunks
of `residual_length` are compressed at the *beginning* of the next update. A rollback (`crop`) of the newest update, as
in assisted decoding, thus always finds its tokens exact.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcache_plugins.codecs.groups import GroupCodec
from kvcache_plugins.codecs.parts import CompressedPart
from kvcache_plugins.kernels.attention import attend, prepare_tokens
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import MAX_NUM_COMPILED_QUERIES, choose_kernel, compiles_kernels
from kvcache_plugins.layers.finite_states import check_finite
from kvcache_plugins.layers.prompt_layer import PromptLayer

from .config import GEARConfig
from .replayable import ReplayableMixin
from .storage import CompressedBlock, ExactPrefix, GEARLayerState
from .warm_up import Sizes, warm_up_gear


if TYPE_CHECKING:
    from kvcache_plugins.kernels.compiled import PreparedCall

_PART_NAMES = {
    "codes": "codes",
    "scale": "scales",
    "zero": "scales",
    "low_rank_a": "low_rank",
    "low_rank_b": "low_rank",
    "outlier_indices": "outliers",
    "outlier_values": "outliers",
    "outlier_offsets": "outliers",
}


class GEARLayer(ReplayableMixin[CompressedBlock], PromptLayer):
    """
    Keys and values of one layer, compressed as in [GEAR](https://huggingface.co/papers/2403.05527).

    Args:
        config (`GEARConfig`):
            What to compress to.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
        sliding_window (`int`, *optional*):
            Tokens that a query sees, itself among them; all by default.
    """

    config: GEARConfig
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
        config: GEARConfig,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        sliding_window: int | None = None,
    ):
        self.config = config
        super().__init__(layer_idx, attention_mask)
        self._slide(sliding_window)

    def _clear(self) -> None:
        super()._clear()
        # The block that further decode chunks may join
        self._open_block: CompressedBlock | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.config.codec(key_states.shape[3], value_states.shape[3])
        super().lazy_initialization(key_states, value_states)

    def _attend_parts(self, call: AttentionCall, parts: Iterator[Any]) -> tuple[torch.Tensor, str, bool]:
        kernel, is_fallback = (
            choose_kernel(call.query, MAX_NUM_COMPILED_QUERIES) if call.is_plain else ("torch", False)
        )
        heads = self._shapes["keys"][1]
        return attend(call.query, parts, heads, call.scale, kernel, call.softcap, call.sinks), kernel, is_fallback

    def _token_call(self, query: torch.Tensor, parts: list[Any], scale: float | None) -> "PreparedCall | None":
        return prepare_tokens(query, parts, self._shapes["keys"][1], scale)

    def _note_queries(self, query: torch.Tensor) -> None:
        """Before the first prompt is compressed, everything is compiled that decoding will need."""
        if self._pending is None or self.is_warm:
            return
        self.is_warm = True
        if compiles_kernels(query):
            heads, dims = self._shapes["keys"][1], (self._shapes["keys"][3], self._shapes["values"][3])
            is_padded = self.padding is not None
            sizes = Sizes(heads, query.shape[1], *dims, self.dtype, self.device, is_padded)
            warm_up_gear(type(self), self.config, sizes)

    def _block_part(self, block: CompressedBlock, mask: torch.Tensor | None) -> CompressedPart:
        return CompressedPart(block.keys, block.values, block.length, mask)

    def _may_overlap(self, number: int, block: CompressedBlock, prefix: ExactPrefix) -> bool:
        return number == 0 and (not prefix.is_uniform or prefix.num_slots > block.start)

    def _compress_buffer(self) -> None:
        """The chunks that the last update has filled."""
        chunk_length, buffer = self.config.residual_length, self.buffer
        assert buffer is not None
        num_chunks = buffer.length // chunk_length
        count = num_chunks * chunk_length
        states = buffer.keys[:, :, :count], buffer.values[:, :, :count]
        valid = self._valid_tokens(self._exact_start, count)
        block = self._compress(*states, valid, self._exact_start, num_chunks, is_prompt=False)
        if self._open_block is None:
            self._open_block = block
            self.blocks.append(block)
        else:
            # Of a window that is full, a chunk is dropped for each that comes
            self._open_block.append(block, has_spare=self.sliding_window is None)
        buffer.drop_first(count)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        if is_first:
            padding = None if self.padding is None else self.padding.tolist()
            start = self._num_left_out(keys.shape[2])
            self._store_first_prompt(keys, values, padding, start)
            self._held_start = start
        else:
            self._compress_later_prompt()
            if not self.record_past:
                self._let_go()
        self._open_block = None

    def _store_first_prompt(
        self, keys: torch.Tensor, values: torch.Tensor, padding: list[int] | None, left_out: int
    ) -> None:
        """
        Splits every sequence of a left-padded batch into exact first tokens and one block of compressed ones.

        Sequences end together, so groups are counted back from the end: one is compressed the same alone and padded.
        Exact are at least the sink tokens: where they stand in the first group, what it stores of them means nothing.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, tokens, D]`): exact states of the whole prompt.
            padding (`list[int]`, *optional*): padding tokens at the start of each sequence; none by default.
            left_out (`int`): tokens at the beginning that are not stored, as they are out of a window.
        """
        config = self.config
        keys, values = keys[:, :, left_out:], values[:, :, left_out:]
        batch_size, length, device = keys.shape[0], keys.shape[2], keys.device
        num_sinks = [config.num_sink_tokens - max(left_out - pad, 0) for pad in padding or [0] * batch_size]
        padding = [max(pad - left_out, 0) for pad in padding or [0] * batch_size]
        compressed_counts = [config.num_compressible(length - pad) for pad in padding]
        exact_counts = [
            max(length - pad - count, min(sinks, length - pad), 0)
            for pad, count, sinks in zip(padding, compressed_counts, num_sinks, strict=True)
        ]
        start = torch.tensor(padding, device=device)
        positions = torch.arange(length, device=device)
        check_finite(keys, values, positions >= start[:, None], self.layer_idx)
        blocks = []
        first = length - max(compressed_counts)
        if first < length:
            first_valid = [pad + count for pad, count in zip(padding, exact_counts, strict=True)]
            valid = None
            if max(first_valid) > first:
                # With its data even where states have none
                on = torch.device("cpu") if keys.is_meta else device
                valid = torch.arange(first, length, device=on) >= torch.tensor(first_valid, device=on)[:, None]
            states = keys[:, :, first:], values[:, :, first:]
            blocks.append(self._compress(*states, valid, left_out + first, 1, is_prompt=True))
        self.blocks = blocks
        if left_out and not any(padding) and not any(exact_counts):
            return
        num_slots = max(exact_counts)
        slots = (start[:, None] + torch.arange(num_slots, device=device)).clamp(max=length - 1)[:, None, :, None]
        exact_keys, exact_values = (
            states.gather(2, slots.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)
        )
        is_uniform = left_out == 0 and not any(padding) and min(exact_counts) == num_slots
        count = torch.tensor(exact_counts, device=device)
        self.prefix = ExactPrefix(exact_keys, exact_values, start=left_out + start, count=count, is_uniform=is_uniform)

    def _num_left_out(self, count: int) -> int:
        """How many of the newest `count` tokens are not stored, as no query to come sees them; groups stay whole."""
        num_seen = count - self._num_passed(count)
        return max(count - self.config.num_whole(num_seen), 0) if num_seen < count else 0

    def _compress_later_prompt(self) -> None:
        """
        Compresses a long update together with the buffer before it; tokens beyond a whole number of groups become the
        buffer.
        """
        tail = list(self._exact_tail())
        keys = torch.cat([keys[:, :, :length] for keys, _, length in tail], dim=2)
        values = torch.cat([values[:, :, :length] for _, values, length in tail], dim=2)
        left_out = self._num_left_out(keys.shape[2])
        keys, values = keys[:, :, left_out:], values[:, :, left_out:]
        start = self._length - keys.shape[2]
        count = self.config.num_compressible(keys.shape[2])
        valid = self._valid_tokens(start, count)
        block = self._compress(keys[:, :, :count], values[:, :, :count], valid, start, 1, is_prompt=True)
        if left_out:
            self.blocks = []
            self._forget_before(start)
        self.blocks.append(block)
        self._release_buffer()
        if count < keys.shape[2]:
            self._append(keys[:, :, count:], values[:, :, count:])

    def _compress(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        valid: torch.Tensor | None,
        start: int,
        num_chunks: int,
        *,
        is_prompt: bool,
    ) -> CompressedBlock:
        """
        Makes a block of consecutive tokens `[B, H, tokens, D]` from position `start` on, of which those of `valid`
        `[B, tokens]` are real; changes nothing of what is stored.

        Raises:
            ValueError: if states are not finite or exceed float16.
        """
        codec = self._codec()
        try:
            states = codec.encode(keys, values, valid, num_chunks=num_chunks, is_prompt=is_prompt)
        except ValueError as error:
            # The codec notices, and here it is said, what is not finite
            check_finite(keys, values, valid, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        self._counters["tokens_compressed"] += keys.shape[2]
        self._counters["chunks_compressed"] += num_chunks
        return CompressedBlock(*states, start=start, num_chunks=num_chunks, length=keys.shape[2])

    def _codec(self) -> GroupCodec:
        return self.config.codec(self._shapes["keys"][3], self._shapes["values"][3])

    def open_block(self) -> CompressedBlock:
        """See `ReplayableMixin.open_block`."""
        if self._open_block is None:
            num_heads, length = self._shapes["keys"][1], self.config.residual_length
            states = self._codec().blank(self.batch_size, num_heads, 1, length, self.device)
            block = CompressedBlock(*states, start=self._exact_start, num_chunks=0, length=0)
            self._open_block = block
            self.blocks.append(block)
        return self._open_block

    def _tiled_blocks(self) -> Sequence[CompressedBlock]:
        return self.blocks

    def _num_droppable(self, block: CompressedBlock, count: int) -> int:
        # Further chunks are as long as those that there are
        return 0 if block is self._open_block and block.num_chunks == 1 else block.num_droppable(count)

    def _after_cut(self, newest: CompressedBlock | None) -> None:
        if self._open_block not in self.blocks or not self.blocks[-1].is_full:
            self._open_block = None

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block in self.blocks:
            for states in (block.keys, block.values):
                for name, tensor in states.named_tensors():
                    yield _PART_NAMES[name], tensor[:, :, : block.num_chunks]
                    yield "spare", tensor[:, :, block.num_chunks :]
        yield from self._exact_tensors()

    def _num_exact(self) -> int:
        if not self.is_initialized:
            return 0
        exact = self._length - sum(block.length for block in self.blocks)
        if self.prefix is not None and self.blocks:
            exact += max(min(self.prefix.num_slots, self._length) - self.blocks[0].start, 0)
        return exact

    def share(self) -> Iterator[torch.Tensor]:
        """
        Every tensor that a copy of this layer may have in common with it, as neither writes to it from now on: what is
        compressed, and the exact tokens in front.
        """
        self.settle_prompt()
        # Further decode chunks would be written into the room that it has left
        self._open_block = None
        for block in self.blocks:
            for states in (block.keys, block.values):
                yield from (tensor for _, tensor in states.named_tensors())
        yield from self._prefix_tensors()

    def state(self) -> GEARLayerState:
        """All that it holds, as it is: nothing is copied."""
        return GEARLayerState(
            **self._exact_state(), is_open=self._open_block is not None and self._open_block.length > 0
        )

    def restore(self, state: GEARLayerState, device: torch.device) -> None:
        """Takes over what `state()` of another layer gave, on a device."""
        self._restore_exact(state)
        self.blocks = state.blocks
        self._open_block = self.blocks[-1] if state.is_open else None
        self._place_on(device)
