"""Attention of a few queries over all parts of a layer by the C kernels: `cpu/layer.h` in Python.

A call is made of a query and its parts. It runs once, or is prepared for queries to come: in a model's step whatever
Python touches comes from memory, so of a prepared call only addresses and one length are written for a token.

Legend: B batch, H key/value heads, G query heads a key/value head, Q new tokens, D and E channels of keys and values.
"""

import ctypes
import os
from typing import Any

import torch

from kvcache_plugins.ops.masking import slice_mask
from kvcache_plugins.ops.parts import DensePart

from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run_at


# As in `layer.h`
ROWS, TILE, MOST_CHANNELS = 4, 64, 640
EXACT, ROWS_PART, BASIS_ROWS_PART, GROUPS_PART = range(4)
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4


class Part(ctypes.Structure):
    """A part of a layer, see `layer.h`."""

    _fields_ = (
        ("kind", LONG),
        ("length", LONG),
        ("mask", ADDRESS),
        ("mask_shape", LONG * 4),
        ("stored", ADDRESS),
    )


class Exact(ctypes.Structure):
    """Exact tokens, see `layer.h`."""

    _fields_ = (
        ("kind", LONG),
        ("capacity", LONG),
        ("keys", ADDRESS),
        ("values", ADDRESS),
        ("newest_key", ADDRESS),
        ("newest_value", ADDRESS),
    )


class _Call(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("batch", "heads", "groups", "queries", "key_dim", "value_dim", "runs", "kind")),
        ("scale", ctypes.c_double),
        ("query", ADDRESS),
        ("result", ADDRESS),
        ("partial", ADDRESS),
        ("num_parts", LONG),
        ("parts", ADDRESS),
    )


# Where in structures is what changes from token to token
_NEXT, _ENDED = Tasks.next.offset // 8, Tasks.ended.offset // 8
_QUERY, _RESULT = _Call.query.offset // 8, _Call.result.offset // 8
_LENGTH, _CAPACITY = Part.length.offset // 8, Exact.capacity.offset // 8
_KEYS, _NEWEST = Exact.keys.offset // 8, Exact.newest_key.offset // 8


class AttentionCall:
    """
    Attention of queries over parts that are added one by one.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries in float32, bfloat16 or float16.
        num_heads, value_dim (`int`): H and E.
        scale (`float`): factor of the scores.

    Attributes:
        has_copies (`bool`): whether any part reads a copy, which does not see what is written into the storage later.
    """

    def __init__(self, query: torch.Tensor, num_heads: int, value_dim: int, scale: float):
        self.query, self.scale, self.has_copies = query, scale, False
        batch_size, num_query_heads, num_queries, head_dim = query.shape
        if num_query_heads % num_heads or max(head_dim, value_dim) > MOST_CHANNELS:
            raise ValueError(f"{num_query_heads} query heads of {head_dim} channels over {num_heads} key/value heads")
        self.batch_size, self.num_heads, self.key_dim, self.value_dim = batch_size, num_heads, head_dim, value_dim
        self._groups, self._num_queries = num_query_heads // num_heads, num_queries
        self._parts: list[Part] = []
        self._alive: list[object] = []
        self._exact: tuple[Exact, DensePart] | None = None

    def keep(self, alive: Any) -> Any:
        """Keeps an object alive as long as the call, and returns it."""
        self._alive.append(alive)
        return alive

    def contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a contiguous copy of it, kept alive."""
        kept = tensor.contiguous()
        self.has_copies |= kept is not tensor
        return self.keep(kept)

    def add(self, kind: int, stored: int, length: int, mask: torch.Tensor | None) -> None:
        """Adds a part of `length` tokens, given the address of what its kind has stored."""
        part = Part(kind, length, None, (1, 1, 1, 0), stored)
        if mask is not None:
            # One column, or more than there are tokens, is not the mask of these tokens as it stands
            if mask.dim() < 4 or mask.shape[3] == 1 or mask.shape[3] > length:
                mask = slice_mask(mask, 0, length)
                assert mask is not None
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
            mask = self.keep(mask.float().contiguous())
            allowed = (self.batch_size, self.num_heads * self._groups, self._num_queries)
            if any(size not in (1, most) for size, most in zip(mask.shape, allowed, strict=False)):
                raise ValueError(f"a mask of shape {tuple(mask.shape)} for queries {tuple(self.query.shape)}")
            part.mask, part.mask_shape = address_of("mask", mask, torch.float32, (None,) * 4), tuple(mask.shape)
        self._parts.append(part)

    def add_exact(self, part: DensePart) -> None:
        """Adds exact tokens; the last that are added may grow in a prepared call."""
        keys, values = part.keys, part.values
        if keys.dtype is not values.dtype or keys.dtype not in KINDS:
            keys, values = keys.float(), values.float()
            self.has_copies = True
        stored = Exact(KINDS[keys.dtype], keys.shape[2])
        keys, values = self.contiguous(keys), self.contiguous(values)
        self._exact = self.keep(stored), DensePart(keys, values, part.length, None)
        self._place(stored, keys, values, part.length)
        self.add(EXACT, ctypes.addressof(stored), part.length, part.mask)

    def _place(self, stored: Exact, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        sizes = self.batch_size, self.num_heads, max(keys.shape[2], length)
        stored.keys = address_of("keys", keys, keys.dtype, (*sizes, self.key_dim))
        stored.values = address_of("values", values, keys.dtype, (*sizes, self.value_dim))

    def run(self) -> torch.Tensor:
        """Attention `[B, H * G, Q, E]` over all parts, in the queries' dtype."""
        query = self.query if self.query.dtype in KINDS else self.query.float()
        return PreparedCall(self, query).attend_now(query.contiguous()).to(self.query.dtype)

    def prepare(self) -> "PreparedCall | None":
        """Prepares a call for queries to come, over a last part, exact, that grows; `None` if a part is a copy."""
        if self.has_copies or self._exact is None or self.query.dtype not in KINDS:
            return None
        return PreparedCall(self, self.query)


class PreparedCall:
    """
    A call for queries of one shape and dtype, over parts of which only the last, exact one may grow.

    Args:
        call (`AttentionCall`): says what the parts are.
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries like those to come.
    """

    def __init__(self, call: AttentionCall, query: torch.Tensor):
        parts = (Part * len(call._parts))(*call._parts)
        self._alive, self._parts = (call._alive, parts), parts
        self._shape, self._dtype, self._scale = query.shape, query.dtype, call.scale
        self._threads = num_threads()
        # What that was of
        self._origin = torch.get_num_threads(), os.getpid()
        rows = call._groups * call._num_queries
        units = call.batch_size * call.num_heads * -(-rows // ROWS)
        tiles = sum(-(-part.length // TILE) for part in call._parts)
        wanted = -(-self._threads * _TASKS_PER_THREAD // units) if self._threads > 1 else 1
        runs = max(min(wanted, tiles // _MIN_TILES_PER_TASK), 1)
        self._call = _Call(
            Tasks(0, units * runs, 0),
            *(call.batch_size, call.num_heads, call._groups, call._num_queries, call.key_dim, call.value_dim),
            *(runs, KINDS[query.dtype], call.scale, None, None, None, len(parts), ctypes.addressof(parts)),
        )
        self._kernel, self._address = function("attend"), ctypes.addressof(self._call)
        # Written as numbers, in a third of the time that fields of structures take
        self._numbers, self._last = _as_numbers(self._call), _as_numbers(parts[-1])
        self._running = min(self._threads, units * runs)
        self._result_shape = call.batch_size, query.shape[1], call._num_queries, call.value_dim
        self._is_like_query = self._result_shape == query.shape
        if runs > 1:
            self._partial = torch.empty(units * runs * ROWS * (call.value_dim + 2))
            self._call.partial = self._partial.data_ptr()
        if call._exact is not None:
            stored, exact = call._exact
            self._exact = _as_numbers(stored)
            self._kind = kind_of_tokens(exact.keys), kind_of_tokens(exact.values)
            self._storage: tuple[torch.Tensor, torch.Tensor] | None = None
            self._capacity, self._exact_dtype = 0, exact.keys.dtype
            one = call.batch_size, call.num_heads, 1
            self._newest_shapes = torch.Size((*one, call.key_dim)), torch.Size((*one, call.value_dim))
            self._accepted: tuple[torch.Tensor, torch.Tensor] | None = None

    def accept(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Checks key and value `[B, H, 1, D or E]` of a token that `attend` is to write; `None` if it cannot."""
        if (
            (key.shape, value.shape) == self._newest_shapes
            and key.dtype is value.dtype is self._exact_dtype
            and key.is_contiguous()
            and value.is_contiguous()
            and key.is_cpu
            and value.is_cpu
        ):
            self._accepted = key, value
            return self._accepted
        return None

    def attend(
        self,
        query: torch.Tensor,
        scale: float | None,
        storage: tuple[torch.Tensor, torch.Tensor],
        length: int,
        newest: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """
        Attention over all parts.

        Args:
            query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
            scale (`float`, *optional*): factor of the scores.
            storage (two `torch.Tensor` of shape `[B, H, at least T, D or E]`): keys and values that the last part is
                now.
            length (`int`): its tokens in use, T.
            newest (two `torch.Tensor` of shape `[B, H, 1, D or E]`, *optional*): the last of them, if it is to be
                written there, as `accept` returned it.

        Returns:
            `torch.Tensor` of shape `[B, H * G, Q, E]`, in the queries' dtype; `None` if queries, scale or threads are
            others than the call was prepared for.

        Raises:
            ValueError: if exact tokens are not of the dtype and sizes that the call was prepared for.
        """
        if (
            query.dtype is not self._dtype
            or query.shape != self._shape
            or not query.is_cpu
            or (query.shape[3] ** -0.5 if scale is None else scale) != self._scale
            or (torch.get_num_threads(), os.getpid()) != self._origin
        ):
            return None
        stored = self._exact
        if storage is not self._storage:
            keys, values = storage
            if (kind_of_tokens(keys), kind_of_tokens(values)) != self._kind or keys.shape[2] != values.shape[2]:
                raise ValueError(f"exact tokens have to be {self._kind}, as when the call was prepared")
            stored[_KEYS], stored[_KEYS + 1], stored[_CAPACITY] = keys.data_ptr(), values.data_ptr(), keys.shape[2]
            self._storage, self._capacity = storage, keys.shape[2]
        if not 0 <= length <= self._capacity:
            raise ValueError(f"{length} tokens in use of {self._capacity}")
        if newest is None:
            stored[_NEWEST] = stored[_NEWEST + 1] = 0
        elif newest is self._accepted and length > 0:
            stored[_NEWEST], stored[_NEWEST + 1] = newest[0].data_ptr(), newest[1].data_ptr()
        else:
            raise ValueError("the newest token has to be one that the call has accepted")
        self._last[_LENGTH] = length
        return self.attend_now(query if query.is_contiguous() else query.contiguous())

    def attend_now(self, query: torch.Tensor) -> torch.Tensor:
        """Attention of contiguous queries that fit, over the parts as they are."""
        # What is like another tensor is made in half the time
        result = torch.empty_like(query) if self._is_like_query else query.new_empty(self._result_shape)
        numbers = self._numbers
        numbers[_NEXT] = numbers[_ENDED] = 0
        numbers[_QUERY], numbers[_RESULT] = query.data_ptr(), result.data_ptr()
        if self._running == 1:
            self._kernel(self._address)
        else:
            run_at(self._kernel, self._address, self._running)
        return result


def _as_numbers(structure: ctypes.Structure) -> "memoryview[int]":
    return memoryview(structure).cast("B").cast("q")


def kind_of_tokens(states: torch.Tensor) -> tuple[object, ...]:
    """Lists sizes, dtype and layout of tokens `[B, H, any, D]`: all that is believed of them when they are read."""
    return states.shape[0], states.shape[1], states.shape[3], states.dtype, states.is_contiguous()
