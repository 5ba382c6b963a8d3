"""Exact tokens of a layer: a prefix of every sequence's first tokens, and a tail of the newest ones.

Legend: B batch, H key/value heads, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F

from kvcache_plugins.files.schema import FLOATS, MAX_INTEGER, Stored


TensorFunction = Callable[[torch.Tensor], torch.Tensor]
# Keys and values
States = tuple[torch.Tensor, torch.Tensor]
# Sizes of a prefix in a layer's state
_SLOTS = "batch_size", "num_heads", "num_slots"
# Tokens by which the capacity of a tail grows
_STEP = 8


@dataclass(eq=False)
class ExactPrefix:
    """
    The first tokens of each sequence, exact: attention sinks, what a prompt has beyond a whole number of groups, and
    all tokens of a sequence that is too short to be packed.

    Prompts of a batch end together, so counting groups back from the end gives a sequence the same groups alone and
    left-padded. The first segment may span tokens of the prefix too: a reader of the segment leaves these out.

    Attributes:
        keys, values (`torch.Tensor` of shape `[B, H, slots, D]`): the exact states.
        start (`torch.Tensor` of shape `[B]`): position of a sequence's first real token.
        count (`torch.Tensor` of shape `[B]`): slots in use.
        is_uniform (`bool`): True if every sequence starts at 0 and uses every slot, so that nothing has to be masked.
    """

    keys: Annotated[torch.Tensor, Stored((*_SLOTS, "key_head_dim"), *FLOATS.values(), is_finite=False)]
    values: Annotated[torch.Tensor, Stored((*_SLOTS, "value_head_dim"), *FLOATS.values(), is_finite=False)]
    start: Annotated[torch.Tensor, Stored(("batch_size",), torch.int64, least=0, most=MAX_INTEGER)]
    count: Annotated[torch.Tensor, Stored(("batch_size",), torch.int64, least=0, most=MAX_INTEGER)]
    is_uniform: bool

    def check(self) -> None:
        """Raise a `ValueError` if tokens of a file exceed its slots, or contradict `is_uniform`."""
        if self.keys.dtype != self.values.dtype:
            raise ValueError(f"keys in {self.keys.dtype} have values in {self.values.dtype}")
        if bool((self.count > self.num_slots).any()):
            raise ValueError(f"`count` has to be at most {self.num_slots}")
        if self.is_uniform and bool((self.start > 0).any() | (self.count < self.num_slots).any()):
            raise ValueError("`is_uniform` does not fit where the prefix is")

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor, padding: torch.Tensor, count: torch.Tensor) -> ExactPrefix:
        """Copy `count` `[B]` tokens behind the `padding` `[B]` of a prompt `[B, H, T, D]`; both on the CPU."""
        device = keys.device
        most = int(count.max())
        slots = padding[:, None] + torch.arange(most, dtype=torch.int64, device="cpu")
        slots = slots.clamp(max=keys.shape[2] - 1).to(device)[:, None, :, None]
        keys = keys.gather(2, slots.expand(-1, keys.shape[1], -1, keys.shape[3]))
        values = values.gather(2, slots.expand(-1, values.shape[1], -1, values.shape[3]))
        is_uniform = not bool(padding.any()) and int(count.min()) == most
        return cls(keys, values, padding.to(device, copy=True), count.to(device), is_uniform)

    @property
    def num_slots(self) -> int:
        """Number of slots; a sequence may use fewer."""
        return self.keys.shape[2]

    @property
    def positions(self) -> torch.Tensor:
        """Position of every slot in the sequence, `[B, slots]`; unused slots follow those in use."""
        return self.start[:, None] + torch.arange(self.num_slots, dtype=torch.int64, device=self.start.device)

    @property
    def in_use(self) -> torch.Tensor:
        """True for slots that hold a token, `[B, slots]`."""
        return torch.arange(self.num_slots, dtype=torch.int64, device=self.start.device) < self.count[:, None]

    @property
    def end(self) -> torch.Tensor:
        """Position behind the last token of each sequence, `[B]`."""
        return self.start + self.count

    def truncate(self, length: int) -> None:
        """Drop tokens at position `length` and beyond. A sequence without tokens before it begins there."""
        self.start = self.start.clamp(max=length)
        self.count = torch.minimum(self.count, length - self.start)
        self.is_uniform = self.is_uniform and length >= self.num_slots

    def stop(self) -> int:
        """Position behind the last token of all sequences. The host may have to wait for a device."""
        return self.num_slots if self.is_uniform else int(self.end.max())

    def write_dense(self, side: str, output: torch.Tensor, start: int = 0) -> None:
        """Write the states of one side into `output` `[B, H, tokens, D]`, whose first position is `start`."""
        states: torch.Tensor = getattr(self, side)
        if self.is_uniform:
            tokens = states[:, :, start : start + output.shape[2]]
            output[:, :, : tokens.shape[2]] = tokens
            return
        indices = self.positions - start
        sequences, slots = (self.in_use & (indices >= 0) & (indices < output.shape[2])).nonzero(as_tuple=True)
        output[sequences, :, indices[sequences, slots]] = states[sequences, :, slots].to(output.dtype)

    def map(self, function: TensorFunction) -> None:
        """Replace every stored tensor by `function` of it."""
        self.keys, self.values = function(self.keys), function(self.values)
        self.start, self.count = function(self.start), function(self.count)

    def joined(
        self, keys: torch.Tensor, values: torch.Tensor, first: int, padding: torch.Tensor, unfitted: torch.Tensor
    ) -> ExactPrefix:
        """
        Return a prefix with all further tokens `[B, H, T, D]`, from position `first` on, of the `unfitted` sequences
        `[B]`. The `padding` `[B]` of a sequence without real tokens may have grown.
        """
        start, count = self.start.cpu(), self.count.cpu()
        start = torch.where(unfitted & (count == 0), torch.maximum(start, padding), start)
        num_new = keys.shape[2]
        skipped = (start + count - first).clamp(min=0, max=num_new)
        total = count + unfitted * (num_new - skipped)
        num_slots = max(self.num_slots, int(total.max()))
        held = [F.pad(states, (0, 0, 0, num_slots - self.num_slots)) for states in (self.keys, self.values)]
        for number in unfitted.nonzero().flatten().tolist():
            slots = slice(int(count[number]), int(total[number]))
            new = slice(int(skipped[number]), num_new)
            for states, added in zip(held, (keys, values), strict=True):
                states[number, :, slots] = added[number, :, new]
        device = self.count.device
        return ExactPrefix(held[0], held[1], start.to(device), total.to(device), is_uniform=False)

    def shortened(self, limits: torch.Tensor) -> ExactPrefix:
        """Return a prefix with at most `limits` `[B]` tokens of each sequence, and as many slots."""
        count = torch.minimum(self.count, limits.to(self.count.device))
        num_slots = int(count.max())
        keys, values = self.keys, self.values
        if num_slots < self.num_slots:
            keys, values = keys[:, :, :num_slots].clone(), values[:, :, :num_slots].clone()
        return ExactPrefix(keys, values, start=self.start, count=count, is_uniform=False)


class ExactTail:
    """
    The newest tokens, exact: keys and values `[B, H, capacity, D]`, where the first `length` tokens are in use.

    Capacity grows in small steps, as reserved memory counts too: moving a few tokens costs less than the memory. The
    capacity ends at `limit`, the largest number of tokens in ordinary decoding; a longer update reserves only the
    tokens that it has.

    The newest token may be `unwritten`: the attention kernel of a plan copies it into the storage, as four small
    operations of PyTorch take longer than the rest of an update. Every other reader writes it first.

    Attributes:
        storage (two `torch.Tensor` of shape `[B, H, capacity, D]`): keys and values, without the unwritten token.
        capacity (`int`): tokens that fit into the storage.
        length (`int`): tokens in use, the unwritten one included.
        token_kind (`tuple`): shapes and dtypes of keys and values, and the device, of one token that fits.
        unwritten (two `torch.Tensor` of shape `[B, H, 1, D]`, *optional*): key and value of the newest token, until
            attention has written them.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, limit: int):
        self.limit = limit
        self.length = keys.shape[2]
        self.unwritten: States | None = None
        self._reserve(keys, values, min(max(self.length, _STEP), max(limit, self.length)))

    def _set(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.storage = keys, values
        self.capacity = keys.shape[2]
        shapes = (torch.Size((*states.shape[:2], 1, states.shape[3])) for states in self.storage)
        self.token_kind = *shapes, keys.dtype, values.dtype, keys.device

    def _reserve(self, keys: torch.Tensor, values: torch.Tensor, capacity: int) -> None:
        """Store copies of tokens with room for `capacity` tokens."""
        self._set(_with_capacity(keys, capacity), _with_capacity(values, capacity))

    @property
    def keys(self) -> torch.Tensor:
        return self.tensors()[0][:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self.tensors()[1][:, :, : self.length]

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Return True if states are of one token like those stored."""
        return (keys.shape, values.shape, keys.dtype, values.dtype, keys.device) == self.token_kind

    def reserve(self, capacity: int) -> None:
        """Change the capacity to exactly `capacity` tokens, at least as many as are in use."""
        if self.capacity != capacity:
            self._reserve(self.keys, self.values, capacity)

    def append_exactly(self, keys: torch.Tensor, values: torch.Tensor) -> States:
        """Append tokens without spare capacity, as a dense cache does, and return all."""
        if self.unwritten is not None or self.length < self.capacity:
            self._set(self.keys, self.values)
        held_keys, held_values = self.storage
        self.storage = torch.cat((held_keys, keys), dim=2), torch.cat((held_values, values), dim=2)
        self.capacity = self.length = self.length + keys.shape[2]
        return self.storage

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append tokens."""
        self._write()
        total = self.length + keys.shape[2]
        if total > self.capacity:
            self._reserve(self.keys, self.values, max(total, min(-(-total // _STEP) * _STEP, self.limit)))
        for stored, states in zip(self.storage, (keys, values), strict=True):
            stored.narrow(2, self.length, keys.shape[2]).copy_(states)
        self.length = total

    def _write(self) -> None:
        if self.unwritten is not None:
            newest, self.unwritten = self.unwritten, None
            for stored, states in zip(self.storage, newest, strict=True):
                stored[:, :, self.length - 1 : self.length] = states

    def capacity_without(self, count: int) -> int:
        """Capacity once the oldest `count` tokens are dropped."""
        length = self.length - count
        return min(-(-max(length, 1) // _STEP) * _STEP, max(self.limit, length))

    def copy_without(self, count: int) -> States:
        """Copy all but the oldest `count` tokens into storage of the capacity that they need."""
        capacity = self.capacity_without(count)
        keys, values = self.keys[:, :, count:], self.values[:, :, count:]
        return _with_capacity(keys, capacity), _with_capacity(values, capacity)

    def drop_first(self, count: int, others: States | None = None) -> None:
        """Drop the oldest `count` tokens. `others` is the storage of the others, if `copy_without` has made it."""
        self._set(*(self.copy_without(count) if others is None else others))
        self.length -= count

    def drop_last(self, count: int) -> None:
        """Drop the newest `count` tokens."""
        self._write()
        self.length -= count

    def map(self, function: TensorFunction) -> None:
        """Replace both tensors by `function` of them."""
        self._write()
        keys, values = self.storage
        self._set(function(keys), function(values))

    def tensors(self) -> States:
        """Keys and values with all their capacity, every token written."""
        self._write()
        return self.storage

    def move_to(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the tokens in use into other storage, which may be their own, and use that from now on."""
        for stored, states in zip((keys, values), (self.keys, self.values), strict=True):
            stored[:, :, : self.length].copy_(states)
        self._set(keys, values)


def _with_capacity(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """Copy `[B, H, tokens, D]` into a tensor with room for `capacity` tokens."""
    resized = states.new_zeros(*states.shape[:2], capacity, states.shape[3])
    resized[:, :, : states.shape[2]] = states
    return resized
