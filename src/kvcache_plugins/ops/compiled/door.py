"""The door to the compiled attention: parts of a cache in, tensors out."""

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

from .arrays import ROW, SIDE_ROWS
from .attention import attend_parts
from .calls import head_numbers
from .layout import code_layout
from .primitives import ROWS
from .threads import num_threads, run


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
# Numbers that a part has of its own: two tables, or those of exact tokens
_OWN_SIZE = 3
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
    rows += [_row(array.ctypes.data, array.shape) for array in layout if isinstance(array, np.ndarray)]
    rotation = rotation_size(states.head_dim) if states.is_rotated else 1
    is_wide = states.outlier_indices is not None and states.outlier_indices.dtype == torch.int32
    rows.append([by_channel, states.head_dim, channel_bits(states.head_dim), is_wide, layout.row_size, rotation])
    assert len(rows) == SIDE_ROWS
    return np.array(rows, dtype=np.int64)


class Arguments:
    """What is handed over by address, kept alive for the call."""

    def __init__(self) -> None:
        self._alive: list[object] = []

    def address(self, tensor: torch.Tensor) -> int:
        """Of the tensor's values as contiguous float32."""
        if tensor.dtype != torch.float32:
            tensor = tensor.float()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        self._alive.append(tensor)
        return tensor.data_ptr()

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it, contiguous."""
        tensor = tensor.contiguous()
        self._alive.append(tensor)
        return tensor

    def table(self, states: CompressedStates) -> int:
        """Of the table of compressed states."""
        table = _TABLES.get(states)
        if table is None:
            if not all(tensor.is_contiguous() for _, tensor in states.named_tensors()):
                states = states.map(torch.Tensor.contiguous)
                self._alive.append(states)
            codes = states.codes
            layout = code_layout(states.nbits, states.head_dim, 1)
            missing = layout.row_size - codes.shape[4]
            if missing > 0:
                # Every call anew: a copy does not see what is written into the storage later
                codes = F.pad(codes, (0, missing))
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
        return self.address(mask), *mask.shape


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
        self._num_tasks, self._num_results, self._num_parts = 0, 0, 0
        self._numbers: list[int] = []

    def add(
        self,
        part: AnyPart,
        num_runs: int,
        tiles_per_task: int,
        own: Sequence[int],
        is_exact: int = 0,
    ) -> None:
        """Adds a part, which is split into runs of tiles; `own` is what its kind needs, as much for all kinds."""
        mask = self.arguments.mask(part.mask, part.length)
        span = part.length, tiles_per_task, num_runs
        self._numbers += (self._num_tasks, self._num_results, *mask, *span, is_exact, *own)
        self._num_tasks += self.num_row_blocks * num_runs
        self._num_results += num_runs
        self._num_parts += 1

    def add_exact(self, part: DensePart, size: int) -> None:
        """Adds an exact part, of as many numbers as the others' own are."""
        states = self.arguments.address(part.keys), self.arguments.address(part.values)
        self.add(part, 1, 1, (*states, part.keys.shape[2], *(0,) * (size - 3)), 1)

    def run(self, worker: Any) -> torch.Tensor:
        """Attention `[B, H * G, Q, value head dim]` over all parts, in the queries' dtype."""
        batch_size, num_heads, groups, num_queries, _, value_dim = self._shape
        num_rows = batch_size * num_heads * groups * num_queries
        scratch = _empty(self._num_results * num_rows * (value_dim + 2))
        result = _empty(batch_size, num_heads * groups, num_queries, value_dim)
        addresses = self.arguments.address(self.query), scratch.data_ptr(), result.data_ptr()
        head = head_numbers(
            (*self._shape, self._num_results),
            self.scale,
            *addresses,
            self._num_parts,
            len(self._numbers) // self._num_parts,
        )
        run(worker, self._num_tasks, head + self._numbers)
        return result if self.query.dtype == torch.float32 else result.to(self.query.dtype)


def attend(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """
    Attention of a few queries over all parts; see `ops.attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence[CompressedPart]`): compressed parts.
        scale (`float`): factor of the scores.
    """
    num_heads, value_dim = _heads(dense, compressed)
    layer = LayerCall(query, num_heads, value_dim, scale)
    for part in compressed:
        tables = layer.arguments.table(part.keys), layer.arguments.table(part.values), 0
        layer.add(part, *_split(part, layer.num_row_blocks), tables)
    for exact in dense:
        layer.add_exact(exact, _OWN_SIZE)
    return layer.run(attend_parts)


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
