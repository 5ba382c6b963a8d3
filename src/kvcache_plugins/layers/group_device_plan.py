"""Plan of a group layer's decode steps on a GPU: see `device_plan`.

A full tail is packed whole, as a chunk behind those of the open segment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcache_plugins.codecs.groups import GroupCodec, SideCodec
from kvcache_plugins.codecs.low_rank import starting_matrix
from kvcache_plugins.formats.parts import GroupPart, LayerPart
from kvcache_plugins.kernels.engine import load_triton

from .device_plan import DevicePlan, Push
from .segments import GroupSegment
from .storage import LayerStorage


class GroupDevicePlan(DevicePlan[GroupSegment]):
    """Steps over chunks of a `codec`. See `DevicePlan` for its arguments."""

    __slots__ = ("_codec",)

    def __init__(
        self,
        storage: LayerStorage[GroupSegment],
        limit: int,
        codec: GroupCodec,
        padding: torch.Tensor | None,
        packed_parts: Sequence[LayerPart],
        total: int,
        on_push: Callable[[], None],
    ) -> None:
        self._codec = codec
        super().__init__(storage, limit, codec, padding, packed_parts, total, on_push)

    def _part(self, segment: GroupSegment) -> GroupPart:
        return GroupPart(segment.keys, segment.values, 0, None)

    def _prepare_push(self, opened: GroupSegment) -> Push:
        triton, codec = load_triton(), self._codec
        states = self.tail_storage[1]

        def start(side: SideCodec) -> torch.Tensor | None:
            return starting_matrix(side.head_dim, side.decode_rank, states.device) if side.decode_rank else None

        state = triton.GroupPushState(
            tail=self.tail_storage,
            chunks=(opened.keys, opened.values),
            counters=self.counters,
            starts=(start(codec.keys), start(codec.values)),
            num_iterations=codec.values.num_iterations,
            spreads_errors=(codec.keys.spreads_errors, codec.values.spreads_errors),
            signs=triton.hadamard_signs(codec.values.head_dim, states) if codec.values.is_rotated else None,
        )
        push: Push = triton.prepare_group_push(state)
        return push
