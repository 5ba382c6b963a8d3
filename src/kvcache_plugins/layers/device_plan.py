"""Plans of a layer's decode steps on a GPU: counters on the device, addresses that stay, and the same launches.

    [ prefix ] [ closed segments ] [ open segment, with capacity for more ] [ recent rows, if any ] [ tail ]

A push stores a token at the end of the tail; when the tail is full it first packs the oldest tokens as the layer does.
The host reads nothing from the device, so that a CUDA graph can replay a step. The host counts along where it runs the
steps itself; after replays it asks the device (`DevicePlan.counts`).

Legend: B batch, H key/value heads, D head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic
from weakref import WeakMethod

import torch

from kvcache_plugins.codecs.codec import PackingCodec
from kvcache_plugins.formats.parts import DensePart, GroupPart, LayerPart, RowPart
from kvcache_plugins.kernels.attention import PlannedAttention
from kvcache_plugins.kernels.engine import load_triton
from kvcache_plugins.kernels.masks import combine_masks, mask_columns, slice_mask

from .exact_tokens import ExactTail
from .step_plan import StepPlan
from .storage import AnySegment, LayerStorage
from .torch_contexts import without_caller_contexts


# Parts that the device can count the tokens of
CountedPart = DensePart | GroupPart | RowPart
# Launches that store a token, keys and values `[B, H, 1, D]`; the last argument is False if the tail has room for it
Push = Callable[[torch.Tensor, torch.Tensor, bool], None]


@dataclass(frozen=True)
class StepCounts:
    """Tokens in use: rows of the open segment, recent rows, tokens of the tail, and tokens of the sequence."""

    open: int
    recent: int
    tail: int
    total: int


def split_open(storage: LayerStorage[AnySegment]) -> tuple[AnySegment, AnySegment | None]:
    """Return the open segment, and recent rows if there are such."""
    segments = storage.segments
    return (segments[-2], segments[-1]) if segments[-1].is_recent else (segments[-1], None)


def count_tokens(storage: LayerStorage[Any], total: int) -> StepCounts:
    """Count tokens in use as the host knows them, `total` in the sequence."""
    opened, recent = split_open(storage)
    return StepCounts(opened.length, 0 if recent is None else recent.length, storage.tail_length, total)


def list_addresses(storage: LayerStorage[Any], codec: PackingCodec, padding: torch.Tensor | None) -> tuple[int, ...]:
    """List places and sizes of all that a plan reads and writes, and all that it knows by number."""
    assert storage.tail is not None
    tensors = [*storage.tail.storage, *codec.tensors(), *codec.shared_tensors()]
    opened, recent = split_open(storage)
    numbers = [opened.start]
    for segment in storage.segments:
        tensors += [tensor for side in segment.sides() for tensor in side.values()]
        if segment is not opened and segment is not recent:
            numbers += [segment.start, segment.length]
    if storage.prefix is not None:
        tensors += [storage.prefix.keys, storage.prefix.values, storage.prefix.count]
    if padding is not None:
        tensors.append(padding)
    return *numbers, *(number for each in tensors for number in (each.data_ptr(), *each.shape))


class DevicePlan(StepPlan, Generic[AnySegment]):
    """
    Steps by Triton's kernels, over storage that has all its capacity.

    Args:
        storage (`LayerStorage`): prefix, closed segments, the open one, recent rows if there are such, and tail.
        limit (`int`): tokens of a full tail.
        codec (`PackingCodec`): codec of the open segment.
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
        *("_attention", "_kind", "_num_heads", "_on_push", "_padding", "_parts", "_push"),
        *("addresses", "counters", "num_positions", "recent_rows", "tail_storage"),
    )

    @without_caller_contexts
    def __init__(
        self,
        storage: LayerStorage[AnySegment],
        limit: int,
        codec: PackingCodec,
        padding: torch.Tensor | None,
        packed_parts: Sequence[LayerPart],
        total: int,
        on_push: Callable[[], None],
    ) -> None:
        super().__init__(storage.version, limit)
        opened, recent = split_open(storage)
        assert storage.tail is not None
        self.tail_storage = storage.tail.tensors()
        self.recent_rows = None if recent is None else (recent.keys, recent.values)
        num_recent = 0 if recent is None else recent.capacity
        self.num_positions = opened.start + opened.capacity * opened.chunk_length + num_recent + storage.tail.capacity
        self.addresses = list_addresses(storage, codec, padding)
        batch_size, self._num_heads = self.tail_storage[0].shape[:2]
        device = self.tail_storage[0].device
        self.counters = torch.zeros(2, batch_size, self._num_heads, 4, dtype=torch.int64, device=device)
        self._padding = padding
        self._on_push = WeakMethod(on_push)
        self._parts = self._fixed_parts(storage, packed_parts, opened, recent)
        self._attention: PlannedAttention | None = None
        self._kind: tuple[object, ...] | None = None
        # Prepared now: memory that is allocated during graph capture would be the graph's
        self._push = self._prepare_push(opened)
        self.set_counts(count_tokens(storage, total))

    @abstractmethod
    def _prepare_push(self, opened: AnySegment) -> Push:
        """Prepare the launches of a push."""

    @abstractmethod
    def _part(self, segment: AnySegment) -> CountedPart:
        """Make the part of a segment without a mask."""

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

    def push(self, tail: ExactTail, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """See `StepPlan.push`. The host counts along, and leaves out launches that only a full tail needs."""
        self._push(keys, values, tail.length == self.limit)
        on_push = self._on_push()
        assert on_push is not None
        on_push()
        return True

    def push_uncounted(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a token `[B, H, 1, D]`, which the host does not count, by all launches: a graph may replay them."""
        self._push(keys, values, True)

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
        storage: LayerStorage[AnySegment],
        packed_parts: Sequence[LayerPart],
        opened: AnySegment,
        recent: AnySegment | None,
    ) -> list[tuple[CountedPart, torch.Tensor | int]]:
        """List prefix and segments with all their capacity, and the positions of their tokens or of the first."""
        starts: list[torch.Tensor | int] = []
        if storage.prefix is not None and storage.prefix.num_slots:
            starts.append(storage.prefix.positions)
        starts += [segment.start for segment in storage.segments if segment.length]
        parts: list[tuple[Any, torch.Tensor | int]] = list(zip(packed_parts, starts, strict=True))
        if recent is not None and recent.length:
            parts.pop()
        newest = parts.pop()[0] if opened.length else self._part(opened)
        parts.append((self._counted(newest, opened.capacity * opened.chunk_length, 0), opened.start))
        return parts

    def _counted(self, part: CountedPart, capacity: int, counter: int) -> CountedPart:
        """Return a part of all capacity, whose tokens in use the device counts."""
        num_tokens = self.counters[0, 0, 0, counter : counter + 1]
        return replace(part, length=capacity, num_tokens=num_tokens, mask=slice_mask(part.mask, 0, capacity))

    def parts(self, mask: torch.Tensor | None) -> list[CountedPart]:
        """List everything held, with its columns of a mask over all positions."""
        parts: list[CountedPart] = []
        for part, where in self._parts:
            if isinstance(where, torch.Tensor):
                columns = None if mask is None else mask_columns(mask, where, len(where), mask.shape[-1])
            else:
                columns = slice_mask(mask, where, where + part.length)
            if part.mask is not None:
                columns = combine_masks(columns, part.mask[:, 0, 0])
            parts.append(replace(part, mask=columns))
        exact_start = self.total - self.counters[0, 0, 0, 2]
        parts += self._recent_parts(mask, exact_start)
        keys, values = self.tail_storage
        columns = columns_from(mask, exact_start, keys.shape[2])
        return [*parts, DensePart(keys, values, keys.shape[2], columns, self.counters[0, 0, 0, 2:3])]

    def _recent_parts(self, mask: torch.Tensor | None, exact_start: torch.Tensor) -> list[CountedPart]:
        """List the part of recent rows, which end at position `exact_start` `[]`, if there is one."""
        return []


def columns_from(mask: torch.Tensor | None, start: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return `count` columns of a mask from a position `[]` on that the device counts; the last one is repeated."""
    if mask is None:
        return None
    columns = start + torch.arange(count, dtype=torch.int64, device=start.device)
    return mask.index_select(3, columns.clamp(max=mask.shape[3] - 1))
