"""The door to the compiled attention: parts of a cache in, tensors out."""

from array import array
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F

from kvcache_plugins.ops.compressed_states import TENSOR_NAMES, CompressedStates
from kvcache_plugins.ops.masking import slice_mask
from kvcache_plugins.ops.outliers import OUTLIER_TILE, channel_bits
from kvcache_plugins.ops.parts import CompressedPart, DensePart
from kvcache_plugins.ops.rotation import rotation_size

from .arrays import ROW, SIDE_ROWS, rows_of_layout
from .attention import attend_parts
from .calls import head_numbers
from .exact import FLOATS, storage_of
from .layout import code_layout
from .row_vectors import ROWS
from .settled_call import SettledCall, kind_of_tokens
from .tasks import most_rows
from .threads import num_threads, run


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
# Numbers that a part has of its own: two tables, or those of exact tokens
_OWN_SIZE = 5
# Tables of states that live
_TABLES: "WeakKeyDictionary[CompressedStates, np.ndarray]" = WeakKeyDictionary()


class AnyPart(Protocol):
    """A part of any kind."""

    @property
    def length(self) -> int:
        """Tokens in use."""

    @property
    def mask(self) -> torch.Tensor | None:
        """What is added to the scores."""


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.float32)


def _row(address: int, shape: Sequence[int]) -> list[int]:
    return [address, *shape, *[0] * (ROW - 1 - len(shape))]


def _table(states: CompressedStates, codes: torch.Tensor) -> np.ndarray:
    """Where everything is that `arrays.side_at` and `layout_at` make arrays of."""
    by_channel = states.grouping.axis == "channel"
    layout = code_layout(states.nbits, states.head_dim, 1 if by_channel else states.scale.shape[4])
    tensors = {"codes": codes, **dict(states.named_tensors())} | {"codes": codes}
    rows = [_row(tensors[n].data_ptr(), tensors[n].shape) if n in tensors else [0] * ROW for n in TENSOR_NAMES]
    rows += rows_of_layout(layout)
    rotation = rotation_size(states.head_dim) if states.is_rotated else 1
    is_wide = states.outlier_indices is not None and states.outlier_indices.dtype == torch.int32
    rows.append([by_channel, states.head_dim, channel_bits(states.head_dim), is_wide, layout.row_size, rotation])
    assert len(rows) == SIDE_ROWS
    return np.array(rows, dtype=np.int64)


class Arguments:
    """
    What is handed over by address, kept alive for the call.

    Attributes:
        has_copies (`bool`): whether any of it is a copy, which does not see what is written into the storage later.
    """

    def __init__(self) -> None:
        self._alive: list[object] = []
        self.has_copies = False

    def address(self, tensor: torch.Tensor) -> int:
        """Of the tensor's values as contiguous float32."""
        return self.keep(tensor if tensor.dtype == torch.float32 else tensor.float(), tensor).data_ptr()

    def keep(self, tensor: torch.Tensor, stored: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor, or a copy of it, contiguous; what it was made of can be given."""
        kept = tensor if tensor.is_contiguous() else tensor.contiguous()
        self.has_copies |= kept is not (tensor if stored is None else stored)
        self._alive.append(kept)
        return kept

    def release(self, count: int) -> None:
        """Keeps the newest `count` alive no more."""
        del self._alive[-count:]

    def table(self, states: CompressedStates) -> int:
        """Of the table of compressed states."""
        table = _TABLES.get(states)
        if table is None:
            if not all(tensor.is_contiguous() for _, tensor in states.named_tensors()):
                states = states.map(torch.Tensor.contiguous)
                self._alive.append(states)
                self.has_copies = True
            codes = states.codes
            layout = code_layout(states.nbits, states.head_dim, 1)
            missing = layout.row_size - codes.shape[4]
            if missing > 0:
                # Every call anew: a copy does not see what is written into the storage later
                codes = F.pad(codes, (0, missing))
                self.has_copies = True
            table = _table(states, codes)
            if codes is states.codes:
                _TABLES[states] = table
            self._alive += [table, codes]
        return table.ctypes.data

    def mask(self, mask: torch.Tensor | None, length: int) -> tuple[int, int, int, int, int]:
        """Address and dimensions of what is added to the scores, of the first tokens or of all."""
        if mask is None:
            return 0, 1, 1, 1, 0
        if mask.dim() < 4 or mask.shape[3] == 1 or mask.shape[3] > length:
            mask = slice_mask(mask, 0, length)
            assert mask is not None
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        # A mask is nothing stored that may change
        mask = mask.float().contiguous()
        self._alive.append(mask)
        return mask.data_ptr(), *mask.shape


class LayerCall:
    """
    A call of a worker for all parts of a layer; see `calls`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        num_heads, value_dim (`int`): H, and head dim of the values.
        scale (`float`): factor of the scores.
    """

    def __init__(self, query: torch.Tensor, num_heads: int, value_dim: int, scale: float):
        batch_size, num_query_heads, num_queries, head_dim = query.shape
        groups = num_query_heads // num_heads
        self.query, self.scale, self.arguments = query, scale, Arguments()
        self._shape = batch_size, num_heads, groups, num_queries, head_dim, value_dim
        # Of all heads and items, of which each has tasks of its own
        self.num_row_blocks = batch_size * num_heads * -(-groups * num_queries // ROWS)
        self.most_rows = most_rows(groups * num_queries)
        self._num_tasks, self._num_results, self._num_parts = 0, 0, 0
        self._numbers: list[int] = []

    def add(
        self,
        part: AnyPart,
        num_runs: int,
        tiles_per_task: int,
        own: Sequence[int],
        exact: int = 0,
    ) -> None:
        """Adds a part, which is split into runs of tiles; `own` is what its kind needs, as much for all kinds, and
        `exact` what exact tokens are stored as."""
        mask = self.arguments.mask(part.mask, part.length)
        span = part.length, tiles_per_task, num_runs
        self._numbers += (self._num_tasks, self._num_results, *mask, *span, exact, *own)
        self._num_tasks += self.num_row_blocks * num_runs
        self._num_results += num_runs
        self._num_parts += 1

    def add_exact(self, part: DensePart, size: int) -> None:
        """Adds an exact part, of as many numbers as the others' own are."""
        keys, values = part.keys, part.values
        storage = 0
        # Both sides are read by one dtype
        if keys.dtype is values.dtype:
            storage = storage_of(keys.dtype, min(keys.shape[3], values.shape[3]))
        # By address only where they are what is stored
        of = self.arguments.address if storage == 0 else lambda states: self.arguments.keep(states).data_ptr()
        self.add(part, 1, 1, (of(keys), of(values), keys.shape[2], *(0,) * (size - 3)), storage or FLOATS)
        self._exact_kind = kind_of_tokens(keys), kind_of_tokens(values)

    def run(self, worker: Any) -> torch.Tensor:
        """Attention `[B, H * G, Q, value head dim]` over all parts, in the queries' dtype."""
        batch_size, num_heads, groups, num_queries, _, value_dim = self._shape
        scratch = _empty(self._scratch_size())
        result = _empty(batch_size, num_heads * groups, num_queries, value_dim)
        addresses = self.arguments.address(self.query), scratch.data_ptr(), result.data_ptr()
        run(worker, self._num_tasks, self._table(*addresses))
        return result if self.query.dtype == torch.float32 else result.to(self.query.dtype)

    def settle(self, worker: Any) -> SettledCall | None:
        """The same call for queries to come, if it reads nothing but what is stored; the last part is exact."""
        if self.arguments.has_copies:
            return None
        # Keys and values of the last part, in whose place others may come
        self.arguments.release(2)
        batch_size, num_heads, groups, num_queries, _, value_dim = self._shape
        result_shape = batch_size, num_heads * groups, num_queries, value_dim
        table = array("q", (0, self._num_tasks, *self._table(0, 0, 0)))
        sizes = self._scratch_size(), result_shape, self._exact_kind
        return SettledCall(self.query, self.scale, worker, table, *sizes, self.arguments)

    def _scratch_size(self) -> int:
        batch_size, num_heads, groups, num_queries, _, value_dim = self._shape
        return self._num_results * batch_size * num_heads * groups * num_queries * (value_dim + 2)

    def _table(self, query: int, scratch: int, result: int) -> list[int]:
        """The numbers of the table but for its tasks, given addresses."""
        part_size = len(self._numbers) // self._num_parts
        shape = *self._shape, self._num_results
        return head_numbers(shape, self.scale, query, scratch, result, self._num_parts, part_size) + self._numbers


def prepare(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> tuple[LayerCall, Any]:
    """
    Attention of a few queries over all parts, ready to run: a call, and the worker for it.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence[CompressedPart]`): compressed parts.
        scale (`float`): factor of the scores.
    """
    num_heads, value_dim = _heads(dense, compressed)
    layer = LayerCall(query, num_heads, value_dim, scale)
    for part in compressed:
        tables = layer.arguments.table(part.keys), layer.arguments.table(part.values), *(0,) * (_OWN_SIZE - 2)
        layer.add(part, *_split(part, layer.num_row_blocks), tables)
    for exact in dense:
        layer.add_exact(exact, _OWN_SIZE)
    return layer, attend_parts[layer.most_rows]


def attend(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """Attention of a few queries over all parts, as in `prepare`; see `ops.attention.attend`."""
    layer, worker = prepare(query, dense, compressed, scale)
    return layer.run(worker)


def _heads(dense: Sequence[DensePart], compressed: Sequence[CompressedPart]) -> tuple[int, int]:
    """Key/value heads, and head dim of the values."""
    if compressed:
        return compressed[0].keys.codes.shape[1], compressed[0].values.head_dim
    return dense[0].values.shape[1], dense[0].values.shape[3]


def _split(part: CompressedPart, num_row_blocks: int) -> tuple[int, int]:
    """How many tasks the tiles of a part are split into, and tiles a task, given all heads and rows of all items."""
    chunk_length = part.keys.chunk_length
    num_tiles = -(-part.length // chunk_length) * -(-chunk_length // OUTLIER_TILE)
    threads = num_threads()
    wanted = -(-threads * _TASKS_PER_THREAD // num_row_blocks) if threads > 1 else 1
    tiles_per_task = max(-(-num_tiles // wanted), _MIN_TILES_PER_TASK)
    return -(-num_tiles // tiles_per_task), tiles_per_task
