"""Plan of a row layer's decode steps on a GPU: see `device_plan`.

A full tail is packed into recent rows, whose oldest get the bits of the open segment, as `RowLayer` does.

Legend: B batch, H key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.formats.parts import LayerPart, RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rows import RowFormats
from kvcache_plugins.kernels.engine import load_triton

from .device_plan import CountedPart, DevicePlan, Push, StepCounts, columns_from
from .policies import RowPolicy
from .segments import RowSegment
from .storage import LayerStorage


class RowDevicePlan(DevicePlan[RowSegment]):
    """Steps over rows; `policy` says when tokens are packed. See `DevicePlan` for all other arguments."""

    __slots__ = ("_codec", "_policy", "_recent_offset", "_recent_part")

    def __init__(
        self,
        storage: LayerStorage[RowSegment],
        policy: RowPolicy,
        codec: Codec,
        padding: torch.Tensor | None,
        packed_parts: Sequence[LayerPart],
        total: int,
        on_push: Callable[[], None],
    ) -> None:
        self._policy = policy
        self._codec = codec
        self._recent_part: CountedPart | None = None
        super().__init__(storage, policy.residual_length, codec, padding, packed_parts, total, on_push)

    def _part(self, segment: RowSegment) -> RowPart:
        positions = Positions(segment.start, self._padding)
        return RowPart(segment.keys, segment.values, self._formats(segment.keys.device), positions, 0, None)

    def _formats(self, device: torch.device) -> RowFormats:
        formats = self._codec.formats(device)
        assert formats is not None, "kernels read the rows of a static layer"
        return formats

    def _prepare_push(self, opened: RowSegment) -> Push:
        triton, policy = load_triton(), self._policy
        device = opened.keys.device
        self._recent_offset = torch.zeros(len(opened.keys), dtype=torch.int64, device=device)
        finer = self._codec.with_more_bits(policy.recent_nbits) if policy.recent_length else None
        finer_formats = None if finer is None else finer.formats(device)
        if finer_formats is not None:
            self._recent_part = self._part_of_recent(finer_formats)
        state = triton.PushState(
            tail=self.tail_storage,
            older=(opened.keys, opened.values),
            recent=self.recent_rows,
            counters=self.counters,
            recent_offset=None if finer_formats is None else self._recent_offset,
            formats=self._formats(device),
            finer_formats=finer_formats,
            padding=self._padding,
            num_kept=policy.num_kept,
            most_recent=policy.recent_length,
            num_after=policy.num_recent_kept,
            num_positions=self.num_positions,
            start=self.num_positions,
        )
        push: Push | None = triton.prepare_push(state)
        assert push is not None, "the layer has asked if kernels encode its states"
        return push

    def _part_of_recent(self, formats: RowFormats) -> CountedPart:
        assert self.recent_rows is not None
        keys, values = self.recent_rows
        positions = Positions(self.num_positions, self._recent_offset)
        return self._counted(RowPart(keys, values, formats, positions, keys.shape[2], None), keys.shape[2], 1)

    def set_counts(self, counts: StepCounts) -> None:
        super().set_counts(counts)
        offset = self.num_positions - (counts.total - counts.tail - counts.recent)
        self._recent_offset.fill_(offset)
        if self._padding is not None:
            self._recent_offset.add_(self._padding)

    def _recent_parts(self, mask: torch.Tensor | None, exact_start: torch.Tensor) -> list[CountedPart]:
        recent = self._recent_part
        if recent is None:
            return []
        columns = columns_from(mask, exact_start - self.counters[0, 0, 0, 1], recent.length)
        return [replace(recent, mask=columns)]
