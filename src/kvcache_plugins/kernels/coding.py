"""Rows of tokens coded and decoded, and keys turned, by the C kernels: `ops.transform_coding.rows` in one pass.

`cpu/coding.c` computes, several tokens of a head at a time; a rotary embedding or a rotation is part of the pass.

Legend: B batch, H heads, T tokens, D channels, N blocks of eight channels, R bytes of a row.
"""

import ctypes
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.ops.transform_coding import codebooks, trellis
from kvcache_plugins.ops.transform_coding.allocation import num_blocks
from kvcache_plugins.ops.transform_coding.quantizers import unshrunk
from kvcache_plugins.ops.transform_coding.rotary import RotaryLayout
from kvcache_plugins.ops.transform_coding.rows import RowTable, scale_of

from .layer import KINDS, MOST_CHANNELS, TILE
from .library import ADDRESS, LONG, Tasks, address_of, function, num_threads, run


# As in `coding.h` and `coding.c`
_NUM_WIDTHS = codebooks.MAX_WIDTH + 1
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
_TASK_TOKENS, _BLOCK = 128, 8
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = trellis.NUM_STATES // 2


class Turn(NamedTuple):
    """
    The rotary embedding of consecutive tokens.

    Attributes:
        layout (`RotaryLayout`): which channels are turned, and how fast.
        start (`int`): index of the first token.
        padding (`torch.Tensor` of shape `[B]`, *optional*): tokens at the start of every item that have no position.
    """

    layout: RotaryLayout
    start: int
    padding: torch.Tensor | None


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
def encode_rows(
    states: torch.Tensor, table: RowTable, turn: Turn | None = None, *, is_rotated: bool = False
) -> torch.Tensor:
    """
    Codes tokens as `RowTable.encode` does.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`): keys or values, in any floating dtype.
        table (`RowTable`): of their side.
        turn (`Turn`, *optional*): a rotary embedding to be undone first.
        is_rotated (`bool`): whether `ops.rotation.rotate` comes first.

    Returns:
        `torch.Tensor` of shape `[B, H, T, R]`, uint8.
    """
    states = (states if states.dtype in KINDS else states.float()).contiguous()
    rows = torch.empty(*states.shape[:3], table.row_size, dtype=torch.uint8)
    call = _Call(states.shape)
    call.take("states", states, states.dtype, (*states.shape[:3], table.head_dim))
    call.take("rows", rows, torch.uint8, rows.shape)
    call.add_table(table, is_rotated=is_rotated)
    call.add_turn(turn, is_back=True)
    call.fields.kind = KINDS[states.dtype]
    call.run("encode_rows")
    return rows


@torch.compiler.disable
def decode_rows(
    rows: torch.Tensor, table: RowTable, turn: Turn | None = None, *, is_rotated: bool = False
) -> torch.Tensor:
    """
    Decodes rows as `RowTable.decode` does.

    Args:
        rows (`torch.Tensor` of shape `[B, H, T, R]`, uint8): rows.
        table (`RowTable`): of their side.
        turn (`Turn`, *optional*): a rotary embedding to be done in the end.
        is_rotated (`bool`): whether `ops.rotation.rotate` comes in the end.

    Returns:
        `torch.Tensor` of shape `[B, H, T, D]`, float32.
    """
    states = torch.empty(*rows.shape[:3], table.head_dim)
    call = _Call(states.shape)
    call.take("rows", rows.contiguous(), torch.uint8, (*rows.shape[:3], table.row_size))
    call.take("result", states, torch.float32, states.shape)
    call.add_table(table, is_rotated=is_rotated)
    call.add_turn(turn, is_back=False)
    call.run("decode_rows")
    return states


@torch.compiler.disable
def turn_states(states: torch.Tensor, turn: Turn, *, is_back: bool) -> torch.Tensor:
    """Turns keys `[B, H, T, D]` of any floating dtype by the angles of their positions, or back; float32."""
    states = (states if states.dtype in KINDS else states.float()).contiguous()
    turned = torch.empty(states.shape)
    call = _Call(states.shape)
    call.take("states", states, states.dtype, states.shape)
    call.take("result", turned, torch.float32, states.shape)
    call.add_turn(turn, is_back=is_back)
    call.fields.kind = KINDS[states.dtype]
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

    def add_table(self, table: RowTable, *, is_rotated: bool) -> None:
        fields, heads = self.fields, self.shape[:2]
        if table.order is not None:
            self.take("order", table.order.contiguous(), (torch.uint8, torch.int16), (*heads, table.head_dim))
            fields.order_size = table.order.element_size()
        if table.mean is not None:
            self.take("mean", table.mean.contiguous(), torch.float16, (*heads, table.head_dim))
        fields.deviations = table.deviation.shape[2] if table.deviation.shape[2] == 1 else table.head_dim
        self.take("deviation", table.deviation.contiguous(), torch.float16, (*heads, fields.deviations))
        self.take("widths", table.widths.contiguous(), torch.uint8, (*heads, num_blocks(table.head_dim)))
        fields.codebook = _codebook(table.quantizer, table.is_weighted).data_ptr()
        fields.row_size, fields.is_trellis = table.row_size, table.quantizer == "trellis"
        fields.is_weighted, fields.by_energy, fields.refits = table.is_weighted, table.by_energy, table.num_refits
        fields.rotation = rotation_size(table.head_dim) if is_rotated else 1

    def add_turn(self, turn: Turn | None, *, is_back: bool) -> None:
        if turn is None or not turn.layout.frequencies:
            return
        # Tiles of positions up to the last token's, and as many below 0, where padding is
        most = 2 ** ((turn.start + self.shape[2]) // TILE).bit_length()
        rotary, _ = _rotary(turn.layout, most)
        if turn.layout.head_dim != self.shape[3]:
            raise ValueError(f"keys of {self.shape[3]} channels, a rotary embedding of {turn.layout.head_dim}")
        self.fields.rotary, self.fields.start, self.fields.is_back = ctypes.addressof(rotary), turn.start, is_back
        if turn.padding is not None:
            self.take("padding", turn.padding.long().contiguous(), torch.int64, (self.shape[0],))

    def run(self, name: str) -> None:
        fields = self.fields
        # Tasks are counted from the start of a tile
        before = TILE - 1 if fields.rotary else 0
        fields.tasks.count = fields.batch * fields.heads * -(-(fields.tokens + before) // _TASK_TOKENS)
        threads = max(min(num_threads(), fields.tasks.count), 1)
        if name == "encode_rows" and fields.is_trellis:
            size = (num_blocks(fields.dim) * _BLOCK * _MOST_MINIMA + 1) * _MOST_LANES
            self.take("scratch", torch.empty(threads, size), torch.float32, (threads, size))
            fields.scratch_size = size
        run(function(name), fields, threads)


@cache
def _codebook(quantizer: str, is_weighted: bool) -> torch.Tensor:
    """`Codebook` of `coding.h`."""
    with torch.inference_mode(False):
        is_trellis = quantizer == "trellis"
        own = torch.tensor(trellis.COEFFICIENTS if is_trellis else codebooks.COEFFICIENTS)
        coefficients, multipliers = torch.zeros(_NUM_WIDTHS, 4), torch.zeros(_NUM_WIDTHS, dtype=torch.int32)
        coefficients[: len(own), :3] = own
        coefficients[: len(own), 3] = 1 if is_weighted else unshrunk(quantizer)
        if is_trellis:
            multipliers[: len(own)] = torch.tensor(trellis.MULTIPLIERS)
        bounds = torch.zeros(_NUM_WIDTHS, _ALL_LEVELS)
        for width in range(1, _NUM_WIDTHS):
            half = 2 ** (width - 1)
            bounds[width] = _by_levels(codebooks.thresholds(bounds.device)[width, half : 2 * half - 1])
        halfway = torch.exp2((torch.arange(16, dtype=torch.float64) + 0.5) / 16).float()
        scale_bounds = _by_levels(halfway[:15])
        scale_bounds[15] = halfway[15]
        points = trellis.all_points(bounds.device)
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
