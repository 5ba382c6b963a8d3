"""Plan of a layer's decode steps on a GPU: counters on the device, addresses that stay, and the same launches.

    [ prefix ] [ closed segments ] [ open segment: rows, with capacity for more ] [ recent rows ] [ tail ]

A push stores a token at the end of the tail; when the tail is full it first packs the oldest tokens as `RowLayer`
does: into recent rows, whose oldest get the bits of the open segment. The host reads nothing from the device, so that
a CUDA graph can replay a step. The host counts along where it runs the steps itself; after replays it asks the device
(`DevicePlan.counts`).

Legend: B batch, H key/value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakMethod

import torch

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.formats.parts import DensePart, LayerPart, RowPart
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.kernels.attention import PlannedAttention
from kvcache_plugins.kernels.engine import load_triton
from kvcache_plugins.kernels.masks import combine_masks, mask_columns, slice_mask

from .exact_tokens import ExactTail
from .policies import RowPolicy
from .segments import RowSegment
from .step_plan import StepPlan
from .storage import LayerStorage
from .torch_contexts import without_caller_contexts


@dataclass(frozen=True)
class StepCounts:
    """Tokens in use: rows of the open segment, recent rows, tokens of the tail, and tokens of the sequence."""

    open: int
    recent: int
    tail: int
    total: int


def split_open(storage: LayerStorage[RowSegment], policy: RowPolicy) -> tuple[RowSegment, RowSegment | None]:
    """Return the open segment, and the recent rows if the policy has such."""
    segments = storage.segments
    return (segments[-2], segments[-1]) if policy.recent_length else (segments[-1], None)


def count_tokens(storage: LayerStorage[RowSegment], policy: RowPolicy, total: int) -> StepCounts:
    """Count tokens in use as the host knows them, `total` in the sequence."""
    opened, recent = split_open(storage, policy)
    return StepCounts(opened.length, 0 if recent is None else recent.length, storage.tail_length, total)


def list_addresses(
    storage: LayerStorage[RowSegment], policy: RowPolicy, codec: RowCodec, padding: torch.Tensor | None
) -> tuple[int, ...]:
    """List places and sizes of all that a plan reads and writes, and all that it knows by number."""
    assert storage.tail is not None
    tensors = [*storage.tail.storage, *codec.tensors(), *codec.shared_tensors()]
    opened, recent = split_open(storage, policy)
    numbers = [opened.start]
    for segment in storage.segments:
        tensors += [segment.keys, segment.values]
        if segment is not opened and segment is not recent:
            numbers += [segment.start, segment.length]
    if storage.prefix is not None:
        tensors += [storage.prefix.keys, storage.prefix.values, storage.prefix.count]
    if padding is not None:
        tensors.append(padding)
    return *numbers, *(number for each in tensors for number in (each.data_ptr(), *each.shape))


class DevicePlan(StepPlan):
    """
    Steps by Triton's kernels, over storage that has all its capacity.

    Args:
        storage (`LayerStorage[RowSegment]`): prefix, closed segments, the open one, recent rows if there are such,
            and tail.
        policy (`RowPolicy`): when tokens are packed.
        codec (`RowCodec`): codec of the open segment.
        padding (`torch.Tensor` of shape `[B]`, *optional*): left padding.
        packed_parts (`Sequence[LayerPart]`): prefix and segments in use, with the masks of their own.
        total (`int`): tokens of the sequence.
        on_push (`Callable`): method that is called when the host has pushed a token; held weakly.

    Attributes:
        counters (`torch.Tensor` of shape `[2, B, H, 4]`, int64): `StepCounts`, for each program that counts.
        num_positions (`int`): bound on positions that fit into the capacity.
        addresses (`tuple[int, ...]`): see `list_addresses`.
        tail_storage, recent_rows (two `torch.Tensor`): storage of the tail and of recent rows, with all capacity.
    """

    __slots__ = (
        *("_attention", "_kind", "_num_heads", "_on_push", "_padding", "_parts", "_push", "_recent_offset"),
        *("_recent_part", "addresses", "counters", "num_positions", "recent_rows", "tail_storage"),
    )

    @without_caller_contexts
    def __init__(
        self,
        storage: LayerStorage[RowSegment],
        policy: RowPolicy,
        codec: RowCodec,
        padding: torch.Tensor | None,
        packed_parts: Sequence[LayerPart],
        total: int,
        on_push: Callable[[], None],
    ) -> None:
        super().__init__(storage.version, policy.residual_length)
        opened, recent = split_open(storage, policy)
        assert storage.tail is not None
        self.tail_storage = storage.tail.tensors()
        self.recent_rows = None if recent is None else (recent.keys, recent.values)
        num_recent = 0 if recent is None else recent.capacity
        self.num_positions = opened.start + opened.capacity + num_recent + storage.tail.capacity
        self.addresses = list_addresses(storage, policy, codec, padding)
        batch_size, self._num_heads = self.tail_storage[0].shape[:2]
        device = self.tail_storage[0].device
        self.counters = torch.zeros(2, batch_size, self._num_heads, 4, dtype=torch.int64, device=device)
        self._recent_offset = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._padding = padding
        self._on_push = WeakMethod(on_push)
        self._parts = self._fixed_parts(storage, packed_parts, opened, recent, codec)
        finer = codec.with_more_bits(policy.recent_nbits) if policy.recent_length else None
        self._recent_part = None if finer is None else self._part_of_recent(finer)
        self._attention: PlannedAttention | None = None
        self._kind: tuple[object, ...] | None = None
        self.set_counts(count_tokens(storage, policy, total))
        self._push = self._prepare_push(policy, opened, codec, finer)

    def _prepare_push(
        self, policy: RowPolicy, opened: RowSegment, codec: RowCodec, finer: RowCodec | None
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """Prepare the launch of a push now: memory that is allocated during graph capture would be the graph's."""
        triton, device = load_triton(), opened.keys.device
        state = triton.PushState(
            tail=self.tail_storage,
            older=(opened.keys, opened.values),
            recent=self.recent_rows,
            counters=self.counters,
            recent_offset=None if finer is None else self._recent_offset,
            formats=codec.formats(device),
            finer_formats=None if finer is None else finer.formats(device),
            padding=self._padding,
            num_kept=policy.num_kept,
            most_recent=policy.recent_length,
            num_after=policy.num_recent_kept,
            num_positions=self.num_positions,
            start=self.num_positions,
        )
        push: Callable[[torch.Tensor, torch.Tensor], None] | None = triton.prepare_push(state)
        assert push is not None, "the layer has asked if kernels encode its states"
        return push

    @property
    def total(self) -> torch.Tensor:
        """Tokens of the sequence, `[]`."""
        return self.counters[0, 0, 0, 3]

    def counts(self) -> StepCounts:
        """Read the counters. The host waits for the device."""
        return StepCounts(*self.counters[0, 0, 0].tolist())

    def set_counts(self, counts: StepCounts) -> None:
        """Write the counters, after the host has changed what they count."""
        numbers = [counts.open, counts.recent, counts.tail, counts.total]
        self.counters.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        offset = self.num_positions - (counts.total - counts.tail - counts.recent)
        self._recent_offset.fill_(offset)
        if self._padding is not None:
            self._recent_offset.add_(self._padding)

    def push(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """See `StepPlan.push`: in one launch, packing included. The host counts along."""
        self.push_uncounted(keys, values)
        on_push = self._on_push()
        assert on_push is not None
        on_push()
        return True

    def push_uncounted(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a token `[B, H, 1, D]`, which the host does not count: a graph may replay it."""
        self._push(keys, values)

    def attend(self, query: torch.Tensor, scale: float | None, tail: ExactTail) -> torch.Tensor | None:
        if query.shape[2] != 1:
            return None
        kind = query.shape, query.dtype, scale
        if kind != self._kind:
            self._kind = kind
            self._attention = load_triton().keep_attention(query, self.parts(None), self._num_heads, scale)
        return None if self._attention is None else self._attention(query)

    def _fixed_parts(
        self,
        storage: LayerStorage[RowSegment],
        packed_parts: Sequence[LayerPart],
        opened: RowSegment,
        recent: RowSegment | None,
        codec: RowCodec,
    ) -> list[tuple[DensePart | RowPart, torch.Tensor | int]]:
        """List prefix and rows with all their capacity, and the positions of their tokens or that of the first."""
        parts: list[Any] = list(packed_parts)
        starts: list[torch.Tensor | int] = []
        if storage.prefix is not None and storage.prefix.num_slots:
            starts.append(storage.prefix.positions)
        starts += [segment.start for segment in storage.segments if segment.length]
        if recent is not None and recent.length:
            del parts[-1], starts[-1]
        if opened.length:
            newest = parts.pop()
            del starts[-1]
        else:
            newest = codec.part(opened.keys, opened.values, Positions(opened.start, self._padding), 0, None)
        parts.append(self._counted(newest, opened.capacity, 0))
        starts.append(opened.start)
        return list(zip(parts, starts, strict=True))

    def _part_of_recent(self, finer: RowCodec) -> RowPart:
        assert self.recent_rows is not None
        keys, values = self.recent_rows
        positions = Positions(self.num_positions, self._recent_offset)
        return self._counted(finer.part(keys, values, positions, keys.shape[2], None), keys.shape[2], 1)

    def _counted(self, part: RowPart, capacity: int, counter: int) -> RowPart:
        """Return a part of all capacity, whose tokens in use the device counts."""
        num_tokens = self.counters[0, 0, 0, counter : counter + 1]
        return replace(part, length=capacity, num_tokens=num_tokens, mask=slice_mask(part.mask, 0, capacity))

    def parts(self, mask: torch.Tensor | None) -> list[DensePart | RowPart]:
        """List everything held, with its columns of a mask over all positions."""
        parts: list[DensePart | RowPart] = []
        for part, where in self._parts:
            if isinstance(where, torch.Tensor):
                columns = None if mask is None else mask_columns(mask, where, len(where), mask.shape[-1])
            else:
                columns = slice_mask(mask, where, where + part.length)
            if part.mask is not None:
                columns = combine_masks(columns, part.mask[:, 0, 0])
            parts.append(replace(part, mask=columns))
        exact_start = self.total - self.counters[0, 0, 0, 2]
        recent = self._recent_part
        if recent is not None:
            columns = _columns_from(mask, exact_start - self.counters[0, 0, 0, 1], recent.length)
            parts.append(replace(recent, mask=columns))
        keys, values = self.tail_storage
        columns = _columns_from(mask, exact_start, keys.shape[2])
        return [*parts, DensePart(keys, values, keys.shape[2], columns, self.counters[0, 0, 0, 2:3])]


def _columns_from(mask: torch.Tensor | None, start: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return `count` columns of a mask from a position `[]` on that the device counts; the last one is repeated."""
    if mask is None:
        return None
    columns = start + torch.arange(count, dtype=torch.int64, device=start.device)
    return mask.index_select(3, columns.clamp(max=mask.shape[3] - 1))
