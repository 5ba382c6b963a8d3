"""Rows of tokens coded and decoded, and keys turned, by the C kernels: `codecs.rows` in one pass.

`cpu/coding.c` computes, several tokens of a head at a time; a rotary embedding or a rotation is part of the pass.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

import ctypes
from functools import cache

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.allocation import BLOCK, num_blocks
from kvcache_plugins.codecs.codec import START, Positions
from kvcache_plugins.codecs.quantizers import MAX_WIDTH, NUM_STATES, QUANTIZERS, state_points, thresholds
from kvcache_plugins.codecs.rope import RotaryLayout
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.codecs.rows import RowTable, scale_of

from .layer import KINDS, MOST_CHANNELS, TILE
from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run


# As in `coding.h` and `coding.c`
_NUM_WIDTHS = MAX_WIDTH + 1
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
_TASK_TOKENS = 128
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = NUM_STATES // 2


class _Rotary(ctypes.Structure):
    _fields_ = (*((name, ADDRESS) for name in ("partners", "offsets", "origins")), ("tiles", LONG))


class _Coding(ctypes.Structure):
    _fields_ = (
        ("tasks", Tasks),
        *((name, LONG) for name in ("batch", "heads", "tokens", "dim", "row_size", "kind")),
        *((name, ADDRESS) for name in ("states", "result", "rows", "order")),
        ("order_size", LONG),
        *((name, ADDRESS) for name in ("mean", "deviation")),
        ("deviations", LONG),
        ("widths", ADDRESS),
        *((name, LONG) for name in ("is_trellis", "is_weighted", "by_energy", "refits")),
        ("codebook", ADDRESS),
        ("rotation", LONG),
        ("rotary", ADDRESS),
        ("start", LONG),
        ("padding", ADDRESS),
        ("is_back", LONG),
        ("scratch", ADDRESS),
        ("scratch_size", LONG),
        ("entered", LONG),
    )


@torch.compiler.disable
def encode_rows(states: torch.Tensor, table: RowTable, positions: Positions = START) -> torch.Tensor:
    """
    Codes tokens as `RowTable.encode` does.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`): keys or values, in any floating dtype: components where the
            table has a basis, and without their mean if they are to be rotated.
        table (`RowTable`): of their side.
        positions (`Positions`): of the tokens.

    Returns:
        `torch.Tensor` of shape `[B, H, T, R]`, uint8.
    """
    states = (states if states.dtype in KINDS else states.float()).contiguous()
    rows = torch.empty(*states.shape[:3], table.row_size, dtype=torch.uint8)
    call = _Call(states.shape)
    call.take("states", states, states.dtype, (*states.shape[:3], table.num_coded))
    call.take("rows", rows, torch.uint8, rows.shape)
    call.add_table(table, positions, is_back=True)
    call.fields.kind = KINDS[states.dtype]
    call.run("encode_rows")
    return rows


@torch.compiler.disable
def decode_rows(rows: torch.Tensor, table: RowTable, positions: Positions = START) -> torch.Tensor:
    """
    Decodes rows as `RowTable.decode` does.

    Args:
        rows (`torch.Tensor` of shape `[B, H, T, R]`, uint8): rows.
        table (`RowTable`): of their side.
        positions (`Positions`): of the tokens.

    Returns:
        `torch.Tensor` of shape `[B, H, T, D]`, float32: components where the table has a basis, and without their
        mean if they were rotated.
    """
    states = torch.empty(*rows.shape[:3], table.num_coded)
    call = _Call(states.shape)
    call.take("rows", rows.contiguous(), torch.uint8, (*rows.shape[:3], table.row_size))
    call.take("result", states, torch.float32, states.shape)
    call.add_table(table, positions, is_back=False)
    call.run("decode_rows")
    return states


@torch.compiler.disable
def turn_states(keys: torch.Tensor, layout: RotaryLayout, positions: Positions, *, is_back: bool) -> torch.Tensor:
    """Applies the rotary embedding to keys `[B, H, T, D]` of any floating dtype, or undoes it; float32."""
    keys = (keys if keys.dtype in KINDS else keys.float()).contiguous()
    turned = torch.empty(keys.shape)
    call = _Call(keys.shape)
    call.take("states", keys, keys.dtype, keys.shape)
    call.take("result", turned, torch.float32, keys.shape)
    call.add_rope(layout, positions, is_back=is_back)
    call.fields.kind = KINDS[keys.dtype]
    call.run("turn_states")
    return turned


class _Call:
    """A call for states `[B, H, T, D]`, which keeps alive what its structure has the addresses of."""

    def __init__(self, shape: tuple[int, ...]):
        if shape[3] > MOST_CHANNELS:
            raise ValueError(f"at most {MOST_CHANNELS} channels are coded, but got {shape[3]}")
        self.shape, self.alive = shape, dict[str, torch.Tensor]()
        self.fields = _Coding(batch=shape[0], heads=shape[1], tokens=shape[2], dim=shape[3], rotation=1)

    def take(
        self,
        name: str,
        tensor: torch.Tensor,
        dtype: torch.dtype | tuple[torch.dtype, ...],
        shape: tuple[int | None, ...],
    ) -> None:
        self.alive[name] = tensor
        setattr(self.fields, name, address_of(name, tensor, dtype, shape))

    def add_table(self, table: RowTable, positions: Positions, *, is_back: bool) -> None:
        fields, heads = self.fields, self.shape[:2]
        fields.deviations, deviation = 1, table.deviation
        if table.basis is None:
            if table.order is not None:
                self.take("order", table.order.contiguous(), (torch.uint8, torch.int16), (*heads, table.head_dim))
                fields.order_size = table.order.element_size()
            if table.mean is not None and not table.is_rotated:
                self.take("mean", table.mean.contiguous(), torch.float16, (*heads, table.head_dim))
            if table.rope is not None:
                self.add_rope(table.rope, positions, is_back=is_back)
            if deviation is not None and deviation.shape[2] > 1:
                fields.deviations = table.head_dim
        if deviation is None:
            deviation = torch.ones(*heads, 1, dtype=torch.float16)
        self.take("deviation", deviation.contiguous(), torch.float16, (*heads, fields.deviations))
        # Of a model's tables there is one for all sequences
        widths = table.widths.expand(heads[0], -1, -1) if table.basis is not None else table.widths
        self.take("widths", widths.contiguous(), torch.uint8, (*heads, num_blocks(table.num_coded)))
        fields.codebook = _codebook(table.quantizer, table.is_weighted).data_ptr()
        fields.row_size, fields.is_trellis = table.row_size, table.quantizer == "trellis"
        fields.is_weighted, fields.by_energy, fields.refits = table.is_weighted, table.by_energy, table.num_refits
        fields.rotation = rotation_size(table.head_dim) if table.is_rotated else 1

    def add_rope(self, layout: RotaryLayout, positions: Positions, *, is_back: bool) -> None:
        if not layout.frequencies:
            return
        # Tiles of positions up to the last token's, and as many below 0, where padding is
        most = 2 ** ((positions.first + self.shape[2]) // TILE).bit_length()
        rotary, _ = _rotary(layout, most)
        if layout.head_dim != self.shape[3]:
            raise ValueError(f"keys of {self.shape[3]} channels, a rotary embedding of {layout.head_dim}")
        self.fields.rotary, self.fields.start, self.fields.is_back = ctypes.addressof(rotary), positions.first, is_back
        if positions.padding is not None:
            self.take("padding", positions.padding.long().contiguous(), torch.int64, (self.shape[0],))

    def run(self, name: str) -> None:
        fields = self.fields
        # Tasks are counted from the start of a tile
        before = TILE - 1 if fields.rotary else 0
        fields.tasks.count = fields.batch * fields.heads * -(-(fields.tokens + before) // _TASK_TOKENS)
        threads = max(min(num_threads(), fields.tasks.count), 1)
        if name == "encode_rows" and fields.is_trellis:
            size = (num_blocks(fields.dim) * BLOCK * _MOST_MINIMA + 1) * _MOST_LANES
            self.take("scratch", torch.empty(threads, size), torch.float32, (threads, size))
            fields.scratch_size = size
        run(function(name), fields, threads)


@cache
def _codebook(quantizer: str, is_weighted: bool) -> torch.Tensor:
    """`Codebook` of `coding.h`."""
    with torch.inference_mode(False):
        own, count = QUANTIZERS[quantizer], len(QUANTIZERS[quantizer].distortions)
        coefficients, multipliers = torch.zeros(_NUM_WIDTHS, 4), torch.zeros(_NUM_WIDTHS, dtype=torch.int32)
        coefficients[:count, :3] = torch.tensor(own.coefficients)
        coefficients[:count, 3] = 1 if is_weighted else own.gains()
        multipliers[:count] = torch.tensor(own.multipliers)
        bounds = torch.zeros(_NUM_WIDTHS, _ALL_LEVELS)
        for width in range(1, _NUM_WIDTHS):
            half = 2 ** (width - 1)
            bounds[width] = _by_levels(thresholds(bounds.device)[width, half : 2 * half - 1])
        halfway = torch.exp2((torch.arange(16, dtype=torch.float64) + 0.5) / 16).float()
        scale_bounds = _by_levels(halfway[:15])
        scale_bounds[15] = halfway[15]
        points = state_points(bounds.device)
        parts = (
            bounds,
            scale_bounds,
            scale_of(torch.arange(256)),
            coefficients,
            points,
            multipliers.view(torch.float32),
        )
        return torch.cat([part.flatten() for part in parts])


def _by_levels(bounds: torch.Tensor) -> torch.Tensor:
    """Bounds, one less than a power of two, in the order in which a search by halves meets them."""
    levels, placed = len(bounds).bit_length(), torch.zeros(_ALL_LEVELS)
    for level in range(levels):
        first = 2 ** (levels - 1 - level)
        placed[_LEVELS[level] : _LEVELS[level] + 2**level] = bounds[first - 1 :: 2 * first]
    return placed


@cache
def _rotary(layout: RotaryLayout, tiles: int) -> tuple[_Rotary, tuple[torch.Tensor, ...]]:
    """`Rotary` of `coding.h`, for as many tiles of positions from 0 on as below, and what it has the addresses of."""
    with torch.inference_mode(False):
        partners = layout.partners(torch.device("cpu"))
        offsets = torch.stack(layout.angles(torch.arange(TILE))).permute(2, 0, 1)
        # Lanes may read over the end of a tile
        offsets = F.pad(offsets, (0, _MOST_LANES)).contiguous()
        origins = torch.stack(layout.angles(torch.arange(-tiles, tiles) * TILE), dim=2)
    tables = partners, offsets, origins
    return _Rotary(*(table.data_ptr() for table in tables), tiles), tables
