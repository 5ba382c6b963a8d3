"""Storage of a GEAR layer beside its buffer of the newest tokens: exact tokens in front, and compressed blocks.

    [ prefix: exact, fewer than a group ] [ block ] [ block ] ... [ buffer: exact, newest ]

The exact prefix stands where every sequence's own first tokens are: before the first block and, in shorter sequences,
within what the first block spans. All of it is append-only. A block is either one prompt (one chunk) or a run of
decode chunks of equal length that grows by doubling its capacity; nothing that is compressed is ever decompressed to
be compressed again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import torch

from kvcache_plugins.codecs.groups import CompressedStates, drop_step, drop_tokens, keep_tokens, tile_slices
from kvcache_plugins.files.schema import FLOATS, MAX_INTEGER, Stored


# Of the exact tokens in front, in a layer's state
_SLOTS = "batch_size", "num_heads", "num_slots"
TensorFunction = Callable[[torch.Tensor], torch.Tensor]
ShapeOf = Callable[[str], tuple[int, int, int, int]]
Tiles = Iterator[tuple[slice, dict[str, torch.Tensor]]]


class BufferConfig(Protocol):
    """Options of a layer, of either form."""

    @property
    def residual_length(self) -> int:
        """Decoded tokens that wait in exact form."""


class StoredBlock(Protocol):
    """Consecutive tokens, compressed in either form."""

    start: int
    length: int

    @property
    def keys(self) -> object:
        """Storage of one side: another object where it stands elsewhere."""

    def stored(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns what is stored of keys and of values by name, without spare capacity."""

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens."""

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens, as many as can be dropped."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces every stored tensor by `function` of it."""

    def reserve(self, num_tokens: int) -> None:
        """Moves to storage for `num_tokens` in all, and no less than are in use."""

    def capacity(self) -> int:
        """Counts the tokens in all that fit into the storage."""


BlockT = TypeVar("BlockT", bound=StoredBlock)


class TiledBlock(Protocol):
    """Consecutive tokens that become dense."""

    @property
    def start(self) -> int:
        """Position of the first token."""

    def dense_tiles(self, sides: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """Makes sides dense, tile by tile."""


@dataclass(eq=False)
class CompressedBlock:
    """
    Keys and values of consecutive tokens, compressed in chunks of equal length.

    Attributes:
        keys, values (`CompressedStates`): both sides; the chunk dimension may have spare capacity.
        start (`int`): position of the first token in the sequence, padding included.
        num_chunks (`int`): chunks in use.
        length (`int`): tokens in use, at most `num_chunks * chunk_length` (less after a crop).
    """

    keys: CompressedStates
    values: CompressedStates
    start: int
    num_chunks: int
    length: int

    @property
    def chunk_length(self) -> int:
        return self.keys.chunk_length

    @property
    def is_full(self) -> bool:
        """Whether further chunks may follow, as no crop has cut into the last one."""
        return self.length == self.num_chunks * self.chunk_length

    def stored(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns what is stored of keys and of values by name, without spare capacity."""
        keys, values = (
            {name: tensor[:, :, : self.num_chunks] for name, tensor in states.named_tensors()}
            for states in (self.keys, self.values)
        )
        return keys, values

    def append(self, block: "CompressedBlock", *, has_spare: bool = True) -> None:
        """
        Adds the chunks of a block that follows this one and has its layout; capacity doubles when it is exhausted, or
        grows by no more than is needed.
        """
        new = block.num_chunks
        if self.num_chunks + new > self.keys.num_chunks:
            capacity = max(2 * self.keys.num_chunks * has_spare, self.num_chunks + new)
            self._resize(capacity)
        used = slice(self.num_chunks, self.num_chunks + new)
        for stored, added in ((self.keys, block.keys), (self.values, block.values)):
            tensors = dict(added.named_tensors())
            for name, tensor in stored.named_tensors():
                tensor[:, :, used] = tensors[name]
        self.num_chunks += new
        self.length += new * self.chunk_length

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and of the storage whole chunks, or whole groups of a single chunk."""
        self.num_chunks = -(-length // self.chunk_length)
        self.length = length
        self._resize(self.num_chunks)
        if self.num_chunks == 1:
            group = self.keys.grouping.group_size if self.keys.grouping.axis == "channel" else 1
            kept = self.chunk_length if group is None else -(-length // group) * group
            self.keys, self.values = keep_tokens(self.keys, kept), keep_tokens(self.values, kept)

    def reserve(self, num_tokens: int) -> None:
        """Moves to storage for `num_tokens` in all, and no less than are in use."""
        self._resize(max(-(-num_tokens // self.chunk_length), self.num_chunks))

    def capacity(self) -> int:
        """Counts the tokens in all that fit into the storage."""
        return self.keys.num_chunks * self.chunk_length

    def num_droppable(self, count: int) -> int:
        """
        How many of the first `count` tokens can be dropped: whole chunks, or of a single chunk whole groups and tiles.
        """
        if self.num_chunks > 1:
            return count // self.chunk_length * self.chunk_length
        step = drop_step(self.keys.grouping)
        return count // step * step

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens, as many as `num_droppable` says; copies may share what was stored."""
        if self.num_chunks > 1:
            chunks = slice(count // self.chunk_length, self.num_chunks)
            self.num_chunks = chunks.stop - chunks.start
            self.keys, self.values = (
                states.map(lambda tensor: tensor[:, :, chunks].clone()) for states in (self.keys, self.values)
            )
        else:
            self.keys, self.values = drop_tokens(self.keys, count), drop_tokens(self.values, count)
        self.start += count
        self.length -= count

    def dense_tiles(self, sides: Collection[str]) -> Iterator[dict[str, torch.Tensor]]:
        """The dense states of `"keys"`, `"values"` or both `[B, H, tokens, D]`, float32, tile by tile."""
        stored = {side: self.keys if side == "keys" else self.values for side in sides}
        for chunks, tokens, start, stop in tile_slices(self.keys, self.length):
            yield {
                side: states.dequantize_tile(chunks, tokens)[:, :, : stop - start] for side, states in stored.items()
            }

    def map(self, function: TensorFunction) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = self.keys.map(function), self.values.map(function)

    def _resize(self, capacity: int) -> None:
        """Moves the chunks in use to storage of their own for `capacity` chunks."""
        self.keys, self.values = (
            states.with_capacity(self.num_chunks, capacity) for states in (self.keys, self.values)
        )


@dataclass(eq=False)
class ExactPrefix:
    """
    The first tokens of each sequence, exact: those that a prompt has beyond a whole number of groups, and sink tokens.

    Prompts of a batch end together, so counting groups back from the end gives a sequence the same groups alone and
    left-padded. The tokens left over stand at the start, where attention sinks are. Where there are fewer of them than
    sink tokens are wanted, the first block spans the others too, and whoever reads it has to leave these out.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, slots, D]`): the exact states.
        start (`torch.Tensor` of shape `[B]`): position of a sequence's first real token.
        count (`torch.Tensor` of shape `[B]`): slots in use.
        is_uniform (`bool`): whether every sequence starts at 0 and uses every slot, so that nothing has to be masked.
    """

    keys: Annotated[torch.Tensor, Stored((*_SLOTS, "key_head_dim"), *FLOATS.values(), is_finite=False)]
    values: Annotated[torch.Tensor, Stored((*_SLOTS, "value_head_dim"), *FLOATS.values(), is_finite=False)]
    start: Annotated[torch.Tensor, Stored(("batch_size",), torch.int64, least=0, most=MAX_INTEGER)]
    count: Annotated[torch.Tensor, Stored(("batch_size",), torch.int64, least=0, most=MAX_INTEGER)]
    is_uniform: bool

    def check(self) -> None:
        """Raises a `ValueError` if it is no prefix, as of a file: tokens beyond its slots, or elsewhere."""
        if self.keys.dtype != self.values.dtype:
            raise ValueError(f"keys in {self.keys.dtype} have values in {self.values.dtype}")
        if bool((self.count > self.num_slots).any()):
            raise ValueError(f"`count` has to be at most {self.num_slots}")
        if self.is_uniform and bool((self.start > 0).any() | (self.count < self.num_slots).any()):
            raise ValueError("`is_uniform` does not fit where the prefix is")

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2]

    @property
    def positions(self) -> torch.Tensor:
        """Position of every slot in the sequence, `[B, slots]`; unused slots stand behind those in use."""
        return self.start[:, None] + torch.arange(self.num_slots, device=self.start.device)

    @property
    def in_use(self) -> torch.Tensor:
        """Which slots hold a token, `[B, slots]`."""
        return torch.arange(self.num_slots, device=self.start.device) < self.count[:, None]

    @property
    def end(self) -> torch.Tensor:
        """Position behind the last token of each sequence, `[B]`: what stands before it is not in the first block."""
        return self.start + self.count

    def truncate(self, length: int) -> None:
        """Forgets tokens at position `length` and beyond."""
        self.count = torch.minimum(self.count, (length - self.start).clamp(min=0))
        self.is_uniform = self.is_uniform and length >= self.num_slots

    def stop(self) -> int:
        """Position behind the last token of all sequences. The host may have to wait for a device."""
        return self.num_slots if self.is_uniform else int(self.end.max())

    def write_dense(self, side: str, output: torch.Tensor, start: int = 0) -> None:
        """Writes the states of one side to their places in `output` `[B, H, tokens, D]`, which begins at `start`."""
        states: torch.Tensor = getattr(self, side)
        if self.is_uniform:
            tokens = states[:, :, start : start + output.shape[2]]
            output[:, :, : tokens.shape[2]] = tokens
            return
        places = self.positions - start
        rows, slots = (self.in_use & (places >= 0) & (places < output.shape[2])).nonzero(as_tuple=True)
        output[rows, :, places[rows, slots]] = states[rows, :, slots].to(output.dtype)

    def map(self, function: TensorFunction) -> None:
        self.keys, self.values = function(self.keys), function(self.values)
        self.start, self.count = function(self.start), function(self.count)


def dense_tiles(
    sides: Collection[str],
    shape_of: ShapeOf,
    prefix: ExactPrefix | None,
    blocks: Iterable[TiledBlock],
    tail: Iterable[tuple[torch.Tensor, torch.Tensor, int]],
    exact_start: int,
    dtype: torch.dtype,
    device: torch.device,
    first: int = 0,
) -> Tiles:
    """
    All tokens of a layer, or those from a position on.

    Args:
        sides (`Collection[str]`): which of `"keys"` and `"values"`.
        shape_of (`Callable`): the shape of all states of a side.
        prefix (`ExactPrefix`, *optional*): the first tokens of every sequence.
        blocks (`Iterable[TiledBlock]`): what is compressed, in the order of its tokens.
        tail (`Iterable`): keys, values and their tokens in use, of what stands behind.
        exact_start (`int`): position of the first token of the tail.
        dtype, device: of the states.
        first (`int`, *optional*, defaults to 0): position of the first token that is wanted, and counted from.
    """
    position = first
    stop = 0 if prefix is None else prefix.stop()
    for block in blocks:
        if position < block.start:
            states = _before(sides, shape_of, prefix, position, block.start, dtype, device)
            yield slice(position - first, block.start - first), states
            position = block.start
        end = block.start
        for tile in block.dense_tiles(sides):
            end += next(iter(tile.values())).shape[2]
            if end <= position:
                continue
            states = {side: tile[side][:, :, position - end :].to(dtype) for side in sides}
            if position < stop:
                _overlay(prefix, states, position)
            yield slice(position - first, end - first), states
            position = end
    if position < exact_start:
        states = _before(sides, shape_of, prefix, position, exact_start, dtype, device)
        yield slice(position - first, exact_start - first), states
        position = exact_start
    end = exact_start
    for keys, values, length in tail:
        end += length
        if end > position:
            skipped = length - (end - position)
            exact = {"keys": keys[:, :, skipped:length], "values": values[:, :, skipped:length]}
            yield slice(position - first, end - first), {side: exact[side] for side in sides}
            position = end


def _before(
    sides: Collection[str],
    shape_of: ShapeOf,
    prefix: ExactPrefix | None,
    start: int,
    stop: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Tokens that are in no block: the prefix, and padding."""
    states = {}
    for side in sides:
        batch_size, num_heads, _, head_dim = shape_of(side)
        states[side] = torch.zeros(batch_size, num_heads, stop - start, head_dim, dtype=dtype, device=device)
    _overlay(prefix, states, start)
    return states


def _overlay(prefix: ExactPrefix | None, states: dict[str, torch.Tensor], start: int) -> None:
    if prefix is None:
        return
    for side, tile in states.items():
        prefix.write_dense(side, tile, start)
