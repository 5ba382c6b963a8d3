"""What a layer of blocks is asked for its steps to be replayed: to stand still, and to count what was replayed.

See `fixed_storage`, which does the moving, and `step_cache`, which stands for the layer while a step is recorded.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.kernels.masks import slice_mask
from kvcache_plugins.layers.residual_buffer import ResidualBuffer

from .block_layer import BlockLayerMixin
from .storage import BlockT


class ReplayableMixin(BlockLayerMixin[BlockT]):
    """A `BlockLayerMixin` whose steps of one token can be replayed."""

    @abstractmethod
    def open_block(self) -> BlockT:
        """The last block, which the next decoded tokens join; made without tokens where there is none."""

    def coded_by(self) -> object:
        """What says how tokens are coded, if anything does that may come to be another."""
        return None

    def is_replayable(self) -> bool:
        """Whether a step of one token would only be stored in the buffer, and attended to with compressed tokens."""
        if not self.is_initialized or self._pending is not None or self._needs_queries:
            return False
        first = next((block for block in self.blocks if block.length), None)
        # Padding is of the first prompt, and hidden by masks of its own part
        return first is not None and (
            self.padding is None or int(self.padding.max()) <= first.start + first.length <= self._exact_start
        )

    def why_never_replayed(self) -> str | None:
        """What of the layer cannot be replayed, if anything."""
        return "layers of indexed sparse attention" if any(True for _ in self._index.tensors()) else None

    def stand_still(self, buffer: ResidualBuffer, num_tokens: int) -> BlockT:
        """
        Moves what is exact at the end to an empty buffer, and has room for so many tokens more in the block that they
        join, which is returned.
        """
        held = self.buffer
        if held is not None and held is not buffer and held.length:
            buffer.append(held.keys, held.values)
        self.buffer = buffer
        open_block = self.open_block()
        self.blocks = [block for block in self.blocks if block.length or block is open_block]
        if open_block.capacity() < open_block.length + num_tokens:
            open_block.reserve(open_block.length + num_tokens)
        self._prepared = None
        return open_block

    def move_on(self, buffer: ResidualBuffer | None) -> None:
        """Gives the room of blocks back, and goes on with another buffer of the same tokens."""
        self._prepared = None
        self.buffer = buffer
        newest = self.blocks[-1] if self.blocks else None
        self.blocks = [block for block in self.blocks if block.length]
        self._after_cut(newest)
        if self.blocks:
            self.blocks[-1].reserve(self.blocks[-1].length)

    def places(self) -> Iterator[object]:
        """Whatever would be another if something stood elsewhere."""
        yield from (self.padding, self.buffer, self.coded_by())
        for block in self.blocks:
            yield from (block, block.keys)
        if self.prefix is not None:
            yield from (self.prefix.keys, self.prefix.count)

    def closed_lengths(self) -> list[int]:
        """Tokens of the blocks that no tokens join."""
        return [block.length for block in self.blocks[:-1]]

    def is_waiting(self) -> bool:
        """Whether the next token is stored with nothing done before it."""
        return self._pending is None and not self._is_buffer_full()

    def step_parts(self, stored: torch.Tensor) -> list[Any]:
        """All compressed parts, the last one with all its room, of which `stored` `[1]` tokens are in use."""
        parts, block = list(self._compressed_parts(None)), self.blocks[-1]
        last = parts.pop() if block.length else self._block_part(block, None)
        parts.append(dataclasses.replace(last, length=block.capacity(), num_tokens=stored, kept={}))
        # With all columns, so that no step makes them
        return [dataclasses.replace(part, mask=slice_mask(part.mask, 0, part.length)) for part in parts]

    def attend_in_step(self, query: torch.Tensor, parts: Sequence[Any], scale: float | None) -> torch.Tensor:
        """Attention over parts whose lengths are on the device, which is read where that costs nothing."""
        if choose_kernel(query)[0] != "triton":
            if query.device.type != "cpu":
                raise ValueError(f"`captured_steps` is not for attention of {query.shape[2]} queries a token")
            parts = [
                part if part.num_tokens is None else dataclasses.replace(part, length=int(part.num_tokens))
                for part in parts
            ]
            parts = [part for part in parts if part.length]
        return self._attend_parts(AttentionCall(query, scale=scale), iter(parts))[0]

    def count_token(self) -> None:
        """Takes down that a token has been stored and attended to."""
        assert self.buffer is not None
        self._num_new = 1
        self._length += 1
        self.buffer.length += 1
        self._counters["attend_calls"] += 1
        self._counters["fused_calls"] += 1
