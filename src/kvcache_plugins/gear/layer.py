"""One layer of a GEAR cache: when what is compressed, and attention over all of it.

The life of a token: `update` hands it out exact; a prompt is compressed right after attention has seen it, layer by
layer, so that never more than one layer's prompt is dense at a time; a decoded token waits in the buffer, and chunks
of `residual_length` are compressed at the *beginning* of the next update. A rollback (`crop`) of the newest update, as
in assisted decoding, thus always finds its tokens exact.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvcache_plugins.lazy_states import LazyLayer, LazyStates
from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.dispatch import choose_kernel
from kvcache_plugins.ops.masking import combine_masks, leading_padding, mask_columns, slice_mask
from kvcache_plugins.ops.parts import CompressedPart, DensePart

from .compression import compress_tokens, split_first_prompt
from .config import GEARConfig
from .storage import CompressedBlock, ExactBuffer, ExactPrefix


# An update of this many times `residual_length` tokens is a prompt of its own, compressed at once with the prompt's
# rank
_PROMPT_FACTOR = 4
_COUNTERS = (
    "tokens_compressed",
    "chunks_compressed",
    "fused_compressions",
    "attend_calls",
    "fused_calls",
    "kernel_fallbacks",
    "prompts_without_mask",
)
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


class GEARLayer(LazyLayer):
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

    def __init__(self, config: GEARConfig, layer_idx: int, attention_mask: torch.Tensor | None = None):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self._given_mask = attention_mask
        self._clear()

    def _clear(self) -> None:
        self.prefix: ExactPrefix | None = None
        self.blocks: list[CompressedBlock] = []
        self.buffer: ExactBuffer | None = None
        # The block that further decode chunks may join
        self._open_block: CompressedBlock | None = None
        # An update that is compressed as soon as attention has seen it
        self._pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self._sides_read: set[str] = set()
        # Left padding of every item, once a mask has shown it, `[batch_size]`
        self.padding: torch.Tensor | None = None
        self._mask_seen = False
        self._length = 0
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self.dense_reads = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.config.validate_head_dim(key_states.shape[3], value_states.shape[3])
        self.dtype, self.device = key_states.dtype, key_states.device
        self._shapes = {"keys": tuple(key_states.shape), "values": tuple(value_states.shape)}
        self.batch_size = key_states.shape[0]
        self.is_initialized = True

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Takes in new states and returns all states, lazily.

        Args:
            key_states, value_states (`torch.Tensor` of shape `[batch_size, num_heads, new tokens, head_dim]`):
                The new states, after the rotary embedding.

        Raises:
            ValueError: if states to be compressed are not finite; what is stored stays as it was.
        """
        # Lazy initialization
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if key_states.device != self.device:
            self._move_to(key_states.device)
        self._settle()
        is_first, count = self._length == 0, key_states.shape[2]
        if is_first:
            self.batch_size = key_states.shape[0]
        if is_first or count >= _PROMPT_FACTOR * self.config.residual_length:
            self._pending = (key_states, value_states)
        else:
            self._append_exact(key_states, value_states)
        self._length += count
        exact = (key_states, value_states) if is_first else (None, None)
        keys, values = (
            LazyStates(self, side, self.states_shape(side), self.dtype, self.device, states)
            for side, states in zip(("keys", "values"), exact, strict=True)
        )
        return keys, values

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
        self.on_exact_attention(attn_mask)
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
            if number == 0 and prefix is not None and not prefix.is_uniform:
                # Of shorter items the first block also spans padding and tokens that the prefix holds
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

    @property
    def _exact_start(self) -> int:
        """Position of the first token behind the compressed ones."""
        return self._length - sum(length for *_, length in self._exact_tail())

    def on_exact_attention(self, attn_mask: torch.Tensor | None) -> None:
        """Learns the padding from the mask and compresses what was waiting for it."""
        self._mask_seen = True
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            first_new = self._length - attn_mask.shape[-2]
            if first_new >= 0:
                self.padding = leading_padding(attn_mask, first_new, self.padding, self.batch_size)
        self.settle_prompt()

    def on_dense_read(self, side: str) -> None:
        super().on_dense_read(side)
        # An attention that reads both sides dense has its own references by now
        self._sides_read.add(side)
        if self._pending is not None and len(self._sides_read) == 2:
            self.settle_prompt()

    def _settle(self) -> None:
        """Compresses what the last update left to be compressed."""
        self.settle_prompt()
        self._sides_read.clear()
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

    def settle_prompt(self) -> None:
        """Compresses a prompt that no attention has seen yet, so that what is stored is complete."""
        if self._pending is None:
            return
        (keys, values), is_first = self._pending, self._length == self._pending[0].shape[2]
        self._use_given_mask()
        try:
            if is_first:
                padding = None if self.padding is None else self.padding.tolist()
                self.prefix, self.blocks = split_first_prompt(keys, values, padding, self.config, self.layer_idx)
                for block in self.blocks:
                    self._count(block)
            else:
                self._compress_later_prompt(keys, values)
        except ValueError:
            # As if the update had not been
            self._length -= keys.shape[2]
            self._pending = None
            raise
        self._pending = self._open_block = None

    def _use_given_mask(self) -> None:
        if self._given_mask is not None and not self._mask_seen and self.padding is None:
            self.padding = (self._given_mask.to(self.device).cumsum(dim=1) == 0).sum(dim=1)
        elif not self._mask_seen:
            self._counters["prompts_without_mask"] += 1

    def _compress_later_prompt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
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
            self._append_exact(keys[:, :, count:], values[:, :, count:])

    def _valid_tokens(self, start: int, count: int) -> torch.Tensor | None:
        """Which of `count` tokens from position `start` on are not padding, `[batch_size, count]`; `None` if all."""
        if self.padding is None or bool((self.padding <= start).all()):
            return None
        return torch.arange(start, start + count, device=self.device) >= self.padding.to(self.device)[:, None]

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

    def _append_exact(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.buffer is None:
            self.buffer = ExactBuffer(keys, values, self.config.residual_length)
        self.buffer.append(keys, values)

    def materialize(self, side: str) -> torch.Tensor:
        dense = torch.zeros(self.states_shape(side), dtype=self.dtype, device=self.device)
        for block in self.blocks:
            block.write_dense(side, dense)
        # After the blocks: of shorter items the first one also spans the places of these
        if self.prefix is not None:
            self.prefix.write_dense(side, dense)
        position = self._exact_start
        for keys, values, length in self._exact_tail():
            states = keys if side == "keys" else values
            dense[:, :, position : position + length] = states[:, :, :length]
            position += length
        return dense

    def crop_tokens(self, count: int) -> None:
        self.settle_prompt()
        if count == self._length:
            counters, reads = self._counters, self.dense_reads
            self._clear()
            self._counters, self.dense_reads = counters, reads
            return
        exact_start = self._exact_start
        self._length -= count
        if self.buffer is not None:
            self.buffer.drop_last(min(count, self.buffer.length))
        if self._length >= exact_start:
            return
        self.blocks = [block for block in self.blocks if block.start < self._length]
        if self.blocks and self.blocks[-1].start + self.blocks[-1].length > self._length:
            self.blocks[-1].truncate(self._length - self.blocks[-1].start)
        if self._open_block not in self.blocks or not self.blocks[-1].is_full:
            self._open_block = None
        if self.prefix is not None:
            self.prefix.truncate(self._length)

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.settle_prompt()
        for stored in (self.prefix, self.buffer, *self.blocks):
            if stored is not None:
                stored.map(function)
        if self.padding is not None:
            self.padding = function(self.padding)
        for _, tensor in self.named_tensors():
            self.batch_size = tensor.shape[0]
            break

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.settle_prompt()
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
        if self.padding is not None:
            yield "index", self.padding

    def num_values(self) -> int:
        if not self.is_initialized:
            return 0
        return sum(shape[0] * shape[1] * shape[2] * shape[3] for shape in map(self.states_shape, ("keys", "values")))

    def states_shape(self, side: str) -> tuple[int, int, int, int]:
        _, num_heads, _, head_dim = self._shapes[side]
        return self.batch_size, num_heads, self._length, head_dim

    def get_seq_length(self) -> int:
        return self._length

    def stats(self) -> dict[str, int]:
        exact = 0 if not self.is_initialized else self._length - sum(block.length for block in self.blocks)
        return {
            "tokens_cached": self._length,
            "tokens_exact": exact,
            **self._counters,
            "dense_reads": self.dense_reads,
        }

    def reset(self) -> None:
        self._clear()
        self.is_initialized = False

    def _move_to(self, device: torch.device) -> None:
        self.device = device
        self.map_tensors(lambda tensor: tensor.to(device))

    @property
    def has_open_block(self) -> bool:
        """Whether further decode chunks join the last block."""
        return self._open_block is not None

    def scalars(self) -> dict[str, Any]:
        """What a snapshot needs beside the tensors."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"length": self._length, "dtype": dtype, "shapes": self._shapes, "counters": self._counters}

    def restore(
        self,
        scalars: dict[str, Any],
        *,
        device: torch.device,
        blocks: list[CompressedBlock],
        is_open: bool,
        prefix: ExactPrefix | None,
        buffer: ExactBuffer | None,
        padding: torch.Tensor | None,
    ) -> None:
        """Takes over what a snapshot held; the counterpart of `scalars` and the stored tensors."""
        self._length, self._counters = scalars["length"], dict.fromkeys(_COUNTERS, 0) | scalars["counters"]
        self._shapes = {side: tuple(shape) for side, shape in scalars["shapes"].items()}
        self.dtype, self.device = getattr(torch, scalars["dtype"]), device
        self.blocks, self.prefix, self.buffer, self.padding = blocks, prefix, buffer, padding
        self._open_block = blocks[-1] if is_open else None
        self.is_initialized = True
        self.batch_size = next(tensor.shape[0] for _, tensor in self.named_tensors())
