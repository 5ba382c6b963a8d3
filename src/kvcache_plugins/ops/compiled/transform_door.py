"""The door to the compiled attention over transform-coded rows: parts of a cache in, tensors out."""

from collections.abc import Sequence

import torch

from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.rotation import rotation_size
from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder, BasisTable
from kvcache_plugins.ops.transform_coding.parts import CodedPart, RowCoder

from .basis_attention import attend_basis_block, attend_basis_block_in_parallel
from .door import Arguments
from .exact import attend_exact, merge
from .primitives import ROWS
from .threads import num_threads, use_threads
from .transform_attention import TILE, attend_rows_block, attend_rows_block_in_parallel
from .transform_tables import codebook_of, padding_of, rotary_tables


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 16
_TASKS_PER_THREAD = 4
# By whether rows are in calibrated bases, and whether several threads share the tasks
_KERNELS = {
    (False, False): attend_rows_block,
    (False, True): attend_rows_block_in_parallel,
    (True, False): attend_basis_block,
    (True, True): attend_basis_block_in_parallel,
}


def _address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def attend_rows(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float
) -> torch.Tensor:
    """
    Attention of a few queries over all parts; see `ops.transform_coding.attention.attend`.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Sequence[DensePart | CodedPart]`): what is attended to.
        num_heads (`int`): H.
        scale (`float`): factor of the scores.
    """
    batch_size, num_query_heads, num_queries, head_dim = query.shape
    groups = num_query_heads // num_heads
    value_dim = _value_dim(parts[0])
    num_row_blocks = batch_size * num_heads * -(-groups * num_queries // ROWS)
    splits = [_split(part, num_row_blocks) if isinstance(part, CodedPart) else (1, 0) for part in parts]
    num_results = sum(num_tasks for num_tasks, _ in splits)
    scratch = torch.empty(num_results * batch_size * num_query_heads * num_queries * (value_dim + 2))
    result = torch.empty(batch_size, num_query_heads, num_queries, value_dim)
    shape = (batch_size, num_heads, groups, num_queries, head_dim, value_dim, num_results)
    arguments = Arguments()
    queries, results, first = arguments.address(query), scratch.data_ptr(), 0
    for part, (num_tasks, tiles_per_task) in zip(parts, splits, strict=True):
        mask = arguments.mask(part.mask, part.length)
        if isinstance(part, CodedPart):
            span = (part.length, tiles_per_task, num_tasks)
            is_calibrated = isinstance(part.coder, BasisCoder)
            attend_to = _KERNELS[is_calibrated, use_threads(num_row_blocks * num_tasks)]
            sides: tuple[tuple[int, ...], ...]
            if isinstance(part.coder, BasisCoder):
                tables = part.coder.tables.on(query.device)
                quantizer = tables[0].quantizer
                rows_and_tables = zip((part.keys, part.values), tables, strict=True)
                sides = tuple(_basis_side(rows, table, arguments) for rows, table in rows_and_tables)
            else:
                quantizer = part.coder.keys.quantizer
                sides = _key_side(part, part.coder, arguments), _value_side(part, part.coder, arguments)
            codebook = tuple(map(_address, codebook_of(quantizer)))
            attend_to(shape, scale, queries, *sides, codebook, _angles(part, arguments), mask, span, first, results)
        else:
            states = arguments.address(part.keys), arguments.address(part.values)
            attend_exact(shape, scale, queries, *states, mask, part.keys.shape[2], part.length, first, results)
        first += num_tasks
    merge(shape, results, result.data_ptr())
    return result if query.dtype == torch.float32 else result.to(query.dtype)


def _value_dim(part: DensePart | CodedPart) -> int:
    if not isinstance(part, CodedPart):
        return part.values.shape[3]
    if isinstance(part.coder, BasisCoder):
        return part.coder.tables.on(part.values.device)[1].head_dim
    return part.coder.values.head_dim


def _basis_side(rows: torch.Tensor, table: BasisTable, arguments: Arguments) -> tuple[int, ...]:
    rows = arguments.keep(rows)
    addresses = map(_address, (table.widths, table.mean, table.factors, table.basis, table.steps))
    return rows.data_ptr(), rows.shape[2], rows.shape[3], *addresses, table.widths.shape[1]


def _key_side(part: CodedPart, coder: RowCoder, arguments: Arguments) -> tuple[int, ...]:
    table, rows = coder.keys, arguments.keep(part.keys)
    assert table.order is not None and table.mean is not None
    is_wide = int(table.order.dtype != torch.uint8)
    numbers = (arguments.keep(tensor).data_ptr() for tensor in (table.widths, table.order))
    widths, order = numbers
    others = (arguments.keep(tensor).data_ptr() for tensor in (table.mean, table.deviation))
    return rows.data_ptr(), rows.shape[2], rows.shape[3], widths, order, is_wide, *others


def _value_side(part: CodedPart, coder: RowCoder, arguments: Arguments) -> tuple[int, ...]:
    table, rows = coder.values, arguments.keep(part.values)
    widths, deviation = (arguments.keep(tensor).data_ptr() for tensor in (table.widths, table.deviation))
    return rows.data_ptr(), rows.shape[2], rows.shape[3], widths, deviation, rotation_size(table.head_dim)


def _angles(part: CodedPart, arguments: Arguments) -> tuple[int, ...]:
    padding = arguments.keep(padding_of(part.padding, part.keys.shape[0]))
    partners, cosines, sines, frequencies = map(_address, rotary_tables(part.coder.layout))
    return partners, cosines, sines, frequencies, padding.data_ptr(), part.start


def _split(part: CodedPart, num_row_blocks: int) -> tuple[int, int]:
    """How many tasks the tiles of a part are split into, and tiles a task, given all heads and rows of all items."""
    num_tiles = -(-part.length // TILE)
    threads = num_threads()
    wanted = -(-threads * _TASKS_PER_THREAD // num_row_blocks) if threads > 1 else 1
    tiles_per_task = max(-(-num_tiles // wanted), _MIN_TILES_PER_TASK)
    return -(-num_tiles // tiles_per_task), tiles_per_task
