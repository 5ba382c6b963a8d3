"""Coding of tokens on a CPU: `ops.transform_coding.rows` in one pass over each token, compiled.

The code of a number is found from a grid: a cell says which code its lower end has, and the bounds next to it are
looked at. In PyTorch, where every step is a pass over all numbers, the same takes twenty times as long.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import float32, int64, njit, prange, uint64

from kvcache_plugins.ops.transform_coding.codebooks import MAX_WIDTH, levels, thresholds

from .arrays import bytes_at, floats_at, halves_at, longs_at
from .primitives import OPTIONS
from .threads import use_threads
from .vectors import LANES, float_of_half


if TYPE_CHECKING:
    from kvcache_plugins.ops.transform_coding.rows import RowTable

# A grid over numbers from `-_GRID_END` to `_GRID_END`, in cells of `1 / _GRID_STEPS`
_GRID_END, _GRID_STEPS = 4.5, 64.0
_GRID_CELLS = int(2 * _GRID_END * _GRID_STEPS)
_CODES = 2**MAX_WIDTH
_SCALE_STEPS, _SCALE_OFFSET = 16.0, 128
_LEAST_GAIN = 0.3
# Tokens of a task
_TASK_TOKENS = 256


@cache
def _tables() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of the codes and their points, `[9, 256]`, and the code at the lower end of each cell, `[9, cells]`."""
    bounds = torch.full((MAX_WIDTH + 1, _CODES), torch.inf)
    bounds[:, :-1] = thresholds(torch.device("cpu"))
    points = torch.zeros(MAX_WIDTH + 1, _CODES)
    for width in range(1, MAX_WIDTH + 1):
        points[width, : 2**width] = levels(width)
    ends = (torch.arange(_GRID_CELLS) / _GRID_STEPS - _GRID_END).expand(MAX_WIDTH + 1, -1).contiguous()
    return bounds, points, torch.searchsorted(bounds, ends)


@njit(**OPTIONS)
def _code(number: Any, width: int, bounds: Any, first_codes: Any) -> int:
    """How many bounds of a width lie below a number."""
    near = min(max(number, float32(-_GRID_END)), float32(_GRID_END))
    cell = int64((near + float32(_GRID_END)) * float32(_GRID_STEPS))
    code = int64(first_codes[width, min(cell, _GRID_CELLS - 1)])
    while number > bounds[width, code]:
        code += 1
    while code > 0 and not number > bounds[width, code - 1]:
        code -= 1
    return code


@njit(**OPTIONS)
def _stored_scale(scale: float) -> int:
    return int(min(max(np.round(np.log2(max(scale, 1e-6)) * _SCALE_STEPS) + _SCALE_OFFSET, 0.0), 255.0))


@njit(**OPTIONS)
def _scale_of(stored: int) -> Any:
    return float32(np.exp2((stored - _SCALE_OFFSET) / _SCALE_STEPS))


@njit(**OPTIONS)
def _encode_token(
    state: Any, own: Any, means: Any, inverses: Any, widths: Any, rule: tuple[bool, bool, int], tables: Any,
    normal: Any, row: Any,
) -> None:  # fmt: skip
    energy, coded_energy, num_coded = float32(0), float32(0), 0
    for v in range(widths.shape[0]):
        for i in range(v * LANES, (v + 1) * LANES):
            number = (state[own[i]] - means[i]) * inverses[i] if own[i] >= 0 else float32(0)
            normal[i] = number
            energy += number * number
            if widths[v] > 0:
                coded_energy += number * number
                num_coded += 1
    scale = _scale_of(_stored_scale(np.sqrt(coded_energy / max(num_coded, 1))))
    for _ in range(1 + rule[2]):
        row[0] = _stored_scale(_encode_channels(normal, widths, rule, tables, energy, scale, row))
        found = _scale_of(int64(row[0]))
        if found == scale:
            break
        scale = found


@njit(**OPTIONS)
def _encode_channels(
    normal: Any, widths: Any, rule: tuple[bool, bool, int], tables: Any, energy: Any, scale: Any, row: Any
) -> Any:
    """Writes the codes of a token for a scale, and returns the one that fits them."""
    bounds, points, first_codes, factors = tables
    weighted, by_energy, _ = rule
    energy = float32(0) if by_energy else energy
    inverse = float32(1) / scale
    over, under, place = float32(0), float32(0), 1
    for v in range(widths.shape[0]):
        width = widths[v]
        if width == 0:
            continue
        weight = float32(1 << (2 * width)) if weighted or by_energy else float32(1)
        bits = uint64(0)
        for lane in range(LANES):
            number = normal[v * LANES + lane]
            code = _code(number * inverse, width, bounds, first_codes)
            point = points[width, code] * factors[width]
            over += weight * number * point
            under += weight * point * point
            if by_energy:
                energy += weight * number * number
            bits |= uint64(code) << uint64(lane * width)
        for byte in range(width):
            row[place] = (bits >> uint64(8 * byte)) & uint64(255)
            place += 1
    if weighted:
        return over / max(under, float32(1e-9))
    return energy / over if over > float32(_LEAST_GAIN) * energy * inverse else scale


@njit(**OPTIONS)
def _encode_task(
    task: int, shape: Any, states: int, table: Any, rule: tuple[bool, bool, int], codebook: Any, rows: int, span: Any
) -> None:
    num_matrices, length, head_dim, row_size = shape
    order, mean_address, deviation_address, num_deviations, width_address = table
    matrix, part = task % num_matrices, task // num_matrices
    count = -(-head_dim // LANES)
    widths = np.zeros(count, dtype=np.int64)
    widths[:] = bytes_at(width_address, (num_matrices, count))[matrix]
    deviations = halves_at(deviation_address, (num_matrices, num_deviations))[matrix]
    own = np.full(count * LANES, -1, dtype=np.int64)
    means, inverses = np.zeros(count * LANES, dtype=np.float32), np.zeros(count * LANES, dtype=np.float32)
    for i in range(head_dim):
        channel = longs_at(order, (num_matrices, head_dim))[matrix, i] if order else i
        own[i] = channel
        if mean_address:
            means[i] = float_of_half(halves_at(mean_address, (num_matrices, head_dim))[matrix, channel])
        deviation = float_of_half(deviations[channel if num_deviations > 1 else 0])
        inverses[i] = float32(1) / deviation if deviation > 0 else float32(0)
    tables = (
        floats_at(codebook[0], (MAX_WIDTH + 1, _CODES)),
        floats_at(codebook[1], (MAX_WIDTH + 1, _CODES)),
        longs_at(codebook[2], (MAX_WIDTH + 1, _GRID_CELLS)),
        floats_at(codebook[3], (MAX_WIDTH + 1,)),
    )
    normal = np.zeros(count * LANES, dtype=np.float32)
    all_states = floats_at(states, (num_matrices, length, head_dim))[matrix]
    all_rows = bytes_at(rows, (num_matrices, length, row_size))[matrix]
    for t in range(part * span, min((part + 1) * span, length)):
        _encode_token(all_states[t], own, means, inverses, widths, rule, tables, normal, all_rows[t])


@njit(**OPTIONS)
def _encode(
    shape: Any, states: int, table: Any, rule: tuple[bool, bool, int], codebook: Any, rows: int, span: int
) -> None:
    """
    All tasks; everything comes by address, see `arrays`.

    Args:
        shape: B H, T, D, R.
        states: `[B H, T, D]`, float32.
        table: order, int64, or 0; means or 0; deviations and how many a head; widths.
        rule: how the scale is found: `is_weighted`, `by_energy` and `num_refits` of `RowTable`.
        codebook: what `_tables` returned, and what points are multiplied by `[9]`.
        rows: `[B H, T, R]`, filled.
        span: tokens of a task.
    """
    for task in range(shape[0] * -(-shape[1] // span)):
        _encode_task(task, shape, states, table, rule, codebook, rows, span)


@njit(parallel=True, **OPTIONS)
def _encode_in_parallel(
    shape: Any, states: int, table: Any, rule: tuple[bool, bool, int], codebook: Any, rows: int, span: int
) -> None:
    for task in prange(shape[0] * -(-shape[1] // span)):
        _encode_task(task, shape, states, table, rule, codebook, rows, span)


def encode_rows(states: torch.Tensor, table: "RowTable", factors: torch.Tensor) -> torch.Tensor:
    """
    Rows `[B, H, T, R]` of states `[B, H, T, D]`, float32; see `RowTable.encode`.

    Args:
        factors (`torch.Tensor` of shape `[9]`): what the points of every width are multiplied by.
    """
    batch_size, num_heads, length, head_dim = states.shape
    states = states.contiguous()
    rows = torch.empty(batch_size, num_heads, length, table.row_size, dtype=torch.uint8)
    order = None if table.order is None else table.order.long().contiguous()
    mean = None if table.mean is None else table.mean.contiguous()
    deviation, widths = table.deviation.contiguous(), table.widths.contiguous()
    num_tasks = batch_size * num_heads * -(-length // _TASK_TOKENS)
    encode = _encode_in_parallel if use_threads(num_tasks) else _encode
    encode(
        (batch_size * num_heads, length, head_dim, table.row_size),
        states.data_ptr(),
        (
            0 if order is None else order.data_ptr(),
            0 if mean is None else mean.data_ptr(),
            deviation.data_ptr(),
            deviation.shape[2],
            widths.data_ptr(),
        ),
        (table.is_weighted, table.by_energy, table.num_refits),
        (*(each.data_ptr() for each in _tables()), factors.data_ptr()),
        rows.data_ptr(),
        _TASK_TOKENS,
    )
    return rows
