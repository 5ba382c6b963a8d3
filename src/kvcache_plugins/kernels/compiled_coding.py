"""Rows coded and decoded by the C kernels, keys turned, and channels measured: what these are told.

Legend: B batch, H key/value heads, T tokens, K numbers of a token that are coded, D head dim, R bytes of a row.
"""

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.quantizers import BLOCK, MAX_WIDTH, NUM_STATES, QUANTIZERS, state_points, thresholds
from kvcache_plugins.codecs.rope import Positions, RotaryLayout, channels_of
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.codecs.rows import RowCodec, RowTable, scale_of

from .library import num_threads, run
from .structs import KINDS, MOST_CHANNELS, TILE, Structure, check, make


# As in `coding.h` and `coding.c`
_NUM_WIDTHS = MAX_WIDTH + 1
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
_TASK_TOKENS = 128
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = NUM_STATES // 2
# Of tables that live
_CODINGS: "WeakKeyDictionary[RowTable, Structure]" = WeakKeyDictionary()


@torch.compiler.disable
def code(
    name: str,
    states: torch.Tensor,
    rows: torch.Tensor | None,
    positions: Positions | None,
    layout: RotaryLayout | None,
    table: RowTable | None = None,
    *,
    is_run: bool = True,
    **others: Any,
) -> Structure:
    """
    Runs one of the kernels of `coding.c`.

    Args:
        name (`str`): `"encode_rows"`, `"decode_rows"`, `"turn_states"` or `"measure_channels"`.
        states (`torch.Tensor` of shape `[B, H, T, K]`): states of any floating dtype, of which `"decode_rows"` writes
            float32: components where the table has a basis, without their mean where they are rotated.
        rows (`torch.Tensor` of shape `[B, H, T, R]`, *optional*): rows, written by `"encode_rows"`.
        positions (`Positions`, *optional*): of the tokens; without them keys are left as they are before RoPE.
        layout (`RotaryLayout`, *optional*): the rotary embedding of keys.
        table (`RowTable`, *optional*): how rows are coded.
        is_run (`bool`, *optional*, defaults to `True`): whether it runs now, or whenever the caller says.
        **others: what the kernel writes and reads besides, by field.

    Returns:
        `Structure`: the call.

    Raises:
        ValueError: if tensors do not fit each other or the table.
    """
    shape, threads = states.shape, None
    fields: dict[str, Any] = {"is_back": name != "decode_rows", **others}
    if name == "decode_rows":
        assert rows is not None
        fields |= {"rows": rows.contiguous(), "result": states}
    else:
        states = states if states.dtype in KINDS else states.float()
        states = states if states.stride(3) == 1 and states.is_cpu else states.cpu().contiguous()
        fields |= {"states": states.data_ptr(), "strides": states.stride()[:3], "kind": KINDS[states.dtype]}
        fields["rows"] = rows
    fields["capacity"] = 0 if rows is None else rows.shape[2]
    # In a basis keys are turned by themselves
    if positions is not None and layout is not None and layout.frequencies and (table is None or table.basis is None):
        head_dim = shape[3] if table is None else table.head_dim
        if layout.head_dim != head_dim:
            raise ValueError(f"keys of {head_dim} channels, a rotary embedding of {layout.head_dim}")
        # Tiles of positions up to the last token's, and as many below 0, where padding is
        tiles = 2 ** ((positions.first + shape[2]) // TILE).bit_length()
        padding = None if positions.padding is None else positions.padding.long().contiguous()
        fields |= {"rotary": _rotary(layout, tiles), "start": positions.first, "padding": padding}
    if table is None:
        base, fields["rotation"] = None, 1
        fields |= {"batch": shape[0], "heads": shape[1], "dim": shape[3]}
    else:
        base = _CODINGS.get(table)
        if base is None or base.batch != shape[0]:
            base = _describe(table, shape[0])
        if (base.heads, base.dim) != (shape[1], shape[3]):
            raise ValueError(f"`states` of {shape[1]} heads of {shape[3]}, a table of {base.heads} of {base.dim}")
    if base is not None and base.is_trellis and name == "encode_rows":
        threads = num_threads()
        size = (base.blocks * BLOCK * _MOST_MINIMA + 1) * _MOST_LANES
        fields |= {"scratch": torch.empty(threads, size), "threads": threads, "scratch_size": size}
    if shape[3] > MOST_CHANNELS:
        raise ValueError(f"at most {MOST_CHANNELS} channels are coded, but got {shape[3]}")
    call = make("Coding", fields, base=base, tokens=shape[2])
    # A copy of them may be this call's alone
    call.alive = call.alive, states
    # Of so many tokens, which are counted from the start of a tile; channels are measured of all
    call.tasks.count = shape[0] * shape[1]
    if name != "measure_channels":
        call.tasks.count *= -(-(shape[2] + TILE - 1) // _TASK_TOKENS)
    if is_run:
        run(name, call, threads)
    return call


def _describe(table: RowTable, batch_size: int) -> Structure:
    """Describes a table for tokens of so many sequences, and keeps that while the table lives."""
    num_heads, deviation, num_coded = table.widths.shape[1], table.deviation, table.num_coded
    fields: dict[str, Any] = {"batch": batch_size, "heads": num_heads, "dim": num_coded, "row_size": table.row_size}
    fields |= {"is_trellis": table.quantizer == "trellis", "is_weighted": table.is_weighted}
    fields |= {"by_energy": table.by_energy, "refits": table.num_refits, "blocks": -(-num_coded // BLOCK)}
    fields["rotation"] = rotation_size(table.head_dim) if table.is_rotated else 1
    if table.basis is None:
        if table.order is not None:
            fields |= {"order": table.order.contiguous(), "order_size": table.order.element_size()}
        if table.mean is not None and not table.is_rotated:
            fields["mean"] = table.mean.contiguous()
    if deviation is None:
        deviation = torch.ones(batch_size, num_heads, 1, dtype=torch.float16)
    # Of a model's tables there is one for all sequences
    widths = table.widths.expand(batch_size, -1, -1) if table.basis is not None else table.widths
    fields |= {"deviation": deviation.contiguous(), "deviations": num_coded if deviation.shape[2] > 1 else 1}
    fields |= {"widths": widths.contiguous(), "codebook": _codebook(table.quantizer, table.is_weighted)}
    found = make("Coding", fields)
    # A copy would not see what is written into a table for another sequence
    for own in () if table.basis is not None else (table.order, table.mean, table.deviation, table.widths):
        if own is not None and not own.is_contiguous():
            return found
    _CODINGS[table] = found
    return found


@cache
def _codebook(quantizer: str, is_weighted: bool) -> torch.Tensor:
    """Makes `Codebook` of `coding.h`."""
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
    """Orders bounds, one less than a power of two in number, as a search by halves meets them."""
    levels, placed = len(bounds).bit_length(), torch.zeros(_ALL_LEVELS)
    for level in range(levels):
        first = 2 ** (levels - 1 - level)
        placed[_LEVELS[level] : _LEVELS[level] + 2**level] = bounds[first - 1 :: 2 * first]
    return placed


@cache
def _rotary(layout: RotaryLayout, tiles: int) -> Structure:
    """Describes a rotary embedding for as many tiles of positions from 0 on as below."""
    with torch.inference_mode(False):
        partners = channels_of(layout, torch.device("cpu"))[0]
        offsets = torch.stack(layout.angles(torch.arange(TILE))).permute(2, 0, 1)
        # Lanes may read over the end of a tile
        offsets = F.pad(offsets, (0, _MOST_LANES)).contiguous()
        origins = torch.stack(layout.angles(torch.arange(-tiles, tiles) * TILE), dim=2)
    fields = {"partners": partners, "offsets": offsets, "origins": origins}
    return make("Rotary", fields, dim=layout.head_dim, tiles=tiles)


class PreparedCoding:
    """
    Codes tokens as rows in storage behind others, as often as a buffer is full: what stays the same is checked once.

    Args:
        codec (`RowCodec`): whose rows they are, of scalar quantizers.
        padding (`torch.Tensor` of shape `[B]`, *optional*): of the sequences.
        limit (`float`): what all numbers have to be below.
    """

    def __init__(self, codec: RowCodec, padding: torch.Tensor | None, limit: float):
        self.codec, self.padding = codec, padding
        self._limit, self._sides = limit, [_CodingSide(table) for table in codec.tables()]

    def append(
        self,
        states: tuple[torch.Tensor, torch.Tensor],
        rows: tuple[torch.Tensor, torch.Tensor],
        length: int,
        start: int,
    ) -> bool:
        """
        Codes keys and values behind the rows in use, and tells whether the codes stand for them: if not, no row in use
        has changed, and `RowTable.encode` and whoever calls it say more.

        Args:
            states (two `torch.Tensor` of shape `[B, H, T, D]`): keys and values.
            rows (two `torch.Tensor` of shape `[B, H, capacity, R]`, uint8): storage with `length` rows in use.
            length, start (`int`): rows in use, and the index of the first token to be coded.
        """
        positions = Positions(start, self.padding)
        return all(
            side.append(own, to, length, positions, self._limit)
            for side, own, to in zip(self._sides, states, rows, strict=True)
        )


class _CodingSide:
    """Keeps what `PreparedCoding` has checked of keys or of values."""

    __slots__ = ("address", "call", "kind", "most", "rows", "table")

    def __init__(self, table: RowTable):
        self.table = table
        self.kind: tuple[object, ...] = ()
        self.call: Structure | None = None
        self.rows: torch.Tensor | None = None
        self.most = self.address = 0

    def append(
        self, states: torch.Tensor, rows: torch.Tensor, length: int, positions: Positions, limit: float
    ) -> bool:
        table = self.table
        numbers, count = table.numbers(states, positions), states.shape[2]
        kind = numbers.shape[:2], numbers.shape[3], numbers.dtype, rows.shape[:2], rows.shape[3]
        if self.call is None or kind != self.kind or positions.first + count >= self.most:
            # Positions up to here have angles in it
            self.most = 2 ** ((positions.first + count) // TILE).bit_length() * TILE
            self.kind, self.rows = kind, None
            self.call = code("encode_rows", numbers, rows, positions, table.rope, table, limit=limit, is_run=False)
        call, strides = self.call, numbers.stride()
        if rows is not self.rows:
            capacity = call.capacity = rows.shape[2]
            self.address = check("rows", rows, call.arrays["rows"], {**call.given, "capacity": capacity})
            self.rows = rows
        if not 0 <= length <= rows.shape[2] - count or strides[3] != 1 or not numbers.is_cpu or count > TILE:
            raise ValueError(
                f"{count} tokens of {numbers.device}, strides {strides}, behind {length} of {rows.shape[2]} rows"
            )
        call.states, call.tokens, call.start = numbers.data_ptr(), count, positions.first
        call.strides[0], call.strides[1], call.strides[2] = strides[:3]
        call.rows = self.address + length * rows.shape[3]
        call.tasks.next = call.tasks.ended = call.is_unfit = 0
        call.tasks.count = numbers.shape[0] * numbers.shape[1]
        run("encode_rows", call)
        return not call.is_unfit
