"""Storage of a compressed layer beside its buffer: exact first tokens, and blocks of packed tokens.

    [ prefix: exact ] [ block ] [ block ] ... [ buffer: exact, newest ]

The prefix stands where every sequence's own first tokens are: before the first block and, in shorter sequences,
within what that block spans. A block is of rows, one for every token, or of groups, whose tokens share scales; nothing
that is packed is ever made dense to be packed again.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Codec, Positions
from kvcache_plugins.codecs.groups import CompressedStates, GroupCodec, keep_tokens, tile_slices
from kvcache_plugins.codecs.parts import TILE_TOKENS, CodedPart, CompressedPart
from kvcache_plugins.files.schema import FLOATS, MAX_INTEGER, Stored


if TYPE_CHECKING:
    from kvcache_plugins.kernels.compiled import PreparedCall
    from kvcache_plugins.kernels.compiled_coding import PreparedCoding

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
# Rows that a window lets go of together: few enough to be no burden, and enough that moving the others is none
DROP_STEP = 64
# The tensor of a side of rows, in a layer's state; groups have those of `CompressedStates`
ROWS = "rows"
# Of the exact tokens in front, in a layer's state
_SLOTS = "batch_size", "num_heads", "num_slots"
# Shares of the rows held: of what is appended at most, that room for as much again is made, and that such room is at
# least; little, as spare room is held too, and moving is cheap
_MOST_REPEATED, _LEAST_ROOM = 64, 256
# Recent rows that there is room for at a time
_RECENT_STEP = 8
_PART_NAMES = {
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


@dataclass(eq=False)
class RowBlock:
    """
    Consecutive tokens as rows of bytes, one for every head of a token.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, capacity, R]`, uint8): rows of both sides.
        start (`int`): position of the first token in the sequence, padding included.
        length (`int`): tokens in use.
        is_recent (`bool`): whether these are the newest packed tokens, in rows of more bits.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    length: int
    is_recent: bool = False

    # Tokens may follow whatever was dropped
    can_grow = True

    @property
    def capacity(self) -> int:
        """Tokens in all that fit into the storage."""
        return self.keys.shape[2]

    def append(self, block: RowBlock, most: int | None) -> None:
        """Adds the rows of a block that follows; capacity does not grow beyond `most` tokens before it is needed."""
        total = self.length + block.length
        self.make_room(block.length, most)
        self.keys[:, :, self.length : total] = block.keys
        self.values[:, :, self.length : total] = block.values
        self.length = total

    def make_room(self, count: int, most: int | None) -> None:
        """Grows the capacity, if it is too little for `count` more tokens, as `append` says."""
        total = self.length + count
        if total > self.capacity:
            is_repeated = count <= self.length // _MOST_REPEATED
            capacity = total + (max(count, self.length // _LEAST_ROOM // count * count) if is_repeated else 0)
            if self.is_recent:
                capacity = -(-total // _RECENT_STEP) * _RECENT_STEP
            self.reserve(max(total, capacity if most is None else min(capacity, most)))

    def reserve(self, num_tokens: int) -> None:
        """Moves to storage of its own for `num_tokens` in all, and no less than are in use."""
        capacity, length = max(num_tokens, self.length), self.length

        def resized(rows: torch.Tensor) -> torch.Tensor:
            moved = rows.new_zeros(*rows.shape[:2], capacity, rows.shape[3])
            moved[:, :, :length] = rows[:, :, :length]
            return moved

        self.map(resized)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives the room of the others back."""
        self.length = length
        self.reserve(length)

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens; copies may share the rows of before."""
        self.keys, self.values = (rows[:, :, count : self.length].clone() for rows in (self.keys, self.values))
        self.start += count
        self.length -= count

    def coded_anew(
        self, count: int, codec: Codec, other: Codec, padding: torch.Tensor | None, dtype: torch.dtype
    ) -> RowBlock:
        """Returns the first `count` tokens, rows of a codec, as rows of another, as if they came in `dtype`."""
        positions = Positions(self.start, padding)
        keys = codec.decode_keys(self.keys[:, :, :count], positions).to(dtype)
        rows = other.encode(keys, codec.decode_values(self.values[:, :, :count]).to(dtype), positions)
        return RowBlock(*rows, self.start, count)

    def map(self, function: TensorFunction) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)

    def part(self, codec: Codec, padding: torch.Tensor | None, mask: torch.Tensor | None) -> CodedPart:
        """The block as a part that attention goes over, with its columns of the mask."""
        return CodedPart(self.keys, self.values, codec, Positions(self.start, padding), self.length, mask)

    def dense_tiles(
        self, sides: Collection[str], codec: Codec, padding: torch.Tensor | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Makes `"keys"`, `"values"` or both dense `[B, H, tokens, D]`, float32, tile by tile."""
        for first in range(0, self.length, TILE_TOKENS):
            rows = slice(first, min(first + TILE_TOKENS, self.length))
            tile = {}
            if "keys" in sides:
                tile["keys"] = codec.decode_keys(self.keys[:, :, rows], Positions(self.start + first, padding))
            if "values" in sides:
                tile["values"] = codec.decode_values(self.values[:, :, rows])
            yield tile

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields everything stored, with all its capacity."""
        yield from (self.keys, self.values)

    def stored(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns what is stored of keys and of values by name, without spare capacity."""
        return {ROWS: self.keys[:, :, : self.length]}, {ROWS: self.values[:, :, : self.length]}

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields part and tensor of everything stored, what is spare apart."""
        for rows in (self.keys, self.values):
            yield "codes", rows[:, :, : self.length]
            yield "spare", rows[:, :, self.length :]


@dataclass(eq=False)
class GroupBlock:
    """
    Consecutive tokens in chunks of equal length: one chunk of a prompt, or a run of decoded ones that grows by
    doubling its capacity.

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

    is_recent = False

    @property
    def chunk_length(self) -> int:
        """Tokens of a chunk."""
        return self.keys.chunk_length

    @property
    def can_grow(self) -> bool:
        """Whether further chunks may follow, as no crop has cut into the last one."""
        return self.length == self.num_chunks * self.chunk_length

    @property
    def capacity(self) -> int:
        """Tokens in all that fit into the storage."""
        return self.keys.num_chunks * self.chunk_length

    def append(self, block: GroupBlock, most: int | None) -> None:
        """Adds the chunks of a block that follows and has the same layout; capacity doubles when it is exhausted."""
        new = block.num_chunks
        if self.num_chunks + new > self.keys.num_chunks:
            self._resize(max(2 * self.keys.num_chunks, self.num_chunks + new))
        used = slice(self.num_chunks, self.num_chunks + new)
        for stored, added in ((self.keys, block.keys), (self.values, block.values)):
            tensors = dict(added.named_tensors())
            for name, tensor in stored.named_tensors():
                tensor[:, :, used] = tensors[name]
        self.num_chunks += new
        self.length += new * self.chunk_length

    def reserve(self, num_tokens: int) -> None:
        """Moves to storage for `num_tokens` in all, and no less than are in use."""
        self._resize(max(-(-num_tokens // self.chunk_length), self.num_chunks))

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and of the storage whole chunks, or whole groups of a single chunk."""
        self.num_chunks = -(-length // self.chunk_length)
        self.length = length
        self._resize(self.num_chunks)
        if self.num_chunks == 1:
            group = self.keys.grouping.group_size if self.keys.grouping.axis == "channel" else 1
            kept = self.chunk_length if group is None else -(-length // group) * group
            self.keys, self.values = keep_tokens(self.keys, kept), keep_tokens(self.values, kept)

    def map(self, function: TensorFunction) -> None:
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = self.keys.map(function), self.values.map(function)

    def part(self, codec: GroupCodec, padding: torch.Tensor | None, mask: torch.Tensor | None) -> CompressedPart:
        """The block as a part that attention goes over, with its columns of the mask."""
        return CompressedPart(self.keys, self.values, self.length, mask)

    def dense_tiles(
        self, sides: Collection[str], codec: GroupCodec, padding: torch.Tensor | None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Makes `"keys"`, `"values"` or both dense `[B, H, tokens, D]`, float32, tile by tile."""
        stored = {side: self.keys if side == "keys" else self.values for side in sides}
        for chunks, tokens, start, stop in tile_slices(self.keys, self.length):
            yield {
                side: states.dequantize_tile(chunks, tokens)[:, :, : stop - start] for side, states in stored.items()
            }

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields everything stored, with all its capacity."""
        for states in (self.keys, self.values):
            yield from (tensor for _, tensor in states.named_tensors())

    def stored(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns what is stored of keys and of values by name, without spare capacity."""
        keys, values = (
            {name: tensor[:, :, : self.num_chunks] for name, tensor in states.named_tensors()}
            for states in (self.keys, self.values)
        )
        return keys, values

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields part and tensor of everything stored, what is spare apart."""
        for states in (self.keys, self.values):
            for name, tensor in states.named_tensors():
                yield _PART_NAMES[name], tensor[:, :, : self.num_chunks]
                yield "spare", tensor[:, :, self.num_chunks :]

    def _resize(self, capacity: int) -> None:
        """Moves the chunks in use to storage of their own for `capacity` chunks."""
        self.keys, self.values = (
            states.with_capacity(self.num_chunks, capacity) for states in (self.keys, self.values)
        )


Block = RowBlock | GroupBlock


class PackedTokens:
    """
    Packed tokens of a layer, in blocks that follow each other.

    Attributes:
        blocks (`list`): the oldest first; the last may be of recent tokens.
        is_open (`bool`): whether decoded tokens may join the last block.
        is_older_open (`bool`): whether tokens may join the block before a recent one.
    """

    def __init__(self, blocks: Sequence[Block] = (), *, is_open: bool = False):
        self.blocks: list[Any] = [*blocks]
        self.is_open = self.is_older_open = is_open

    @property
    def newest(self) -> Any:
        """The last block, if there is one."""
        return self.blocks[-1] if self.blocks else None

    @property
    def has_recent(self) -> bool:
        """Whether the last block is of recent tokens."""
        return bool(self.blocks) and self.blocks[-1].is_recent

    def add(self, block: Block, most: int | None, *, is_joining: bool) -> Block | None:
        """
        Adds a block that follows, to the last one if both are of decoded tokens, and then returns that.

        Args:
            block (`Block`): the tokens; they may begin later, where a window has passed all that there was.
            most (`int`, *optional*): tokens beyond which a block has no room before it needs it.
            is_joining (`bool`): whether they are decoded ones.
        """
        if self.blocks and block.start > self.newest.start + self.newest.length:
            self.blocks, self.is_open = [], False
        is_open, self.is_open = self.is_open, is_joining
        if not (is_open and is_joining):
            self.blocks.append(block)
            return None
        self.newest.append(block, most)
        return self.blocks[-1]

    def joined(self, start: int, count: int, most_recent: int) -> RowBlock | None:
        """Returns the block that `count` decoded tokens from a position on only have to join, if that is all."""
        newest = self.newest
        if not self.is_open or not isinstance(newest, RowBlock) or newest.start + newest.length != start:
            return None
        has_room = newest.length + count <= most_recent if newest.is_recent else not most_recent
        return newest if has_room else None

    def add_recent(self, block: RowBlock, most: int) -> Block | None:
        """Adds newest tokens in finer rows, at most `most` with others; returns the block that they joined."""
        block.is_recent = True
        if not self.has_recent:
            is_older_open = self.is_open
            self.add(block, most, is_joining=False)
            self.is_older_open, self.is_open = is_older_open and len(self.blocks) > 1, True
            return None
        if not self.is_open:
            # A copy may share them
            self.newest.reserve(self.newest.length + block.length)
            self.is_open = True
        return self.add(block, most, is_joining=True)

    def age(self, block: RowBlock, most: int | None) -> None:
        """
        Replaces the first recent tokens by a block of the same, coded as all older ones are.

        Args:
            block (`RowBlock`): the tokens.
            most (`int`, *optional*): as of `add`.
        """
        recent = self.blocks[-1]
        if self.is_older_open and len(self.blocks) > 1:
            self.blocks[-2].append(block, most)
        else:
            self.blocks.insert(-1, block)
            self.is_older_open = True
        if block.length < recent.length:
            recent.drop_first(block.length)
        else:
            self.blocks.pop()
            self.is_open = self.is_older_open

    def drop_before(self, position: int) -> bool:
        """Drops tokens before a position, some rows at a time, and tells whether it has."""
        newest, count = self.newest, len(self.blocks)
        self.blocks = [block for block in self.blocks if block.start + block.length > position]
        num_dropped = max(position - self.blocks[0].start, 0) // DROP_STEP * DROP_STEP if self.blocks else 0
        if num_dropped:
            self.blocks[0].drop_first(num_dropped)
        if not num_dropped and len(self.blocks) == count:
            return False
        self._close_if_cut(newest)
        return True

    def truncate(self, length: int) -> None:
        """Drops tokens at position `length` and beyond."""
        newest = self.newest
        self.blocks = [block for block in self.blocks if block.start < length]
        if self.blocks and self.newest.start + self.newest.length > length:
            self.newest.truncate(length - self.newest.start)
        self._close_if_cut(newest)

    def _close_if_cut(self, newest: Block | None) -> None:
        self.is_open = self.is_open and newest is not None and self.newest is newest and newest.can_grow

    def share(self) -> Iterator[torch.Tensor]:
        """Yields all tensors, to which nothing is added from now on: that would be into room that copies share."""
        self.is_open = self.is_older_open = False
        for block in self.blocks:
            yield from block.tensors()


@dataclass(eq=False)
class ExactPrefix:
    """
    The first tokens of each sequence, exact: attention sinks, what a prompt has beyond a whole number of groups, and
    all tokens of a sequence that is too short to be packed.

    Prompts of a batch end together, so counting groups back from the end gives a sequence the same groups alone and
    left-padded. Where the first block spans tokens of the prefix too, whoever reads it has to leave these out.

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

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, count: torch.Tensor) -> ExactPrefix:
        """
        Takes tokens out of a prompt.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`): states of the prompt.
            padding, count (`torch.Tensor` of shape `[B]`, on the CPU): tokens in front of those taken, and how many
                are taken.
        """
        device, most = keys.device, int(count.max())
        slots = (padding[:, None] + torch.arange(most)).clamp(max=keys.shape[2] - 1).to(device)[:, None, :, None]
        keys, values = (
            states.gather(2, slots.expand(-1, states.shape[1], -1, states.shape[3])) for states in (keys, values)
        )
        is_uniform = not bool(padding.any()) and int(count.min()) == most
        return cls(keys, values, padding.to(device, copy=True), count.to(device), is_uniform)

    @property
    def num_slots(self) -> int:
        """Slots, of which a sequence may use fewer."""
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
        """Replaces every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)
        self.start, self.count = function(self.start), function(self.count)

    def joined(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, padding: torch.Tensor, pending: torch.Tensor
    ) -> ExactPrefix:
        """
        Returns a prefix with all further tokens of the sequences that are pending.

        Args:
            keys, values (`torch.Tensor` of shape `[B, H, T, D]`): tokens from position `first` on.
            first (`int`): position behind the last token of the prefix, of a pending sequence that has begun.
            padding (`torch.Tensor` of shape `[B]`): tokens at the start of every sequence that are none; of one that
                has not begun more of them may have come.
            pending (`torch.Tensor` of shape `[B]`, bool): which sequences have no table yet.
        """
        start, count = self.start.cpu(), self.count.cpu()
        start = torch.where(pending & (count == 0), torch.maximum(start, padding), start)
        num_new = keys.shape[2]
        skipped = (start + count - first).clamp(min=0, max=num_new)
        total = count + pending * (num_new - skipped)
        num_slots = max(self.num_slots, int(total.max()))
        held = [F.pad(states, (0, 0, 0, num_slots - self.num_slots)) for states in (self.keys, self.values)]
        for number in pending.nonzero().flatten().tolist():
            slots, new = slice(int(count[number]), int(total[number])), slice(int(skipped[number]), num_new)
            for states, added in zip(held, (keys, values), strict=True):
                states[number, :, slots] = added[number, :, new]
        device = self.count.device
        return ExactPrefix(held[0], held[1], start.to(device), total.to(device), is_uniform=False)

    def shortened(self, limits: torch.Tensor) -> ExactPrefix:
        """Returns a prefix with no more tokens of a sequence than `limits` `[B]` says, and no more room than that."""
        count = torch.minimum(self.count, limits.to(self.count.device))
        num_slots, keys, values = int(count.max()), self.keys, self.values
        if num_slots < self.num_slots:
            keys, values = keys[:, :, :num_slots].clone(), values[:, :, :num_slots].clone()
        return ExactPrefix(keys, values, start=self.start, count=count, is_uniform=False)


class PreparedParts:
    """
    The parts before the buffer, where no mask is given: they stay until the buffer is packed, and beyond that if there
    was room for it.

    Attributes:
        parts (`list`): those.
        limit (`int`): tokens that the buffer may hold before anything changes.
        call (`PreparedCall`, *optional*): attention over them and the buffer.
        coding (`PreparedCoding`, *optional*): how tokens of the buffer become rows of the newest block.
        is_tried (`bool`): whether there is a call, if there can be one.
    """

    __slots__ = ("call", "coding", "is_tried", "limit", "parts")

    def __init__(self, parts: list[Any], limit: int):
        self.parts, self.limit = parts, limit
        self.call: PreparedCall | None = None
        self.coding: PreparedCoding | None = None
        self.is_tried = False

    def extend(self, block: Block) -> bool:
        """Has the newest block, of which the parts are, have more tokens; tells whether the call can."""
        if self.call is None or not isinstance(block, RowBlock):
            return False
        if not self.call.extend(block.keys, block.values, block.length):
            return False
        self.parts[-1] = replace(self.parts[-1], keys=block.keys, values=block.values, length=block.length)
        return True

    def __deepcopy__(self, memo: object) -> None:
        """A copy of the layer finds its own: addresses in a call are of what was copied."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()
