"""Coding of tokens on a CPU: `ops.transform_coding.rows` in one pass over each token, compiled.

The code of a number is found from a grid: a cell says which code its lower end has, and the bounds next to it are
looked at. In PyTorch, where every step is a pass over all numbers, the same takes twenty times as long.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from numba import float32, int64, njit, uint64

from kvcache_plugins.ops.transform_coding.codebooks import MAX_WIDTH, levels, thresholds
from kvcache_plugins.ops.transform_coding.quantizers import unshrunk

from . import trellis_coder
from .arrays import bytes_at, floats_at, longs_at
from .new_arrays import zero_floats
from .primitives import BORROWING, OPTIONS, WORKER
from .threads import num_tasks, run, take_task
from .transform_tokens import (
    Normalization,
    coding_at,
    fitting_scale,
    load_normalization,
    normalize,
    scale_of,
    stored_scale,
)
from .vectors import LANES


if TYPE_CHECKING:
    from kvcache_plugins.ops.transform_coding.rows import RowTable

# A grid over numbers from `-_GRID_END` to `_GRID_END`, in cells of `1 / _GRID_STEPS`
_GRID_END, _GRID_STEPS = 4.5, 64.0
_GRID_CELLS = int(2 * _GRID_END * _GRID_STEPS)
_CODES = 2**MAX_WIDTH
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


@njit(**BORROWING)
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


@njit(**BORROWING)
def _encode_token(
    state: Any, normalization: Normalization, rule: tuple[bool, bool, int], tables: Any, normal: Any, row: Any
) -> None:
    energy, scale = normalize(state, normalization, normal)
    for _ in range(1 + rule[2]):
        fitting = _encode_channels(normal, normalization.widths, rule, tables, energy, scale, row)
        row[0] = stored_scale(fitting)
        found = scale_of(int64(row[0]))
        if found == scale:
            break
        scale = found


@njit(**BORROWING)
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
    return fitting_scale(weighted, energy, over, under, scale)


@njit(**OPTIONS)
def _encode_task(
    task: int, shape: Any, states: int, table: Any, rule: tuple[bool, bool, int], codebook: Any, rows: int, span: Any
) -> None:
    num_matrices, length, head_dim, row_size = shape
    matrix, part = task % num_matrices, task // num_matrices
    normalization = load_normalization(num_matrices, head_dim, table, matrix)
    tables = (
        floats_at(codebook[0], (MAX_WIDTH + 1, _CODES)),
        floats_at(codebook[1], (MAX_WIDTH + 1, _CODES)),
        longs_at(codebook[2], (MAX_WIDTH + 1, _GRID_CELLS)),
        floats_at(codebook[3], (MAX_WIDTH + 1,)),
    )
    normal = zero_floats((normalization.own.shape[0],))
    all_states = floats_at(states, (num_matrices, length, head_dim))[matrix]
    all_rows = bytes_at(rows, (num_matrices, length, row_size))[matrix]
    for t in range(part * span, min((part + 1) * span, length)):
        _encode_token(all_states[t], normalization, rule, tables, normal, all_rows[t])


@njit(**WORKER)
def _encode(address: int) -> None:
    """
    The worker of a table that `coding_at` reads.

    The codebook is what `_tables` returned, and what points are multiplied by `[9]`.
    """
    shape, states, table, rule, codebook, rows, span = coding_at(address)
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _encode_task(task, shape, states, table, rule, codebook, rows, span)
        task = take_task(address)


def encode_rows(states: torch.Tensor, table: "RowTable") -> torch.Tensor:
    """Rows `[B, H, T, R]` of states `[B, H, T, D]`, float32; see `RowTable.encode`."""
    batch_size, num_heads, length, head_dim = states.shape
    states = states.contiguous()
    rows = torch.empty(batch_size, num_heads, length, table.row_size, dtype=torch.uint8)
    order = None if table.order is None else table.order.long().contiguous()
    mean = None if table.mean is None else table.mean.contiguous()
    deviation, widths = table.deviation.contiguous(), table.widths.contiguous()
    tasks = batch_size * num_heads * -(-length // _TASK_TOKENS)
    is_trellis = table.quantizer == "trellis"
    rule = table.is_weighted, table.by_energy, table.num_refits
    addresses = [each.data_ptr() for each in ((trellis_coder.points(),) if is_trellis else _tables())]
    factors = unshrunk(table.quantizer)
    if table.is_weighted:
        factors = torch.ones_like(factors)
    numbers = (
        *(batch_size * num_heads, length, head_dim, table.row_size),
        states.data_ptr(),
        0 if order is None else order.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        *(deviation.data_ptr(), deviation.shape[2], widths.data_ptr()),
        *map(int, rule),
        *addresses,
        *(0,) * (3 - len(addresses)),
        factors.data_ptr(),
        *(rows.data_ptr(), _TASK_TOKENS),
    )
    run(trellis_coder.encode if is_trellis else _encode, tasks, numbers)
    return rows
