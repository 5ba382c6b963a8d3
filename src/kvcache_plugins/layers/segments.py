"""Segments of a layer: consecutive packed tokens, as rows of bytes or as chunks of groups that share scales.

Legend: B batch, H key/value heads, R bytes of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvcache_plugins.codecs.codec import Codec
from kvcache_plugins.formats.groups import QuantizedChunks, keep_tokens
from kvcache_plugins.formats.rows import KeptRows

from .exact_tokens import TensorFunction


# Name of the rows of a side in a layer's state; groups have the names of `QuantizedChunks`
ROWS = "rows"
# An append of at most 1/64 of a segment's rows, which others like it will follow, also reserves room for them: about
# 1/256 of the rows. A larger one reserves nothing. Spare rows are memory too, and moving rows is cheap
_SMALL_SHARE = 64
_ROOM_SHARE = 256
# Growth of recent rows, in rows
_RECENT_STEP = 4
# Category of each stored tensor in a memory report
_CATEGORIES = {
    ROWS: "codes",
    "codes": "codes",
    "scale": "scales",
    "zero": "scales",
    "cross_scale": "scales",
    "low_rank_a": "low_rank",
    "low_rank_b": "low_rank",
    "outlier_indices": "outliers",
    "outlier_values": "outliers",
    "outlier_offsets": "outliers",
}
# Tensors of a side by name
Side = dict[str, torch.Tensor]
Stored = TypeVar("Stored")


@dataclass(eq=False)
class Segment(ABC, Generic[Stored]):
    """
    Consecutive packed tokens.

    Attributes:
        keys, values: both sides, perhaps with spare capacity.
        start (`int`): position of the first token in the sequence, padding included.
        length (`int`): tokens in use.
        is_recent (`bool`): True for the newest packed tokens, in rows of more bits.
        is_open (`bool`): True if decoded tokens may be appended. A copy of the layer may share a closed segment.
        chunk_length (`int`): tokens that are packed together.
    """

    keys: Stored
    values: Stored
    start: int
    length: int
    is_recent: bool = False
    is_open: bool = True

    @property
    @abstractmethod
    def chunk_length(self) -> int: ...

    @property
    def num_chunks(self) -> int:
        """Chunks in use; the last may not be full."""
        return -(-self.length // self.chunk_length)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.length

    @property
    def capacity(self) -> int:
        """Chunks that fit into the storage."""
        return next(iter(self.sides()[0].values())).shape[2]

    @abstractmethod
    def sides(self) -> tuple[Side, Side]:
        """Return all tensors of keys and of values by name, chunks in the third dimension, with all capacity."""

    @abstractmethod
    def map(self, function: TensorFunction) -> None:
        """Replace every stored tensor by `function` of it."""

    @abstractmethod
    def capacity_for(self, count: int, most: int | None) -> int:
        """Return the capacity in chunks to reserve when `count` tokens are appended; see `append`."""

    def append(self, segment: Segment[Stored], most: int | None) -> None:
        """Append a segment that follows; capacity beyond `most` tokens is reserved only when it is needed."""
        used = self.num_chunks
        capacity = self.capacity_for(segment.length, most)
        if capacity > self.capacity:
            self.resize(capacity)
        for mine, theirs in zip(self.sides(), segment.sides(), strict=True):
            for name, tensor in theirs.items():
                mine[name][:, :, used : used + segment.num_chunks] = tensor
        self.length += segment.length

    def resize(self, num_chunks: int) -> None:
        """Copy the chunks in use into new storage for `num_chunks`, or as many as are in use if these are more."""
        used = self.num_chunks

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.new_zeros(*tensor.shape[:2], max(num_chunks, used), *tensor.shape[3:])
            moved[:, :, :used] = tensor[:, :, :used]
            return moved

        self.map(resized)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, and free the rest; a segment cut within a chunk is closed."""
        self.length = length
        self.is_open = self.is_open and length % self.chunk_length == 0
        self.resize(self.num_chunks)

    def stored(self) -> tuple[Side, Side]:
        """Return all tensors of keys and of values by name, without spare capacity."""
        used = slice(self.num_chunks)
        keys, values = ({name: tensor[:, :, used] for name, tensor in side.items()} for side in self.sides())
        return keys, values

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield category and tensor of everything stored, spare capacity as its own category."""
        for side in self.sides():
            for name, tensor in side.items():
                yield _CATEGORIES[name], tensor[:, :, : self.num_chunks]
                yield "spare", tensor[:, :, self.num_chunks :]


@dataclass(eq=False)
class RowSegment(Segment[torch.Tensor]):
    """
    A segment of rows of bytes, one for every head of a token: keys and values are `[B, H, capacity, R]`, uint8.

    Attributes:
        codec (`Codec`, *optional*): codec of the rows, if the layer's codec was fitted again since. The segment is
            closed then.
    """

    codec: Codec | None = None

    chunk_length = 1

    def sides(self) -> tuple[Side, Side]:
        return {ROWS: self.keys}, {ROWS: self.values}

    def map(self, function: TensorFunction) -> None:
        self.keys, self.values = function(self.keys), function(self.values)

    def capacity_for(self, count: int, most: int | None) -> int:
        return self.plan_growth(count, most).capacity

    def plan_growth(self, count: int, most: int | None, num_dropped: int = 0) -> KeptRows:
        """Plan the rows that stay and the capacity when the first `num_dropped` tokens go and `count` are appended."""
        length = self.length - num_dropped
        capacity = total = length + count
        if total <= self.capacity and not num_dropped:
            return KeptRows((self.keys, self.values), 0, length, self.capacity)
        if self.is_recent:
            capacity = -(-total // _RECENT_STEP) * _RECENT_STEP
        elif count <= length // _SMALL_SHARE:
            num_appends = max(length // _ROOM_SHARE // count, 1)
            capacity += num_appends * count
        capacity = max(total, capacity if most is None else min(capacity, most))
        return KeptRows((self.keys, self.values), num_dropped, length, capacity)

    def adopt(self, rows: Sequence[torch.Tensor], growth: KeptRows, count: int) -> None:
        """Use storage that holds the retained rows of `growth` and `count` new ones behind them."""
        self.keys, self.values = rows
        self.start += growth.first
        self.length = growth.length + count

    def move_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the rows in use into other storage, which may be their own, and use that from now on."""
        for stored, rows in zip((keys, values), (self.keys, self.values), strict=True):
            stored[:, :, : self.length].copy_(rows[:, :, : self.length])
        self.keys, self.values = keys, values

    def drop_first(self, count: int) -> None:
        """Drop the first `count` tokens; copies may share the rows of before."""
        self.map(lambda rows: rows[:, :, count : self.length].clone())
        self.start += count
        self.length -= count


class GroupSegment(Segment[QuantizedChunks]):
    """
    A segment of chunks of equal length: one chunk of a prompt, or a run of decoded ones whose capacity doubles as it
    grows.
    """

    @property
    def chunk_length(self) -> int:
        return self.keys.chunk_length

    def sides(self) -> tuple[Side, Side]:
        return dict(self.keys.named_tensors()), dict(self.values.named_tensors())

    def map(self, function: TensorFunction) -> None:
        self.keys, self.values = self.keys.map(function), self.values.map(function)

    def capacity_for(self, count: int, most: int | None) -> int:
        total = self.num_chunks + count // self.chunk_length
        return total if total <= self.capacity else max(2 * self.capacity, total)

    def truncate(self, length: int) -> None:
        """See `Segment.truncate`: keeps whole chunks, or whole groups of a single chunk."""
        super().truncate(length)
        if self.num_chunks == 1:
            group = self.keys.group_size if self.keys.axis == "channel" else 1
            kept = self.chunk_length if group is None else -(-length // group) * group
            self.keys, self.values = keep_tokens(self.keys, kept), keep_tokens(self.values, kept)
