"""Storage of a layer: which tokens it holds, and in which form.

[ prefix: exact, first tokens ] [ segments: packed, the last perhaps with more bits ] [ tail: exact, newest ]
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from .exact_tokens import ExactPrefix, ExactTail, TensorFunction
from .segments import Segment


AnySegment = TypeVar("AnySegment", bound=Segment[Any])


class LayerStorage(Generic[AnySegment]):
    """
    Attributes:
        prefix (`ExactPrefix`, *optional*): first tokens of each sequence.
        segments (`list[Segment]`): packed tokens in order; the last may be recent ones.
        tail (`ExactTail`, *optional*): newest tokens.
        first_held (`int`): position before which all tokens were evicted.
        version (`int`): raised by whatever moves, drops or reallocates tokens of prefix and segments.
    """

    prefix: ExactPrefix | None
    segments: list[AnySegment]
    tail: ExactTail | None

    def __init__(self) -> None:
        self.segments = []
        self.tail = None
        self.first_held = 0
        self.version = 0
        self.set_prefix(None)

    def copy(self) -> LayerStorage[AnySegment]:
        """Return a storage of the same tensors; to pack, drop or map tokens of one does not change the other."""
        other: LayerStorage[AnySegment] = copy.copy(self)
        other.segments = list(map(copy.copy, self.segments))
        other.prefix, other.tail = copy.copy(self.prefix), copy.copy(self.tail)
        return other

    def set_prefix(self, prefix: ExactPrefix | None, stop: int | None = None) -> None:
        """Replace the prefix, which ends at `stop`: asked of the device if it is not given."""
        self.prefix = prefix
        # Segments may span tokens of the prefix before this position
        self.prefix_stop = 0 if prefix is None else prefix.stop() if stop is None else stop
        self.version += 1

    @property
    def newest(self) -> AnySegment | None:
        """The last segment."""
        return self.segments[-1] if self.segments else None

    @property
    def tail_length(self) -> int:
        """Tokens in the tail."""
        return 0 if self.tail is None else self.tail.length

    def add(self, segment: AnySegment, most: int | None) -> None:
        """
        Append packed tokens that follow, to the last segment if both are open and of one kind; see `Segment.append`
        for `most`. Tokens that do not follow at once replace all others: a window has passed them.
        """
        self.version += 1
        newest = self.newest
        if newest is not None and segment.start > newest.stop:
            self.segments = []
            newest = None
        if newest is not None and newest.is_recent == segment.is_recent:
            if newest.is_recent and not newest.is_open:
                # There is one segment of recent rows; a copy of the layer may share it
                newest.resize(newest.length + segment.length)
                newest.is_open = True
            if newest.is_open and segment.is_open:
                newest.append(segment, most)
                return
        self.segments.append(segment)

    def drop_newest(self, stop: int, tail_start: int) -> None:
        """Drop tokens at position `stop` and beyond; the tail begins at `tail_start`."""
        if self.tail is not None:
            self.tail.drop_last(self.tail.length - max(stop - tail_start, 0))
        if stop >= tail_start:
            return
        self.segments = [segment for segment in self.segments if segment.start < stop]
        newest = self.newest
        if newest is not None and newest.stop > stop:
            newest.truncate(stop - newest.start)
        if self.prefix is not None:
            self.prefix.truncate(stop)
            self.prefix_stop = min(self.prefix_stop, stop)

    def mark_evicted(self, position: int, *, keeps_prefix: bool) -> None:
        """Record that tokens before `position` were evicted; drop the prefix if it ends there."""
        self.first_held = max(position, self.first_held)
        if self.prefix is not None and not keeps_prefix and self.prefix.stop() <= position:
            self.set_prefix(None)

    def close(self) -> None:
        """Close all segments: copies may share them, so that nothing is written into their spare capacity."""
        for segment in self.segments:
            segment.is_open = False

    def map(self, function: TensorFunction) -> None:
        """Replace every stored tensor by `function` of it."""
        for stored in (self.prefix, self.tail, *self.segments):
            if stored is not None:
                stored.map(function)

    def segment_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield category and tensor of packed tokens."""
        for segment in self.segments:
            yield from segment.named_tensors()

    def exact_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield category and tensor of exact tokens."""
        if self.tail is not None:
            yield from (("residual", tensor) for tensor in self.tail.tensors())
        if self.prefix is not None:
            yield from (("residual", tensor) for tensor in (self.prefix.keys, self.prefix.values))
            yield from (("index", tensor) for tensor in (self.prefix.start, self.prefix.count))
