"""Static layers of chunks: see `static_layer`.

Decoded tokens are packed in chunks of `residual_length`, which follow each other in the open segment. A chunk is
packed whole, so the tail is empty before the token that comes next is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.quantization import are_in_range, check_range
from kvcache_plugins.formats.groups import QuantizedChunks
from kvcache_plugins.formats.parts import LayerPart

from .group_device_plan import GroupDevicePlan
from .group_layer import GroupLayer
from .policies import GroupPolicy
from .segments import GroupSegment
from .static_layer import StaticLayer


class StaticGroupLayer(StaticLayer[GroupSegment, GroupCodec], GroupLayer):
    """
    A `GroupLayer` whose next token changes no address.

    Args:
        policy, layer_idx, attention_mask: see `CompressedLayer`.
        max_length (`int`, *optional*): see `StaticLayer`.
    """

    def __init__(
        self,
        policy: GroupPolicy,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(policy, layer_idx, attention_mask)
        self.max_length = max_length

    def _explain_packing(self, triton: ModuleType) -> str | None:
        reason: str | None = triton.explain_group_push(*self._empty_chunks(), self.dtype)
        return reason

    def _check_segment(self, segment: GroupSegment, first: int) -> None:
        chunks = slice(first // segment.chunk_length, segment.num_chunks)
        stored = [tensor[:, :, chunks] for side in segment.sides() for tensor in side.values()]
        try:
            check_range(are_in_range(*(tensor for tensor in stored if tensor.is_floating_point())))
        except ValueError as error:
            raise ValueError(
                f"layer {self.layer_idx}: {error}, or hold NaN or infinity. The chunks are stored already: `crop` the "
                "last tokens or `reset` the cache."
            ) from None

    def _empty_chunks(self) -> tuple[QuantizedChunks, QuantizedChunks]:
        """Make keys and values of no chunks of decoded tokens."""
        num_heads, length = self._shapes["keys"][1], self.policy.residual_length

        def side(codec: SideCodec) -> QuantizedChunks:
            layout = codec.layout(self.batch_size, num_heads, 0, length, codec.sizes(num_heads, length))
            return codec.wrap(
                {name: torch.zeros(shape, dtype=dtype, device=self.device) for name, (shape, dtype) in layout.items()}
            )

        return side(self._unfitted.keys), side(self._unfitted.values)

    def _reserve_open(self) -> GroupSegment:
        storage = self.storage
        opened = storage.segments[-1]
        # A chunk that the prefix reaches into has a mask, which is of its tokens alone
        if not opened.is_open or opened.length and opened.start < storage.prefix_stop:
            self._close_segments()
            opened = GroupSegment(*self._empty_chunks(), self.exact_start, 0)
            storage.segments.append(opened)
        chunk_length = opened.chunk_length
        num_chunks = -(-self._capacity_for(opened, chunk_length) // chunk_length)
        if opened.capacity < num_chunks:
            opened.resize(num_chunks)
            storage.version += 1
        return opened

    def _close_segments(self) -> None:
        """Close all segments, and free the capacity that they do not use; empty ones go."""
        storage = self.storage
        storage.segments = [segment for segment in storage.segments if segment.length]
        storage.close()
        for segment in storage.segments:
            if segment.capacity > segment.num_chunks:
                segment.resize(segment.num_chunks)
                storage.version += 1

    def _make_plan(self, parts: Sequence[LayerPart]) -> GroupDevicePlan:
        assert self.codec is not None
        return GroupDevicePlan(
            self.storage,
            self.policy.residual_length,
            self.codec,
            self.padding,
            parts,
            self._length,
            self._count_push,
        )
