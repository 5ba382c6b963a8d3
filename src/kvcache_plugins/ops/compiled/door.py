"""The door to the compiled attention: parts of a cache in, tensors out."""

from collections.abc import Sequence
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
from .attention import attend_block, attend_block_in_parallel
from .exact import attend_exact, merge
from .layout import code_layout
from .primitives import ROWS
from .threads import num_threads, use_threads


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
# Tables of states that live
_TABLES: "WeakKeyDictionary[CompressedStates, np.ndarray]" = WeakKeyDictionary()


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
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    num_heads, value_dim = _heads(dense, compressed)
    groups = num_query_heads // num_heads
    num_rows = groups * num_queries
    num_row_blocks = batch_size * num_heads * -(-num_rows // ROWS)
    splits = [_split(part, num_row_blocks) for part in compressed]
    num_results = len(dense) + sum(num_tasks for num_tasks, _ in splits)
    scratch = _empty(num_results * batch_size * num_heads * num_rows * (value_dim + 2))
    result = _empty(batch_size, num_query_heads, num_queries, value_dim)
    shape = (batch_size, num_heads, groups, num_queries, head_dim, value_dim, num_results)
    arguments = Arguments()
    queries, results, first = arguments.address(query), scratch.data_ptr(), 0
    for part, (num_tasks, tiles_per_task) in zip(compressed, splits, strict=True):
        tables = arguments.table(part.keys), arguments.table(part.values)
        mask, span = arguments.mask(part.mask, part.length), (part.length, tiles_per_task, num_tasks)
        attend_to = attend_block_in_parallel if use_threads(num_row_blocks * num_tasks) else attend_block
        attend_to(shape, scale, queries, *tables, mask, span, first, results)
        first += num_tasks
    for exact in dense:
        states = arguments.address(exact.keys), arguments.address(exact.values)
        mask, capacity = arguments.mask(exact.mask, exact.length), exact.keys.shape[2]
        attend_exact(shape, scale, queries, *states, mask, capacity, exact.length, first, results)
        first += 1
    merge(shape, results, result.data_ptr())
    return result if query.dtype == torch.float32 else result.to(query.dtype)


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
