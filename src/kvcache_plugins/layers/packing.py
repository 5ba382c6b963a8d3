"""How a layer packs tokens, and what it holds: exact first tokens, blocks of packed ones, and a buffer of the newest.

A block is of rows, one for every token, or of groups, whose tokens share scales; nothing that is packed is ever made
dense to be packed again. A `CompressedLayer` knows no format, and a codec no layer: what differs between rows and
groups is asked of a `Packing` and of the blocks that it makes. The prefix stands where every sequence's own first
tokens are: before the first block and, in shorter sequences, within what that block spans.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Codec, Positions
from kvcache_plugins.codecs.groups import CompressedStates, GroupCodec, keep_tokens
from kvcache_plugins.codecs.parts import CodedPart, CompressedPart
from kvcache_plugins.codecs.rows import KeptRows, RowCodec
from kvcache_plugins.files.schema import FLOATS, MAX_INTEGER, Stored
from kvcache_plugins.kernels.engine import MAX_NUM_COMPILED_QUERIES, MAX_NUM_QUERIES


if TYPE_CHECKING:
    from kvcache_plugins.kernels.compiled import PreparedCall
    from kvcache_plugins.kernels.cpu_coding import PreparedCoding
    from kvcache_plugins.kernels.triton import KeptAttention

TensorFunction = Callable[[torch.Tensor], torch.Tensor]
# Keys and values
States = tuple[torch.Tensor, torch.Tensor]
# Rows that a window lets go of together: few enough to be no burden, and enough that moving the others is none
DROP_STEP = 64
# The tensor of a side of rows, in a layer's state; groups have those of `CompressedStates`
ROWS = "rows"
# Of the exact tokens in front, in a layer's state
_SLOTS = "batch_size", "num_heads", "num_slots"
# Shares of the rows held: of what is appended at most, that room for as much again is made, and that such room is at
# least; little, as spare room is held too, and moving is cheap
_MOST_REPEATED, _LEAST_ROOM = 64, 256
# Recent rows that there is room for at a time, and that are coded again at a time unless there are few
_RECENT_STEP, _MOST_AGED = 4, 32
# Exact tokens that there is room for beyond those held, at most, and that room grows by
_STEP = 8
# What a report of memory has a tensor of a block as
_PART_NAMES = {
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


def check_finite(
    keys: torch.Tensor,
    values: torch.Tensor,
    valid: torch.Tensor | None,
    layer_idx: int,
    largest: float = float("inf"),
    is_beyond: torch.Tensor | None = None,
) -> None:
    """
    Raises a `ValueError` with the layer's index if real tokens `[B, H, T, D]`, `valid` `[B, T]`, hold NaN, infinity or
    what is not below `largest`, or if `is_beyond` says that scales ended before a token did.
    """
    if keys.is_meta:
        # Nothing is known of what has no data
        return
    # One answer is waited for, not one a side; what stands for padding may be anything, and seldom is
    fits = True if is_beyond is None else ~is_beyond
    for states in (keys, values):
        if states.numel():
            # Read once, and nothing as large is written: NaN is the least and the largest of what it is among
            least, most = states.aminmax()
            fits = (least > -largest) & (most < largest) & fits
    if bool(fits):
        return
    limit = "" if largest == float("inf") else f", or numbers of {largest:.0e} and more"
    reasons = []
    for name, states in (("keys", keys), ("values", values)):
        is_unfit = ~(states.abs() < largest).all(dim=3).all(dim=1)
        if bool((is_unfit if valid is None or not states.numel() else is_unfit & valid).any()):
            reasons.append(f"the {name} to be compressed hold NaN or infinity{limit}")
    if is_beyond is not None and bool(is_beyond):
        reasons.append("tokens are too large beside those that the tables were made of")
    if reasons:
        raise ValueError(
            f"layer {layer_idx}: {reasons[0]}. What was compressed before is unharmed, but layers before this one "
            "already took the update in: `crop` the last tokens or `reset` the cache."
        )


@dataclass(eq=False)
class Block(ABC):
    """
    Consecutive tokens, packed.

    Attributes:
        keys, values: both sides, perhaps with spare capacity.
        start (`int`): position of the first token in the sequence, padding included.
        length (`int`): tokens in use.
        is_recent (`bool`): whether these are the newest packed tokens, in rows of more bits.
        is_open (`bool`): whether decoded tokens may join.
        chunk_length (`int`): tokens that are packed together.
    """

    keys: Any
    values: Any
    start: int
    length: int
    is_recent: bool = False
    is_open: bool = True

    chunk_length = 1

    @property
    def num_chunks(self) -> int:
        """Chunks in use, the last perhaps not to its end."""
        return -(-self.length // self.chunk_length)

    @property
    def stop(self) -> int:
        """Position behind the last token."""
        return self.start + self.length

    @property
    def capacity(self) -> int:
        """Chunks in all that fit into the storage."""
        return next(iter(self.sides()[0].values())).shape[2]

    @abstractmethod
    def sides(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Returns all tensors of keys and of values by name, chunks in the third dimension, with all capacity."""

    @abstractmethod
    def map(self, function: TensorFunction) -> None:
        """Replaces every stored tensor by `function` of it."""

    @abstractmethod
    def capacity_for(self, count: int, most: int | None) -> int:
        """Tells the capacity that `count` more tokens need, or are worth; see `append`."""

    @abstractmethod
    def part(self, codec: Any, padding: torch.Tensor | None, mask: torch.Tensor | None) -> Any:
        """The block as a part that attention goes over, with its columns of the mask."""

    def append(self, block: Block, most: int | None) -> None:
        """Adds a block that follows; capacity does not grow beyond `most` tokens before it is needed."""
        used, capacity = self.num_chunks, self.capacity_for(block.length, most)
        if capacity > self.capacity:
            self.resize(capacity)
        for mine, theirs in zip(self.sides(), block.sides(), strict=True):
            for name, tensor in theirs.items():
                mine[name][:, :, used : used + block.num_chunks] = tensor
        self.length += block.length

    def resize(self, num_chunks: int) -> None:
        """Moves to storage of its own for `num_chunks` in all, and no less than are in use."""
        used = self.num_chunks

        def resized(tensor: torch.Tensor) -> torch.Tensor:
            moved = tensor.new_zeros(*tensor.shape[:2], max(num_chunks, used), *tensor.shape[3:])
            moved[:, :, :used] = tensor[:, :, :used]
            return moved

        self.map(resized)

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens, and gives the room of the others back; nothing follows a chunk cut into."""
        self.length, self.is_open = length, self.is_open and length % self.chunk_length == 0
        self.resize(self.num_chunks)

    def stored(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Lists what is stored of keys and of values by name, without spare capacity."""
        used = slice(self.num_chunks)
        keys, values = ({name: tensor[:, :, used] for name, tensor in side.items()} for side in self.sides())
        return keys, values

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields part and tensor of everything stored, what is spare apart."""
        for side in self.sides():
            for name, tensor in side.items():
                yield _PART_NAMES[name], tensor[:, :, : self.num_chunks]
                yield "spare", tensor[:, :, self.num_chunks :]


class RowBlock(Block):
    """A block of rows of bytes, one for every head of a token: keys and values are `[B, H, capacity, R]`, uint8."""

    keys: torch.Tensor
    values: torch.Tensor

    def sides(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return {ROWS: self.keys}, {ROWS: self.values}

    def map(self, function: TensorFunction) -> None:
        self.keys, self.values = function(self.keys), function(self.values)

    def capacity_for(self, count: int, most: int | None) -> int:
        return self.kept_for(count, most).capacity

    def kept_for(self, count: int, most: int | None, num_dropped: int = 0) -> KeptRows:
        """Tells which rows stay when some in front go and `count` more come, and for how many there is to be room."""
        length = self.length - num_dropped
        capacity = total = length + count
        if total <= self.capacity and not num_dropped:
            return KeptRows((self.keys, self.values), 0, length, self.capacity)
        if self.is_recent:
            capacity = -(-total // _RECENT_STEP) * _RECENT_STEP
        elif count <= length // _MOST_REPEATED:
            capacity += max(count, length // _LEAST_ROOM // count * count)
        capacity = max(total, capacity if most is None else min(capacity, most))
        return KeptRows((self.keys, self.values), num_dropped, length, capacity)

    def take(self, rows: Sequence[torch.Tensor], kept: KeptRows, count: int) -> None:
        """Takes over storage in which `count` rows are behind those that have stayed."""
        self.keys, self.values = rows
        self.start += kept.first
        self.length = kept.length + count

    def drop_first(self, count: int) -> None:
        """Forgets the first `count` tokens; copies may share the rows of before."""
        self.map(lambda rows: rows[:, :, count : self.length].clone())
        self.start += count
        self.length -= count

    def part(self, codec: Codec, padding: torch.Tensor | None, mask: torch.Tensor | None) -> CodedPart:
        return CodedPart(self.keys, self.values, codec, Positions(self.start, padding), self.length, mask)


class GroupBlock(Block):
    """
    A block of chunks of equal length, keys and values `CompressedStates`: one chunk of a prompt, or a run of decoded
    ones that grows by doubling its capacity.
    """

    keys: CompressedStates
    values: CompressedStates

    @property
    def chunk_length(self) -> int:  # type: ignore[override]
        return self.keys.chunk_length

    def sides(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return dict(self.keys.named_tensors()), dict(self.values.named_tensors())

    def map(self, function: TensorFunction) -> None:
        self.keys, self.values = self.keys.map(function), self.values.map(function)

    def capacity_for(self, count: int, most: int | None) -> int:
        total = self.num_chunks + count // self.chunk_length
        return total if total <= self.capacity else max(2 * self.capacity, total)

    def truncate(self, length: int) -> None:
        """See `Block.truncate`: keeps whole chunks, or whole groups of a single chunk."""
        super().truncate(length)
        if self.num_chunks == 1:
            group = self.keys.group_size if self.keys.axis == "channel" else 1
            kept = self.chunk_length if group is None else -(-length // group) * group
            self.keys, self.values = keep_tokens(self.keys, kept), keep_tokens(self.values, kept)

    def part(self, codec: GroupCodec, padding: torch.Tensor | None, mask: torch.Tensor | None) -> CompressedPart:
        return CompressedPart(self.keys, self.values, self.length, mask)


def num_too_old(length: int, most: int) -> int:
    """Tells how many of `length` recent tokens are coded as all others once there are more than `most`."""
    return length - max(most // 2, most - _MOST_AGED) if length > most else 0


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
        """Takes `count` `[B]` tokens behind the `padding` `[B]` out of a prompt `[B, H, T, D]`; both on the CPU."""
        device, most = keys.device, int(count.max())
        slots = padding[:, None] + torch.arange(most, dtype=torch.int64, device="cpu")
        slots = slots.clamp(max=keys.shape[2] - 1).to(device)[:, None, :, None]
        keys = keys.gather(2, slots.expand(-1, keys.shape[1], -1, keys.shape[3]))
        values = values.gather(2, slots.expand(-1, values.shape[1], -1, values.shape[3]))
        is_uniform = not bool(padding.any()) and int(count.min()) == most
        return cls(keys, values, padding.to(device, copy=True), count.to(device), is_uniform)

    @property
    def num_slots(self) -> int:
        """Slots, of which a sequence may use fewer."""
        return self.keys.shape[2]

    @property
    def positions(self) -> torch.Tensor:
        """Position of every slot in the sequence, `[B, slots]`; unused slots stand behind those in use."""
        return self.start[:, None] + torch.arange(self.num_slots, dtype=torch.int64, device=self.start.device)

    @property
    def in_use(self) -> torch.Tensor:
        """Which slots hold a token, `[B, slots]`."""
        return torch.arange(self.num_slots, dtype=torch.int64, device=self.start.device) < self.count[:, None]

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
        Returns a prefix with all further tokens `[B, H, T, D]`, from position `first` on, of the sequences that are
        `pending` `[B]`. Of one that has not begun more `padding` `[B]` may have come.
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


class ResidualBuffer:
    """
    The newest tokens, exact: keys and values `[B, H, capacity, D]`, of which the first `length` are in use.

    Capacity grows in small steps, as what is reserved is held too: moving a few tokens costs less than the room would.
    It ends at `limit`, the most that waits in ordinary decoding; a longer update goes beyond only as far as it needs.

    A token may be left where the model made it, for attention to put it in its place: four small operations of PyTorch
    take longer than all else that an update does.

    Attributes:
        storage (two `torch.Tensor` of shape `[B, H, capacity, D]`): keys and values, in which the token that is `left`
            is still to be written.
        capacity (`int`): tokens that there is room for.
        length (`int`): tokens in use, with the one that is `left`.
        left (two `torch.Tensor` of shape `[B, H, 1, D]`, *optional*): key and value of the newest token, if attention
            is to write them; it then says so by `left = None`. Whoever else asks for tokens has them written.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        self.limit, self.length = limit, keys.shape[2]
        self._store(keys, values, min(max(self.length, _STEP), max(limit, self.length)))
        self.left: States | None = None

    def _store(self, keys: torch.Tensor, values: torch.Tensor, capacity: int | None = None) -> None:
        """Takes keys and values with all their capacity, or copies of them with room for `capacity` tokens."""
        if capacity is not None:
            keys, values = _with_room(keys, capacity), _with_room(values, capacity)
        self.storage, self.capacity = (keys, values), keys.shape[2]

    @property
    def keys(self) -> torch.Tensor:
        return self.tensors()[0][:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self.tensors()[1][:, :, : self.length]

    def append_exactly(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """Adds tokens, with no capacity beyond them, and returns all."""
        self._store(torch.cat((self.keys, keys), dim=2), torch.cat((self.values, values), dim=2))
        self.length += keys.shape[2]
        return self.storage

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens."""
        self._write_left()
        total = self.length + keys.shape[2]
        if total > self.capacity:
            self._store(self.keys, self.values, max(total, min(-(-total // _STEP) * _STEP, self.limit)))
        for stored, states in zip(self.storage, (keys, values), strict=True):
            stored.narrow(2, self.length, keys.shape[2]).copy_(states)
        self.length = total

    def _write_left(self) -> None:
        if self.left is not None:
            left, self.left = self.left, None
            for stored, states in zip(self.storage, left, strict=True):
                stored[:, :, self.length - 1 : self.length] = states

    def capacity_without(self, count: int) -> int:
        """Tokens that there is room for when the oldest `count` are forgotten."""
        length = self.length - count
        return min(-(-max(length, 1) // _STEP) * _STEP, max(self.limit, length))

    def drop_first(self, count: int) -> None:
        """Forgets the oldest `count` tokens, and gives their capacity back."""
        keys, values, capacity = self.keys[:, :, count:], self.values[:, :, count:], self.capacity_without(count)
        self.length -= count
        self._store(keys, values, capacity)

    def drop_last(self, count: int) -> None:
        self._write_left()
        self.length -= count

    def map(self, function: TensorFunction) -> None:
        self._write_left()
        keys, values = map(function, self.storage)
        self._store(keys, values)

    def tensors(self) -> States:
        """Keys and values with all their capacity."""
        self._write_left()
        return self.storage

    def put_into(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Has the tokens in use stand in other storage, which may be where they stand."""
        for stored, states in zip((keys, values), (self.keys, self.values), strict=True):
            stored[:, :, : self.length].copy_(states)
        self._store(keys, values)


def _with_room(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A copy of `[B, H, tokens, D]` with room for `capacity` tokens."""
    resized = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    resized[:, :, : states.shape[2]] = states
    return resized


class NotCopied:
    """Base of what holds addresses of a layer's tensors: a copy of the layer makes its own."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PreparedParts(NotCopied):
    """
    The parts before the buffer, where no mask is given: they stay until the buffer is packed, and beyond that if there
    was room for it.

    Attributes:
        parts (`list`): those.
        limit (`int`): tokens that the buffer may hold before anything changes.
        call (`PreparedCall` or `KeptAttention`, *optional*): attention over them and the buffer.
        coding (`PreparedCoding`, *optional*): how tokens of the buffer become rows of the newest block.
        is_tried (`bool`): whether there is a call, if there can be one.
    """

    __slots__ = ("call", "coding", "is_tried", "limit", "parts")

    def __init__(self, parts: list[Any], limit: int):
        self.parts, self.limit = parts, limit
        self.call: PreparedCall | KeptAttention | None = None
        self.coding: PreparedCoding | None = None
        self.is_tried = False

    def extend(self, blocks: Sequence[Block]) -> bool:
        """Has the newest blocks, of which the last parts are, have other tokens; tells whether the call can."""
        if self.call is None or not all(isinstance(block, RowBlock) for block in blocks):
            return False
        first = len(self.parts) - len(blocks)
        for place, block in enumerate(blocks, start=first):
            part = self.parts[place]
            if part.mask is not None and block.start != part.positions.first:
                # Its columns would be others
                return False
            self.parts[place] = block.part(part.codec, part.positions.padding, part.mask)
        return self.call.extend(self.parts[first:])


class Split(NamedTuple):
    """
    How a first prompt is stored: first tokens of every sequence that stay exact `[B]`, on the CPU; position of the
    first that is packed, or of the end; and which sequences `[B]` are too short for a table, and stay exact whole.
    """

    num_exact: torch.Tensor
    first: int
    pending: torch.Tensor


@dataclass(frozen=True)
class Packing(ABC):
    """
    How a layer packs.

    Attributes:
        codecs (`Codec` or `Callable`): the codec, or called with the head dims of keys and values it makes one.
        residual_length (`int`): decoded tokens that wait in exact form; 0 where tokens are packed as they come.
        num_sink_tokens (`int`): first tokens of a sequence that stay exact.
        least_tokens (`int`): tokens of the shortest sequence of which anything is packed.
        num_kept (`int`): the newest of a full buffer that stay exact when the others are packed.
        num_heard (`int`): tokens before the first that are packed whose queries are heard, where a codec needs some.
        recent_length (`int`): newest of the packed decoded tokens whose rows have more bits, at most.
        largest (`float`): what numbers have to be below.
        most_compiled (`int`): queries up to which compiled kernels compute.
    """

    codecs: Any
    residual_length: int = 0
    num_sink_tokens: int = 0
    least_tokens: int = 1
    num_heard: int = 0
    recent_length: int = 0
    largest: float = float("inf")

    num_kept = 0
    most_compiled = MAX_NUM_QUERIES

    @property
    def fixed(self) -> Codec | None:
        """The codec, if it is the same whatever tokens there are."""
        return self.codecs if isinstance(self.codecs, Codec) else None

    def codec(self, key_dim: int, value_dim: int) -> Any:
        """Makes the codec of a layer's heads, not fitted yet; a `ValueError` if options do not fit them."""
        return self.codecs(key_dim, value_dim) if self.fixed is None else self.fixed

    def recent_codec(self, codec: Any) -> Any:
        """Returns the codec of the newest packed tokens, given that of the others; `None` if it is the same."""
        return None

    @abstractmethod
    def split(self, padding: torch.Tensor, length: int) -> Split | None:
        """Says how a first prompt of `length` tokens is stored, or `None` if it waits for more of them."""


@dataclass(frozen=True)
class RowPacking(Packing):
    """
    Packs every token by itself, as a row of bytes.

    Attributes:
        recent_nbits (`int`, *optional*, defaults to 0): how many bits a number recent rows have more.
    """

    recent_nbits: int = 0

    @property
    def num_kept(self) -> int:  # type: ignore[override]
        # The newest tokens are read most: with buffers that are emptied whole, KL is a quarter to a half higher
        return self.residual_length // 4 if self.recent_length else 3 * self.residual_length // 5

    def recent_codec(self, codec: Codec) -> Codec | None:
        return codec.finer(self.recent_nbits) if self.recent_length and isinstance(codec, RowCodec) else None

    def split(self, padding: torch.Tensor, length: int) -> Split | None:
        # Where tokens are packed as they come, no sequence waits for more
        has_enough = length - padding >= (self.least_tokens if self.residual_length else 0)
        if not bool(has_enough.any()):
            return None
        # More may be padding than there are tokens so far
        count = torch.where(has_enough, self.num_sink_tokens, (length - padding).clamp(min=0))
        return Split(count, int((padding + count)[has_enough].min()), ~has_enough)


@dataclass(frozen=True)
class GroupPacking(Packing):
    """
    Packs tokens in chunks, in which groups of values share scales. So some of a run wait for more, none join the block
    of a prompt, and the first of a block cannot be let go of by themselves.

    Attributes:
        least_tokens (`int`): tokens of a group of keys.
        has_whole_groups (`bool`): whether only whole groups of a prompt are packed.
    """

    has_whole_groups: bool = False

    most_compiled = MAX_NUM_COMPILED_QUERIES

    def split(self, padding: torch.Tensor, length: int) -> Split:
        real = [length - pad for pad in padding.tolist()]
        packed = [self.num_packed(count, is_prompt=True) for count in real]
        count = [
            max(own - own_packed, min(self.num_sink_tokens, own), 0)
            for own, own_packed in zip(real, packed, strict=True)
        ]
        # Sequences end together, so groups are counted back from the end: the same alone and padded
        num_exact = torch.tensor(count, dtype=torch.int64, device="cpu")
        return Split(num_exact, length - max(packed), torch.zeros_like(num_exact, dtype=torch.bool))

    def num_packed(self, count: int, *, is_prompt: bool) -> int:
        """How many of the first of `count` exact tokens are packed."""
        if not is_prompt:
            return count - count % self.residual_length
        group = self.least_tokens
        if count < group:
            return 0
        return count - count % group if self.has_whole_groups else count

    def encode(
        self, codec: GroupCodec, states: States, start: int, valid: torch.Tensor | None, *, is_prompt: bool
    ) -> GroupBlock:
        """
        Packs keys and values `[B, H, T, D]` of consecutive tokens from a position on, of which those `valid` `[B, T]`
        are read, all by default; a `ValueError` if they cannot be stored.
        """
        length = states[0].shape[2]
        num_chunks = 1 if is_prompt else length // self.residual_length
        sides = codec.encode(*states, valid, num_chunks=num_chunks, is_prompt=is_prompt)
        return GroupBlock(*sides, start, length, is_open=not is_prompt)
