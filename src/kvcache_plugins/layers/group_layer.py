"""Layers that pack tokens in chunks, whose groups share scales.

    [ prefix ] [ one chunk of the prompt ] [ chunks of decoded tokens ] [ tail: exact, newest ]

Prompts of a batch end together, so groups are counted back from the end; tokens left over at the beginning stay exact
in the prefix.

Legend: B batch, H key/value heads, T tokens, D head dim.
"""

from __future__ import annotations

import torch

from kvcache_plugins.codecs.groups import GroupCodec
from kvcache_plugins.formats.parts import GroupPart
from kvcache_plugins.kernels.engine import MAX_NUM_COMPILED_QUERIES

from .compressed_layer import CompressedLayer
from .exact_tokens import ExactPrefix
from .finite_check import check_finite
from .layer_state import LayerState, restore_group_segments
from .policies import GroupPolicy
from .segments import GroupSegment


class GroupLayer(CompressedLayer[GroupSegment, GroupCodec]):
    """A layer of chunks. See `CompressedLayer` for its arguments."""

    policy: GroupPolicy
    max_compiled_queries = MAX_NUM_COMPILED_QUERIES

    def _commit(self, keys: torch.Tensor, values: torch.Tensor, *, is_prompt: bool) -> None:
        num_exact = keys.shape[2]
        is_first = self.codec is None
        first = self._length - num_exact
        first_end = None
        if is_first:
            first, first_end = self._begin(keys, values)
        if self.padding is not None:
            first = min(max(first, self._left_padding.ends()[0]), self._length)
        skipped = num_exact - (self._length - first)
        count = self._num_packed(self._length - first, is_prompt=is_prompt)
        if count:
            tokens = slice(skipped, skipped + count)
            self._pack(keys[:, :, tokens], values[:, :, tokens], first, first_end, is_prompt=is_prompt)
        self._set_tail(keys, values, num_exact - skipped - count)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Make the prefix of a first prompt; return the first packed position, and `[B]` where the prefix ends."""
        length = keys.shape[2]
        check_finite(keys, values, self._left_padding.valid_tokens(0, length, self.device), self.layer_idx)
        padding = self._left_padding.on_host(self.batch_size)
        num_real = [length - count for count in padding.tolist()]
        num_packed = [self._num_packed(count, is_prompt=True) for count in num_real]
        # Tokens beyond whole groups, and sinks; padding may be longer than the sequence so far
        num_exact = [
            max(real - packed, min(self.policy.num_sink_tokens, real), 0)
            for real, packed in zip(num_real, num_packed, strict=True)
        ]
        counts = torch.tensor(num_exact, dtype=torch.int64, device="cpu")
        end = padding + counts
        self.codec = self._unfitted
        self.storage.set_prefix(ExactPrefix.of(keys, values, padding, counts), int(end.max()))
        return length - max(num_packed), end

    def _num_packed(self, count: int, *, is_prompt: bool) -> int:
        """Number of the first of `count` exact tokens that are packed."""
        if not is_prompt:
            return count - count % self.policy.residual_length
        group = self.policy.least_tokens
        if count < group:
            return 0
        return count - count % group if self.policy.has_whole_groups else count

    def _pack(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, first_end: torch.Tensor | None, *, is_prompt: bool
    ) -> None:
        """
        Encode tokens from position `start` on. The prefix of a first prompt ends at `first_end` `[B]`, on the CPU.
        """
        assert self.codec is not None
        length = keys.shape[2]
        valid = self._mark_packable(start, keys, first_end)
        num_chunks = 1 if is_prompt else length // self.policy.residual_length
        try:
            chunks = self.codec.encode(keys, values, valid, num_chunks=num_chunks, is_prompt=is_prompt)
        except ValueError as error:
            # The codec notices, and this says, what is not finite
            check_finite(keys, values, valid, self.layer_idx)
            raise ValueError(f"layer {self.layer_idx}: {error}") from error
        self.storage.add(GroupSegment(*chunks, start, length, is_open=not is_prompt), None)
        self._counters["tokens_compressed"] += length
        self._counters["chunks_compressed"] += num_chunks

    def _part(self, segment: GroupSegment, mask: torch.Tensor | None) -> GroupPart:
        return GroupPart(segment.keys, segment.values, segment.length, mask)

    def _restore_packed(self, state: LayerState, path: str) -> tuple[GroupCodec | None, list[GroupSegment]]:
        return restore_group_segments(state, self.policy, path)
