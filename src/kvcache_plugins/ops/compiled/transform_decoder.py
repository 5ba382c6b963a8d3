"""Rows of tokens made dense on a CPU, and keys turned by the angles of their positions: `ops.transform_coding.rows`
and `rotary` in one pass each, as prompts behind a compressed prefix need them.

Angles are sums of one that is computed and of one out of a table, as in attention: a cosine for every channel of every
token would take longer than all else.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import float32, njit

from kvcache_plugins.ops.rotation import rotation_size
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout

from .arrays import bytes_at, doubles_at, floats_at, halves_at, longs_at
from .new_arrays import zero_floats, zero_longs, zeros
from .primitives import BORROWING, OPTIONS, WORKER
from .threads import FIRST, num_tasks, run, take_task
from .tile import rotate_row
from .transform_attention import TILE
from .transform_primitives import Blocks, make_blocks, points_of
from .transform_tables import codebook_of, padding_of, rotary_tables
from .vectors import LANES, broadcast, float_of_half, load_floats, multiply, multiply_add, store_floats


if TYPE_CHECKING:
    from kvcache_plugins.ops.transform_coding.rows import RowTable

# Tokens of a task
_TASK_TOKENS = 256
_ZERO = np.float32(0)


@njit(**OPTIONS)
def _load_channels(shape: Any, table: Any, matrix: int) -> Any:
    """Numbers of a head's channels in the order of its rows, deviations and means `[1, 8 N]`."""
    num_matrices, _, head_dim, _ = shape
    order, mean_address, deviation_address, num_deviations, _ = table
    size = -(-head_dim // LANES) * LANES
    own, deviations, means = zero_longs((head_dim,)), zeros(1, size), zeros(1, size)
    stored = halves_at(deviation_address, (num_matrices, num_deviations))[matrix]
    for i in range(head_dim):
        own[i] = longs_at(order, (num_matrices, head_dim))[matrix, i] if order else i
        deviations[0, i] = float_of_half(stored[own[i] if num_deviations > 1 else 0])
        if mean_address:
            means[0, i] = float_of_half(halves_at(mean_address, (num_matrices, head_dim))[matrix, own[i]])
    return own, deviations, means


@njit(**BORROWING)
def _decode_token(row: Any, t: int, blocks: Blocks, scale: Any, deviations: Any, means: Any, normal: Any) -> None:
    """Channels of a token in the order of its row, `[1, 8 N]`."""
    for v in range(blocks.low.shape[0]):
        place = v * LANES
        number = load_floats(means, 0, place)
        if blocks.widths[v] > 0:
            points = multiply(points_of(row, t, blocks, v), broadcast(scale))
            number = multiply_add(points, load_floats(deviations, 0, place), number)
        store_floats(normal, 0, place, number)


@njit(**OPTIONS)
def _decode_task(task: int, shape: Any, rows: int, table: Any, codebook: Any, turned: int, out: int) -> None:
    num_matrices, length, head_dim, row_size = shape
    matrix, part = task % num_matrices, task // num_matrices
    count = -(-head_dim // LANES)
    widths = bytes_at(table[4], (num_matrices, count))[matrix]
    blocks = make_blocks(widths, row_size, floats_at(codebook[0], (9, 3)), longs_at(codebook[2], (9,)))
    own, deviations, means = _load_channels(shape, table, matrix)
    scales = floats_at(codebook[1], (256,))
    normal = zeros(1, count * LANES)
    own_rows = bytes_at(rows, (num_matrices, length, row_size))[matrix]
    states = floats_at(out, (num_matrices, length, head_dim))[matrix]
    for t in range(part * _TASK_TOKENS, min((part + 1) * _TASK_TOKENS, length)):
        _decode_token(own_rows, t, blocks, scales[own_rows[t, 0]], deviations, means, normal)
        for i in range(head_dim):
            states[t, own[i]] = normal[0, i]
        if turned > 1:
            rotate_row(states, t, 0, head_dim, turned)


@njit(**WORKER)
def _decode(address: int) -> None:
    """
    The worker of a table, see `threads`.

    It has B H, T, D and R; address of the rows `[B H, T, R]`; of order, int64, or 0, means or 0, deviations and how
    many a head, widths; of coefficients of points `[9, 3]`, scales of all bytes `[256]`, multipliers of states `[9]`;
    channels that are rotated together in the end, or 1; address of the states `[B H, T, D]`, float32, filled.
    """
    n = longs_at(address, (FIRST + 15,))[FIRST:]
    shape, table, codebook = (n[0], n[1], n[2], n[3]), (n[5], n[6], n[7], n[8], n[9]), (n[10], n[11], n[12])
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _decode_task(task, shape, n[4], table, codebook, n[13], n[14])
        task = take_task(address)


@torch.compiler.disable
def decode_rows(rows: torch.Tensor, table: "RowTable", *, is_rotated: bool) -> torch.Tensor:
    """
    States `[B, H, T, D]`, float32, of rows `[B, H, T, R]`; see `RowTable.decode`. `is_rotated` says that they were
    coded as `ops.rotation.rotate` turns them.
    """
    batch_size, num_heads, length, row_size = rows.shape
    rows = rows.contiguous()
    states = torch.empty(batch_size, num_heads, length, table.head_dim)
    order = None if table.order is None else table.order.long().contiguous()
    mean = None if table.mean is None else table.mean.contiguous()
    deviation, widths = table.deviation.contiguous(), table.widths.contiguous()
    of_keys, of_values, scales, multipliers = codebook_of(table.quantizer)
    numbers = (
        *(batch_size * num_heads, length, table.head_dim, row_size),
        rows.data_ptr(),
        0 if order is None else order.data_ptr(),
        0 if mean is None else mean.data_ptr(),
        *(deviation.data_ptr(), deviation.shape[2], widths.data_ptr()),
        *((of_keys if table.is_weighted else of_values).data_ptr(), scales.data_ptr(), multipliers.data_ptr()),
        rotation_size(table.head_dim) if is_rotated else 1,
        states.data_ptr(),
    )
    run(_decode, batch_size * num_heads * -(-length // _TASK_TOKENS), numbers)
    return states


@njit(**OPTIONS)
def _turn_task(task: int, shape: Any, states: int, rotary: Any, place: Any) -> None:
    """Up to `TILE` tokens of an item, all heads."""
    batch_size, num_heads, length, head_dim = shape
    start, padding, direction = place
    batch, first = task % batch_size, task // batch_size * TILE
    partners = longs_at(rotary[0], (head_dim,))
    cosines, sines = floats_at(rotary[1], (TILE + 1, head_dim)), floats_at(rotary[2], (TILE + 1, head_dim))
    frequencies = doubles_at(rotary[3], (head_dim,))
    origin = start + first - longs_at(padding, (batch_size,))[batch]
    own_cosines, own_sines = zero_floats((head_dim,)), zero_floats((head_dim,))
    cosine, sine, before = zero_floats((head_dim,)), zero_floats((head_dim,)), zero_floats((head_dim,))
    all_states = floats_at(states, (batch_size, num_heads, length, head_dim))[batch]
    for t in range(min(TILE, length - first)):
        # Told by the position alone, to the last bit, wherever a run of tokens begins
        offset = (origin + t) % TILE
        if t == 0 or offset == 0:
            for d in range(head_dim):
                angle = (origin + t - offset) * frequencies[d]
                own_cosines[d], own_sines[d] = float32(np.cos(angle)), float32(np.sin(angle))
        for d in range(head_dim):
            cosine[d] = own_cosines[d] * cosines[offset, d] - own_sines[d] * sines[offset, d]
            sine[d] = (own_sines[d] * cosines[offset, d] + own_cosines[d] * sines[offset, d]) * float32(direction)
        for h in range(num_heads):
            state = all_states[h, first + t]
            for d in range(head_dim):
                before[d] = state[d]
            for d in range(head_dim):
                state[d] = before[d] * cosine[d] + before[partners[d]] * sine[d]


@njit(**WORKER)
def _turn(address: int) -> None:
    """
    The worker of a table, see `threads`.

    It has B, H, T and D; address of the states `[B, H, T, D]`, float32, turned in place; addresses of partners `[D]`,
    cosines and signed sines of offsets `[TILE + 1, D]`, frequencies `[D]`, float64; index of the first token, address
    of padding `[B]`, and 1 or -1, for turning back.
    """
    n = longs_at(address, (FIRST + 12,))[FIRST:]
    shape, rotary, place = (n[0], n[1], n[2], n[3]), (n[5], n[6], n[7], n[8]), (n[9], n[10], n[11])
    task, count = take_task(address), num_tasks(address)
    while task < count:
        _turn_task(task, shape, n[4], rotary, place)
        task = take_task(address)


@torch.compiler.disable
def turn_states(
    states: torch.Tensor, layout: RotaryLayout, start: int, padding: torch.Tensor | None, *, is_back: bool
) -> None:
    """
    Turns keys `[B, H, T, D]`, float32 and contiguous, in place by the angles of their positions, or back.

    Args:
        states (`torch.Tensor`): the keys.
        layout (`RotaryLayout`): of their rotary embedding.
        start (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
        is_back (`bool`): whether by the opposites of the angles.
    """
    shifts = padding_of(padding, states.shape[0])
    addresses = (table.data_ptr() for table in rotary_tables(layout))
    place = start, shifts.data_ptr(), -1 if is_back else 1
    numbers = (*states.shape, states.data_ptr(), *addresses, *place)
    run(_turn, states.shape[0] * -(-states.shape[2] // TILE), numbers)
