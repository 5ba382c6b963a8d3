"""Static layers of rows: see `static_layer`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.files.schema import MAX_INTEGER
from kvcache_plugins.formats.parts import LayerPart

from .finite_check import check_finite
from .policies import RowPolicy
from .row_device_plan import RowDevicePlan
from .row_layer import RowLayer
from .segments import RowSegment
from .static_layer import StaticLayer


class StaticRowLayer(StaticLayer[RowSegment, Codec], RowLayer):
    """
    A `RowLayer` whose next token changes no address.

    Args:
        policy, layer_idx, attention_mask: see `CompressedLayer`.
        max_length (`int`, *optional*): see `StaticLayer`.
    """

    def __init__(
        self,
        policy: RowPolicy,
        layer_idx: int,
        attention_mask: torch.Tensor | None = None,
        max_length: int | None = None,
    ) -> None:
        super().__init__(policy, layer_idx, attention_mask)
        self.max_length = max_length

    def _explain_packing(self, triton: ModuleType) -> str | None:
        head_dim = max(self._shapes["keys"][3], self._shapes["values"][3])
        if not triton.has_room(self._unfitted.shared_formats, self.device, self.dtype):
            reason: str = triton.TOO_LARGE
            return reason
        if not triton.can_encode(self.dtype, head_dim):
            return f"none encodes heads of {head_dim} channels in {self.dtype}"
        return None

    def _num_added(self, num_recent: int) -> int:
        num_packed = super()._num_added(num_recent)
        return self._num_to_requantize(num_recent + num_packed) if self.policy.recent_length else num_packed

    def _check_segment(self, segment: RowSegment, first: int) -> None:
        assert self.codec is not None and self.storage.tail is not None
        rows = slice(first, segment.length)
        overflow = self.codec.overflow(segment.keys[:, :, rows], segment.values[:, :, rows])
        assert overflow is not None
        nothing = self.storage.tail.keys[:, :, :0]
        check_finite(nothing, nothing, None, self.layer_idx, overflow=overflow.any())

    @property
    def _next_fit(self) -> int:
        """See `RowLayer._next_fit`. With reserved capacity prompts alone fit a codec, as no graph can."""
        if self.max_length is not None and self._uncommitted_prompt is None:
            return MAX_INTEGER
        return super()._next_fit

    def _can_push(self) -> bool:
        return self._unfitted_sequences is None and super()._can_push()

    def _most_packed(self) -> int:
        """Rows that the open segment gets at once, at most."""
        return self._num_packed_at_once + self.policy.recent_length - self.policy.num_recent_kept

    def _empty_segment(self, start: int, *, is_recent: bool) -> RowSegment:
        shape = self.batch_size, self._shapes["keys"][1], 0
        keys, values = (
            torch.zeros(*shape, size, dtype=torch.uint8, device=self.device)
            for size in self._codec_of(is_recent).row_sizes
        )
        return RowSegment(keys, values, start, 0, is_recent)

    def _reserve_open(self) -> RowSegment:
        segments = self.storage.segments
        has_recent = segments[-1].is_recent
        place = len(segments) - has_recent
        if place and segments[place - 1].is_open:
            opened = segments[place - 1]
        else:
            opened = self._empty_segment(segments[-1].start if has_recent else self.exact_start, is_recent=False)
            segments.insert(place, opened)
        wanted = self._capacity_for(opened, self._most_packed())
        if opened.capacity < wanted:
            opened.resize(wanted)
            self.storage.version += 1
        return opened

    def _reserve_recent(self) -> None:
        if not self.policy.recent_length:
            return
        segments = self.storage.segments
        if not segments[-1].is_recent:
            segments.append(self._empty_segment(self.exact_start, is_recent=True))
        recent = segments[-1]
        capacity = self.policy.recent_length + self._num_packed_at_once
        before = None if self._device_plan is None else self._device_plan.recent_rows
        if before is not None:
            recent.move_to(*before)
        elif not recent.is_open or recent.capacity != capacity:
            recent.resize(capacity)
        recent.is_open = True

    def _make_plan(self, parts: Sequence[LayerPart]) -> RowDevicePlan:
        assert self.codec is not None
        return RowDevicePlan(
            self.storage, self.policy, self.codec, self.padding, parts, self._length, self._count_push
        )
