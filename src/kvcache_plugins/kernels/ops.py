"""Operations on rows and parts: each chooses an engine (C, Triton or plain PyTorch) and calls it.

Legend: B batch, H heads, T tokens, D channels, R bytes of a row.
"""

from collections.abc import Collection, Iterator

import torch

from kvcache_plugins.formats.parts import SIDES, DensePart, GroupPart, OpaqueRowPart, RowPart
from kvcache_plugins.formats.positions import START, Positions
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import RowFormat

from . import cpu_coding, reference
from .engine import choose_coding_kernel, load_triton


# Dense float32 values of one tile stay within the processor's caches
TILE_TOKENS = 1024
# Keys and values `[B, H, tokens, D or E]` of the tokens of a part from the first number up to the second, in float32
# unless they are exact. A side that is not wanted may be another tensor of as many tokens
Tile = tuple[torch.Tensor, torch.Tensor, int, int]


def encode_rows(states: torch.Tensor, row_format: RowFormat, positions: Positions = START) -> torch.Tensor:
    """Encode states `[B, H, T, D]` of any floating dtype as rows `[B, H, T, R]`, uint8."""
    if states.is_meta:
        return states.new_empty(*states.shape[:3], row_format.row_size, dtype=torch.uint8)
    kernel = choose_coding_kernel(states, row_format.head_dim)
    if kernel == "compiled":
        return cpu_coding.encode_rows(states, row_format, positions)
    if kernel == "triton":
        encoded: torch.Tensor = load_triton().encode(states, row_format, positions)
        return encoded
    return reference.encode_rows(states, row_format, positions)


def requantize_rows(rows: torch.Tensor, finer: RowFormat, row_format: RowFormat) -> torch.Tensor:
    """Encode rows `[B, H, T, R]` of `finer`, which is `row_format.with_more_bits(...)`, as rows of `row_format`."""
    if rows.is_meta:
        return rows.new_empty(*rows.shape[:3], row_format.row_size)
    if choose_coding_kernel(rows, row_format.head_dim) == "compiled":
        return cpu_coding.requantize_rows(rows, finer, row_format)
    return reference.requantize_rows(rows, finer, row_format)


def decode_rows(rows: torch.Tensor, row_format: RowFormat, positions: Positions | None = START) -> torch.Tensor:
    """Decode rows `[B, H, T, R]` to states `[B, H, T, D]`, float32; keys before RoPE if positions are `None`."""
    if rows.is_meta:
        return rows.new_empty(*rows.shape[:3], row_format.head_dim, dtype=torch.float32)
    if choose_coding_kernel(rows, row_format.head_dim) == "compiled":
        return cpu_coding.decode_rows(rows, row_format, positions)
    return reference.decode_rows(rows, row_format, positions)


def apply_rope(
    keys: torch.Tensor, layout: RotaryLayout, positions: Positions, *, inverse: bool = False
) -> torch.Tensor:
    """Return keys `[B, H, T, D]`, float32, with the rotary embedding of their positions applied, or undone."""
    if not layout.frequencies:
        return keys.float()
    if choose_coding_kernel(keys, layout.head_dim) == "compiled":
        return cpu_coding.apply_rope(keys, layout, positions, inverse=inverse)
    return reference.apply_rope(keys, layout, positions, inverse=inverse)


def channel_moments(
    states: torch.Tensor,
    valid: torch.Tensor | None,
    layout: RotaryLayout | None = None,
    positions: Positions = START,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Compute means and variances of channels `[B, H, D]`, float32, of states `[B, H, T, D]` of any floating dtype whose
    rotary embedding is undone, over all tokens or those that are `valid` `[B, T]`. Heads without tokens have zeros.
    """
    if choose_coding_kernel(states, states.shape[3]) == "compiled":
        return cpu_coding.channel_moments(states, valid, layout, positions)
    return reference.channel_moments(states, valid, layout, positions)


def to_dtype(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert decoded states to a dtype: none becomes infinite whose error takes it beyond the numbers of float16."""
    if dtype is torch.float16 and states.dtype is not dtype:
        largest = torch.finfo(dtype).max
        states = states.clamp(-largest, largest)
    return states.to(dtype)


def decode_tiles(
    part: DensePart | GroupPart | RowPart | OpaqueRowPart, sides: Collection[str] = SIDES
) -> Iterator[Tile]:
    """Decode a part tile by tile, or only some of its `sides`. A part without tokens has no tiles."""
    if isinstance(part, DensePart):
        if part.length:
            yield *part.in_use(), 0, part.length
    elif isinstance(part, GroupPart):
        yield from _tiles_of_groups(part, sides)
    else:
        yield from _tiles_of_rows(part, sides)


def _tiles_of_groups(part: GroupPart, sides: Collection[str]) -> Iterator[Tile]:
    stored = [each for name, each in zip(SIDES, (part.keys, part.values), strict=True) if name in sides]
    size, num_chunks = part.keys.chunk_length, -(-part.length // part.keys.chunk_length)
    group = part.keys.group_size if part.keys.axis == "channel" and part.keys.group_size else 1
    # Several short chunks, or whole groups of a long one
    step, stride = max(TILE_TOKENS // size, 1), min(max(TILE_TOKENS // group, 1) * group, size)
    for chunk in range(0, num_chunks, step):
        chunks = slice(chunk, min(chunk + step, num_chunks))
        for first in range(0, size, stride):
            start, tokens = chunk * size + first, slice(first, min(first + stride, size))
            # Tokens at the end of chunks may be unused
            stop = min(start + (chunks.stop - chunk) * (tokens.stop - first), part.length)
            if start < stop:
                made = [side.dequantize_tile(chunks, tokens)[:, :, : stop - start] for side in stored]
                yield made[0], made[-1], start, stop


def _tiles_of_rows(part: RowPart | OpaqueRowPart, sides: Collection[str]) -> Iterator[Tile]:
    for first in range(0, part.length, TILE_TOKENS):
        last = min(first + TILE_TOKENS, part.length)
        keys, values = part.keys[:, :, first:last], part.values[:, :, first:last]
        if "keys" in sides:
            positions = part.positions.after(first)
            if isinstance(part, RowPart):
                keys = decode_rows(keys, part.formats[0], positions)
            else:
                keys = part.decode_keys(keys, positions)
        if "values" in sides:
            values = decode_rows(values, part.formats[1]) if isinstance(part, RowPart) else part.decode_values(values)
        yield keys, values, first, last
