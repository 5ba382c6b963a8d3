"""Decode attention over rows in calibrated bases on a CPU: see `transform_attention`, which codes channels themselves.

Keys are coded before the rotary embedding in a basis that mixes channels of different frequencies. So they are brought
back tile by tile, and meet the queries as these are turned back to the tile's start. Values stay as components, of
which sums are brought back once.

Legend: B batch, H key/value heads, G query heads a key/value head, Q query tokens, D head dim, K components, N blocks
of eight of them, T tokens of a tile, R bytes of a row, S channels, rounded up to two vectors.
"""

from typing import Any

import numpy as np
from numba import float32, njit, prange

from .arrays import bytes_at, doubles_at, floats_at, halves_at, longs_at, signed_bytes_at
from .basis_primitives import STRIDE, combine_rows, dot_states, widen_rows
from .exact import partial_results
from .primitives import OPTIONS, ROWS, add_bias, scale_rows, softmax_tile
from .transform_attention import ANCHOR_TILES, TILE, Channels, turn_back, turn_on
from .transform_primitives import Blocks, accumulate_rows, make_blocks
from .vectors import LANES, broadcast_four, float_of_half, load_four, multiply, store_four


@njit(**OPTIONS)
def _load_channels(rotary: Any, head_dim: int) -> Channels:
    """All channels in their own order, of deviation 1."""
    partner_address, cosine_address, sine_address = rotary[:3]
    size = -(-head_dim // STRIDE) * STRIDE
    own, partners = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
    deviations, means = np.ones((1, size), dtype=np.float32), np.zeros((1, size), dtype=np.float32)
    cosines, sines = np.zeros((TILE + 1, size), dtype=np.float32), np.zeros((TILE + 1, size), dtype=np.float32)
    partner = longs_at(partner_address, (head_dim,))
    all_cosines = floats_at(cosine_address, (TILE + 1, head_dim))
    all_sines = floats_at(sine_address, (TILE + 1, head_dim))
    for i in range(head_dim):
        own[i], partners[i] = i, partner[i]
        for t in range(TILE + 1):
            cosines[t, i], sines[t, i] = all_cosines[t, i], -all_sines[t, i]
    return Channels(own, partners, deviations, means, cosines, sines)


@njit(**OPTIONS)
def _load_basis(side: Any, head: int, num_heads: int, head_dim: int, size: int) -> tuple[Any, Any, Any]:
    """Widths `[N]`, basis `[K, S]` with rows as long as deviations of components, and mean `[1, S]` of a head."""
    width_address, mean_address, factor_address, basis_address, step_address, count = side[3:]
    widths = bytes_at(width_address, (num_heads, count))[head]
    basis, mean = np.zeros((count * LANES, size), dtype=np.float32), np.zeros((1, size), dtype=np.float32)
    codes = signed_bytes_at(basis_address, (num_heads, head_dim, head_dim))[head]
    steps = floats_at(step_address, (num_heads, head_dim))[head]
    factors = floats_at(factor_address, (num_heads, head_dim))[head]
    means = halves_at(mean_address, (num_heads, head_dim))[head]
    inverses = np.empty(head_dim, dtype=np.float32)
    for d in range(head_dim):
        mean[0, d], inverses[d] = float_of_half(means[d]), float32(1) / factors[d]
    for i in range(min(count * LANES, head_dim)):
        if widths[i // LANES] > 0:
            for d in range(head_dim):
                basis[i, d] = steps[i] * float32(codes[i, d]) * inverses[d]
    return widths, basis, mean


@njit(**OPTIONS)
def _num_components(blocks: Blocks) -> int:
    """Components before the first one behind which none has bits."""
    count = 0
    for v in range(blocks.widths.shape[0]):
        if blocks.widths[v] > 0:
            count = (v + 1) * LANES
    return count


@njit(**OPTIONS)
def _run_tiles(
    query: Any,
    rows: int,
    first_row: int,
    scale: Any,
    channels: Channels,
    frequencies: Any,
    position: int,
    keys: tuple[Any, Blocks, Any, Any],
    values: tuple[Any, Blocks],
    scales: Any,
    bias: tuple[Any, int, int, int, int],
    tiles: tuple[int, int],
    length: int,
    sums: Any,
    total: Any,
    maximum: Any,
) -> None:
    """Attention of `rows` queries over tiles from `tiles[0]` to `tiles[1]`; `position` is that of the first token."""
    key_rows, key_blocks, basis, mean = keys
    value_rows, value_blocks = values
    mask, batch, head, groups, num_queries = bias
    size = channels.own.shape[0]
    own, partners = np.zeros((ROWS, size), dtype=np.float32), np.zeros((ROWS, size), dtype=np.float32)
    components = np.zeros((TILE, basis.shape[0]), dtype=np.float32)
    states = np.zeros((TILE, size), dtype=np.float32)
    num_components = _num_components(key_blocks)
    scores = np.zeros((1, (TILE + 2) * ROWS), dtype=np.float32)
    decay = np.zeros((1, 2 * ROWS), dtype=np.float32)
    first, last = tiles[0] * TILE, min(tiles[1] * TILE, length)
    key_scales = np.zeros(length, dtype=np.float32)
    for t in range(first, last):
        key_scales[t] = scales[key_rows[t, 0]]
    for start in range(first, last, TILE):
        tokens, tile = min(TILE, last - start), start // TILE
        if (tile - tiles[0]) % ANCHOR_TILES == 0:
            turn_back(query, rows, scale, channels, frequencies, position + start, own, partners)
        else:
            turn_on(rows, channels, own, partners)
        span = (start, tokens)
        widen_rows(key_rows, key_blocks, key_scales, span, components)
        combine_rows(components, num_components, tokens, basis, mean, states)
        dot_states(rows, own, partners, states, channels.cosines, channels.sines, tokens, scores)
        if mask.shape[3] > 0:
            add_bias(mask, batch, head, groups, num_queries, first_row, start, tokens, scores)
        if softmax_tile(tokens, scores, maximum, total, decay):
            scale_rows(decay, sums)
        for t in range(tokens):
            factor = broadcast_four(scales[value_rows[start + t, 0]])
            store_four(scores, 0, t * ROWS, multiply(load_four(scores, 0, t * ROWS), factor))
        accumulate_rows(rows, scores, value_rows, value_blocks, span, sums)


@njit(**OPTIONS)
def _run(
    task: int, shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any,
    mask: Any, span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """One task of `attend_basis_block`."""
    batch_size, num_heads, groups, num_queries, key_dim, value_dim, _ = shape
    length, tiles_per_task, num_tasks = span
    num_rows = groups * num_queries
    queries = floats_at(query, (batch_size * num_heads, num_rows, key_dim))
    output, total, maximum = partial_results(scratch, shape, first, num_tasks)
    row_blocks = -(-num_rows // ROWS)
    item, part = task // num_tasks, task % num_tasks
    matrix, row = item // row_blocks, item % row_blocks * ROWS
    b, h = matrix // num_heads, matrix % num_heads
    rows = min(ROWS, num_rows - row)
    sides = batch_size * num_heads
    key_rows = bytes_at(key_side[0], (sides, key_side[1], key_side[2]))[matrix]
    value_rows = bytes_at(value_side[0], (sides, value_side[1], value_side[2]))[matrix]
    channels = _load_channels(rotary, key_dim)
    key_widths, basis, mean = _load_basis(key_side, h, num_heads, key_dim, channels.own.shape[0])
    value_widths, value_basis, value_mean = _load_basis(value_side, h, num_heads, value_dim, value_dim)
    multipliers = longs_at(codebook[3], (9,))
    key_blocks = make_blocks(key_widths, key_side[2], floats_at(codebook[0], (9, 3)), multipliers)
    value_blocks = make_blocks(value_widths, value_side[2], floats_at(codebook[1], (9, 3)), multipliers)
    sums = np.zeros((ROWS, value_basis.shape[0]), dtype=np.float32)
    own_total = np.zeros((1, 2 * ROWS), dtype=np.float32)
    own_maximum = np.full((1, 2 * ROWS), -np.inf, dtype=np.float32)
    _run_tiles(
        queries[matrix, row : row + rows],
        rows,
        row,
        float32(scale),
        channels,
        doubles_at(rotary[3], (key_dim,)),
        rotary[5] - longs_at(rotary[4], (batch_size,))[b],
        (key_rows, key_blocks, basis, mean),
        (value_rows, value_blocks),
        floats_at(codebook[2], (256,)),
        (floats_at(mask[0], mask[1:]), b, h, groups, num_queries),
        (part * tiles_per_task, (part + 1) * tiles_per_task),
        length,
        sums,
        own_total,
        own_maximum,
    )
    for r in range(rows):
        weight = own_total[0, r] + own_total[0, r + ROWS]
        for d in range(value_dim):
            output[part, b, h, row + r, d] = weight * value_mean[0, d]
        for i in range(value_basis.shape[0]):
            for d in range(value_dim):
                output[part, b, h, row + r, d] += sums[r, i] * value_basis[i, d]
        total[part, b, h, row + r] = weight
        maximum[part, b, h, row + r] = own_maximum[0, r]


@njit(**OPTIONS)
def _num_tasks(shape: Any, span: Any) -> int:
    return shape[0] * shape[1] * -(-shape[2] * shape[3] // ROWS) * span[2]


@njit(**OPTIONS)
def attend_basis_block(
    shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any, mask: Any,
    span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """
    Attention over one block of rows in calibrated bases; see `transform_attention.attend_rows_block`.

    Args:
        key_side, value_side: rows, their capacity and R; widths `[H, N]`, means and factors `[H, D]`, basis
            `[H, D, D]` and its steps `[H, D]`; and N.
    """
    for task in range(_num_tasks(shape, span)):
        _run(task, shape, scale, query, key_side, value_side, codebook, rotary, mask, span, first, scratch)


@njit(parallel=True, **OPTIONS)
def attend_basis_block_in_parallel(
    shape: Any, scale: float, query: int, key_side: Any, value_side: Any, codebook: Any, rotary: Any, mask: Any,
    span: Any, first: int, scratch: int,
) -> None:  # fmt: skip
    """The same by as many threads as Numba is set to."""
    for task in prange(_num_tasks(shape, span)):
        _run(task, shape, scale, query, key_side, value_side, codebook, rotary, mask, span, first, scratch)
