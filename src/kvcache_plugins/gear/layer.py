"""One layer of a GEAR cache: when what is compressed, and attention over all of it.

The life of a token: `update` hands it out exact; a prompt is compressed right after attention has seen it, layer by
layer, so that never more than one layer's prompt is dense at a time; a decoded token waits in the buffer, and chunks
of `residual_length` are compressed at the *beginning* of the next update. A rollback (`crop`) of the newest update, as
in assisted decoding, thus always finds its tokens exact.
"""

from collections.abc import Callable, Collection, Iterator

import torch

from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.layers.residual_buffer import ResidualBuffer
from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.dispatch import choose_kernel
from kvcache_plugins.ops.masking import combine_masks, mask_columns, slice_mask
from kvcache_plugins.ops.parts import CompressedPart, DensePart

from .compression import compress_tokens, split_first_prompt
from .config import GEARConfig
from .dense_tiles import dense_tiles
from .layer_state import GEARLayerState
from .storage import CompressedBlock, ExactPrefix


# An update of this many times `residual_length` tokens is a prompt of its own, compressed at once with the prompt's
# rank
_PROMPT_FACTOR = 4
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


class GEARLayer(PromptLayer):
    """
    Keys and values of one layer, compressed as in [GEAR](https://huggingface.co/papers/2403.05527).

    Args:
        config (`GEARConfig`):
            What to compress to.
        layer_idx (`int`):
            Index of the layer, named in errors.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            The prompt's padding mask, for attention implementations that do not show it to the cache.
    """

    counter_names = (
        "tokens_compressed",
        "chunks_compressed",
        "fused_compressions",
        "attend_calls",
        "fused_calls",
        "written_out_calls",
        "kernel_fallbacks",
        "prompts_without_mask",
    )

    def __init__(self, config: GEARConfig, layer_idx: int, attention_mask: torch.Tensor | None = None):
        self.config = config
        super().__init__(layer_idx, attention_mask)

    def _clear(self) -> None:
        super()._clear()
        self.prefix: ExactPrefix | None = None
        self.blocks: list[CompressedBlock] = []
        self.buffer: ResidualBuffer | None = None
        # The block that further decode chunks may join
        self._open_block: CompressedBlock | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.config.validate_head_dim(key_states.shape[3], value_states.shape[3])
        super().lazy_initialization(key_states, value_states)

    def _is_prompt(self, count: int) -> bool:
        return count >= _PROMPT_FACTOR * self.config.residual_length

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
        self._learn_padding(None if is_causal else attn_mask)
        self.settle_prompt()
        return output

    def _parts(self, attn_mask: torch.Tensor | None) -> Iterator[DensePart | CompressedPart]:
        """Everything held, each token once, with its columns of the mask."""
        prefix = self.prefix
        if prefix is not None and prefix.num_slots:
            mask = None
            if attn_mask is not None:
                mask = mask_columns(attn_mask, prefix.positions, self.batch_size, self._length)
            mask = mask if prefix.is_uniform else combine_masks(mask, prefix.in_use)
            yield DensePart(prefix.keys, prefix.values, prefix.num_slots, mask)
        for number, block in enumerate(self.blocks):
            stop = block.start + block.length
            mask = slice_mask(attn_mask, block.start, stop)
            if number == 0 and prefix is not None and (not prefix.is_uniform or prefix.num_slots > block.start):
                # The first block may also span tokens that the prefix holds, and padding of shorter items
                columns = torch.arange(block.start, stop, device=self.device)
                mask = combine_masks(mask, columns >= prefix.end[:, None])
            yield CompressedPart(block.keys, block.values, block.length, mask)
        position = self._exact_start
        for keys, values, length in self._exact_tail():
            yield DensePart(keys, values, length, slice_mask(attn_mask, position, position + length))
            position += length

    def _exact_tail(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Keys, values and their tokens in use, of what stands behind the compressed ones."""
        if self.buffer is not None and self.buffer.length:
            yield *self.buffer.tensors(), self.buffer.length
        if self._pending is not None:
            yield *self._pending, self._pending[0].shape[2]

    def _exact_states(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        prefix, buffer = self.prefix, self.buffer
        if self.blocks or buffer is None:
            return None
        if prefix is None or prefix.num_slots == 0:
            return buffer.keys, buffer.values
        if not prefix.is_uniform:
            return None
        pairs = ((prefix.keys, buffer.keys), (prefix.values, buffer.values))
        keys, values = (torch.cat([old.to(new.dtype), new], dim=2) for old, new in pairs)
        return keys, values

    @property
    def _exact_start(self) -> int:
        """Position of the first token behind the compressed ones."""
        return self._length - sum(length for *_, length in self._exact_tail())

    def _before_update(self) -> None:
        """Compresses the chunks that the last update has filled."""
        chunk_length, buffer = self.config.residual_length, self.buffer
        if buffer is None or buffer.length < chunk_length:
            return
        num_chunks = buffer.length // chunk_length
        count = num_chunks * chunk_length
        states = buffer.keys[:, :, :count], buffer.values[:, :, :count]
        block = self._compress(*states, self._exact_start, num_chunks, is_prompt=False)
        if self._open_block is None:
            self._open_block = block
            self.blocks.append(block)
        else:
            self._open_block.append(block)
        buffer.drop_first(count)

    def _store_prompt(self, keys: torch.Tensor, values: torch.Tensor, *, is_first: bool) -> None:
        if is_first:
            padding = None if self.padding is None else self.padding.tolist()
            self.prefix, self.blocks = split_first_prompt(keys, values, padding, self.config, self.layer_idx)
            for block in self.blocks:
                self._count(block)
        else:
            self._compress_later_prompt()
        self._open_block = None

    def _compress_later_prompt(self) -> None:
        """
        Compresses a long update together with the buffer before it; tokens beyond a whole number of groups become the
        buffer.
        """
        tail = list(self._exact_tail())
        keys = torch.cat([keys[:, :, :length] for keys, _, length in tail], dim=2)
        values = torch.cat([values[:, :, :length] for _, values, length in tail], dim=2)
        start = self._length - keys.shape[2]
        count = self.config.num_compressible(keys.shape[2])
        self.blocks.append(self._compress(keys[:, :, :count], values[:, :, :count], start, 1, is_prompt=True))
        self.buffer = None
        if count < keys.shape[2]:
            self._append(keys[:, :, count:], values[:, :, count:])

    def _compress(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, num_chunks: int, *, is_prompt: bool
    ) -> CompressedBlock:
        """
        A block of consecutive tokens `[B, H, tokens, D]` from position `start` on; changes nothing of what is stored.
        """
        valid = self._valid_tokens(start, keys.shape[2])
        block = compress_tokens(
            keys, values, valid, start, num_chunks, self.config, self.layer_idx, is_prompt=is_prompt
        )
        self._count(block)
        return block

    def _count(self, block: CompressedBlock) -> None:
        self._counters["tokens_compressed"] += block.length
        self._counters["chunks_compressed"] += block.num_chunks
        self._counters["fused_compressions"] += block.is_fused * block.num_chunks

    def _append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.buffer is None:
            self.buffer = ResidualBuffer(keys, values, self.config.residual_length)
        self.buffer.append(keys, values)

    def materialize(self, side: str) -> torch.Tensor:
        if not self._length:
            return torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        return torch.cat([tile[side] for _, tile in self.dense_tiles({side})], dim=2)

    def dense_tiles(self, sides: Collection[str]) -> Iterator[tuple[slice, dict[str, torch.Tensor]]]:
        blocks = self.blocks
        held = self.prefix, blocks, self._exact_tail(), self._exact_start
        return dense_tiles(sides, self.states_shape, *held, self.dtype, self.device)

    def _drop_newest(self, count: int) -> None:
        exact_start, length = self._exact_start, self._length - count
        if self.buffer is not None:
            self.buffer.drop_last(min(count, self.buffer.length))
        if length >= exact_start:
            return
        self.blocks = [block for block in self.blocks if block.start < length]
        if self.blocks and self.blocks[-1].start + self.blocks[-1].length > length:
            self.blocks[-1].truncate(length - self.blocks[-1].start)
        if self._open_block not in self.blocks or not self.blocks[-1].is_full:
            self._open_block = None
        if self.prefix is not None:
            self.prefix.truncate(length)

    def _map_stored(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)

    def _stored_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for block in self.blocks:
            for states in (block.keys, block.values):
                for name, tensor in states.named_tensors():
                    yield _PART_NAMES[name], tensor[:, :, : block.num_chunks]
                    yield "spare", tensor[:, :, block.num_chunks :]
        if self.buffer is not None:
            for tensor in self.buffer.tensors():
                yield "residual", tensor
        if self.prefix is not None:
            yield from (("residual", self.prefix.keys), ("residual", self.prefix.values))
            yield from (("index", self.prefix.start), ("index", self.prefix.count))

    def stats(self) -> dict[str, int]:
        exact = 0
        if self.is_initialized:
            exact = self._length - sum(block.length for block in self.blocks)
            if self.prefix is not None and self.blocks:
                exact += max(min(self.prefix.num_slots, self._length) - self.blocks[0].start, 0)
        return {
            "tokens_cached": self._length,
            "tokens_exact": exact,
            **self._counters,
            "dense_reads": self.dense_reads,
        }

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
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.values, self.prefix.start, self.prefix.count)

    def state(self) -> GEARLayerState:
        """All that it holds, as it is: nothing is copied."""
        self.settle_prompt()
        (batch_size, num_heads, _, key_head_dim), value_head_dim = self.states_shape("keys"), self._shapes["values"][3]
        return GEARLayerState(
            dtype=self.dtype,
            batch_size=batch_size,
            num_heads=num_heads,
            key_head_dim=key_head_dim,
            value_head_dim=value_head_dim,
            length=self._length,
            counters=dict(self._counters),
            prefix=self.prefix,
            blocks=self.blocks,
            is_open=self._open_block is not None,
            buffer=self.buffer,
            padding=self.padding,
        )

    def restore(self, state: GEARLayerState, device: torch.device) -> None:
        """Takes over what `state()` of another layer gave, on a device."""
        self._length, self._counters = state.length, dict.fromkeys(self.counter_names, 0) | state.counters
        heads = state.batch_size, state.num_heads, state.length
        self._shapes = {"keys": (*heads, state.key_head_dim), "values": (*heads, state.value_head_dim)}
        self.dtype, self.device, self.batch_size = state.dtype, device, state.batch_size
        self.prefix, self.blocks, self.buffer, self.padding = state.prefix, state.blocks, state.buffer, state.padding
        self._open_block = self.blocks[-1] if state.is_open else None
        self.is_initialized = True
        if any(tensor.device != device for _, tensor in self.named_tensors()):
            self.map_tensors(lambda tensor: tensor.to(device))
