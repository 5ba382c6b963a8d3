"""The door to the compiled attention over transform-coded rows: parts of a cache in, tensors out."""

from collections.abc import Sequence
from typing import Any

import torch

from kvcache_plugins.ops.parts import DensePart
from kvcache_plugins.ops.rotation import rotation_size
from kvcache_plugins.ops.transform_coding.basis_coder import BasisCoder
from kvcache_plugins.ops.transform_coding.basis_table import BasisTable
from kvcache_plugins.ops.transform_coding.parts import CodedPart, RowCoder

from .basis_attention import attend_basis_parts
from .door import Arguments, LayerCall
from .threads import num_threads
from .transform_attention import TILE, attend_row_parts
from .transform_tables import codebook_of, padding_of, rotary_tables


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 16
_TASKS_PER_THREAD = 4


def _address(tensor: torch.Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def prepare_rows(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float
) -> tuple[LayerCall, Any]:
    """
    Attention of a few queries over all parts, ready to run: a call, and the worker for it.

    Args:
        query (`torch.Tensor` of shape `[B, H * G, Q, D]`): queries.
        parts (`Sequence[DensePart | CodedPart]`): what is attended to.
        num_heads (`int`): H.
        scale (`float`): factor of the scores.
    """
    layer = LayerCall(query, num_heads, _value_dim(parts[0]), scale)
    is_calibrated = any(isinstance(part, CodedPart) and isinstance(part.coder, BasisCoder) for part in parts)
    workers, size = (attend_basis_parts, 28) if is_calibrated else (attend_row_parts, 25)
    for part in parts:
        if isinstance(part, CodedPart):
            layer.add(part, *_split(part, layer.num_row_blocks), _numbers(part, query.device, layer.arguments))
        else:
            layer.add_exact(part, size)
    return layer, workers[layer.most_rows]


def attend_rows(
    query: torch.Tensor, parts: Sequence[DensePart | CodedPart], num_heads: int, scale: float
) -> torch.Tensor:
    """Attention of a few queries over all parts, as in `prepare_rows`; see `ops.transform_coding.attention.attend`."""
    layer, worker = prepare_rows(query, parts, num_heads, scale)
    return layer.run(worker)


def _numbers(part: CodedPart, device: torch.device, arguments: Arguments) -> tuple[int, ...]:
    """What the workers read of a part."""
    if isinstance(part.coder, BasisCoder):
        tables = part.coder.tables.on(device)
        quantizer = tables[0].quantizer
        keys, values = (
            _basis_side(rows, table, arguments) for rows, table in zip((part.keys, part.values), tables, strict=True)
        )
    else:
        quantizer = part.coder.keys.quantizer
        keys, values = _key_side(part, part.coder, arguments), _value_side(part, part.coder, arguments)
    return *keys, *values, *map(_address, codebook_of(quantizer)), *_angles(part, arguments)


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
    mean = 0 if coder.value_mean is None else arguments.keep(coder.value_mean).data_ptr()
    return rows.data_ptr(), rows.shape[2], rows.shape[3], widths, deviation, rotation_size(table.head_dim), mean


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
