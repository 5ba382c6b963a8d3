"""The door to the compiled attention: parts of a cache in, tensors out."""

from collections.abc import Sequence

import numba
import numpy as np
import torch

from .compiled_attention import Side, attend_block
from .compiled_exact import attend_exact, merge
from .compressed_states import CompressedStates
from .masking import slice_mask
from .outliers import OUTLIER_TILE, channel_bits
from .parts import CompressedPart, DensePart


# What Numba was started with, which cannot be exceeded
_MAX_THREADS: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
_NO_FACTOR = np.empty((0, 0, 0, 0, 0), dtype=np.uint16)
_NO_INDICES = np.empty((0, 0, 0, 0), dtype=np.int16)
_NO_VALUES = np.empty((0, 0, 0, 0), dtype=np.uint16)
_NO_OFFSETS = np.empty((0, 0, 0, 0), dtype=np.int32)
_NO_BIAS = np.empty((1, 1, 1, 0), dtype=np.float32)


def _empty(*shape: int) -> np.ndarray:
    return np.empty(shape, dtype=np.float32)


def _bits(halves: torch.Tensor) -> np.ndarray:
    """Float16 as the uint16 of its bits."""
    return halves.view(torch.uint16).numpy()


def _array(tensor: torch.Tensor | None, otherwise: np.ndarray) -> np.ndarray:
    if tensor is None:
        return otherwise
    return _bits(tensor) if tensor.dtype == torch.float16 else tensor.numpy()


def _side(states: CompressedStates) -> Side:
    return Side(
        codes=states.codes.numpy(),
        scale=_bits(states.scale),
        zero=_bits(states.zero),
        low_rank_a=_array(states.low_rank_a, _NO_FACTOR),
        low_rank_b=_array(states.low_rank_b, _NO_FACTOR),
        outlier_indices=_array(states.outlier_indices, _NO_INDICES),
        outlier_values=_array(states.outlier_values, _NO_VALUES),
        outlier_offsets=_array(states.outlier_offsets, _NO_OFFSETS),
        nbits=states.nbits,
        head_dim=states.head_dim,
        channel_bits=channel_bits(states.head_dim),
    )


def attend(
    query: torch.Tensor, dense: Sequence[DensePart], compressed: Sequence[CompressedPart], scale: float
) -> torch.Tensor:
    """
    Attention of a few queries over all parts; see `ops.attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        dense (`Sequence[DensePart]`): exact parts.
        compressed (`Sequence[CompressedPart]`): compressed parts, at least one.
        scale (`float`): factor of the scores.
    """
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    num_heads, value_dim = compressed[0].keys.codes.shape[1], compressed[0].values.head_dim
    num_rows = num_query_heads // num_heads * num_queries
    padded_rows = 1 if num_rows == 1 else -(-num_rows // 4) * 4
    rows = np.zeros((batch_size, num_heads, padded_rows, head_dim), dtype=np.float32)
    # What requires a gradient is no array
    rows[:, :, :num_rows] = (query.detach().float() * scale).reshape(batch_size, num_heads, num_rows, head_dim).numpy()
    shape_of_rows = (num_query_heads // num_heads, num_queries)

    num_threads = min(torch.get_num_threads(), _MAX_THREADS)
    numba.set_num_threads(num_threads)
    dense = [part for part in dense if part.keys.shape[2] > 0]
    splits = [_split(part, batch_size * num_heads, num_threads) for part in compressed]
    num_results = len(dense) + sum(num_tasks for num_tasks, _ in splits)
    output = _empty(num_results, batch_size, num_heads, padded_rows, value_dim)
    total, maximum = _empty(*output.shape[:4]), _empty(*output.shape[:4])
    first = 0
    for part, (num_tasks, tiles_per_task) in zip(compressed, splits, strict=True):
        own = slice(first, first + num_tasks)
        attend_block(
            rows,
            _side(part.keys),
            _side(part.values),
            part.keys.grouping.axis == "channel",
            _bias(part.mask, part.length),
            *shape_of_rows,
            part.length,
            tiles_per_task,
            output[own],
            total[own],
            maximum[own],
        )
        first += num_tasks
    for exact in dense:
        keys, values = (states.detach().float().numpy() for states in (exact.keys, exact.values))
        bias = _bias(exact.mask, keys.shape[2])
        attend_exact(rows, keys, values, bias, *shape_of_rows, output[first], total[first], maximum[first])
        first += 1
    result = _empty(batch_size, num_heads, num_rows, value_dim)
    merge(output, total, maximum, result)
    return torch.from_numpy(result).view(batch_size, num_query_heads, num_queries, value_dim).to(query.dtype)


def _split(part: CompressedPart, num_heads: int, num_threads: int) -> tuple[int, int]:
    """How many tasks a head of a part is split into, and tiles a task, given all heads of all items."""
    chunk_length = part.keys.chunk_length
    num_tiles = -(-part.length // chunk_length) * -(-chunk_length // OUTLIER_TILE)
    wanted = -(-num_threads * _TASKS_PER_THREAD // num_heads) if num_threads > 1 else 1
    tiles_per_task = max(-(-num_tiles // wanted), _MIN_TILES_PER_TASK)
    return -(-num_tiles // tiles_per_task), tiles_per_task


def _bias(mask: torch.Tensor | None, length: int) -> np.ndarray:
    """A mask as what is added to the scores, of four dimensions."""
    mask = slice_mask(mask, 0, length)
    if mask is None:
        return _NO_BIAS
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return mask.detach().float().contiguous().numpy()
