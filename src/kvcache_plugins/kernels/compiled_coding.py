"""Rows coded and decoded by the C kernels, keys turned, and channels measured: what these are told.

Legend: B batch, H key/value heads, T tokens, K numbers of a token that are coded, D head dim, R bytes of a row.
"""

import ctypes
import sys
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcache_plugins.codecs.quantizers import BLOCK, MAX_WIDTH, NUM_STATES, QUANTIZERS, state_points, thresholds
from kvcache_plugins.codecs.rope import Positions, RotaryLayout
from kvcache_plugins.codecs.rotation import rotation_size
from kvcache_plugins.codecs.rows import KeptRows, RowCodec, RowTable, scale_of

from .compiled import as_numbers, places, rotary_of
from .library import num_threads, run
from .structs import KINDS, MOST_CHANNELS, STRUCTURES, TILE, Structure, check, make


# As in `coding.h` and `coding.c`
_NUM_WIDTHS = MAX_WIDTH + 1
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
_TASK_TOKENS = 128
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = NUM_STATES // 2
_CODING, _AT = STRUCTURES["Coding"], places("Coding")
# Of tables that live
_CODINGS: "WeakKeyDictionary[RowTable, Structure]" = WeakKeyDictionary()


@torch.compiler.disable
def code(
    name: str,
    states: torch.Tensor | None,
    rows: torch.Tensor | None,
    positions: Positions | None,
    layout: RotaryLayout | None,
    table: RowTable | None = None,
    *,
    source: tuple[torch.Tensor, RowTable] | None = None,
    is_run: bool = True,
    **others: Any,
) -> Structure:
    """
    Runs one of the kernels of `coding.c`, `"encode_rows"`, `"decode_rows"`, `"turn_states"` or `"measure_channels"`,
    or only describes the call if it is not `is_run`; a `ValueError` if tensors do not fit each other or the table.

    Args:
        states (`torch.Tensor` of shape `[B, H, T, D]`, *optional*): states of any floating dtype, of which
            `"decode_rows"` writes float32.
        rows (`torch.Tensor` of shape `[B, H, T, R]`, *optional*): rows, written by `"encode_rows"`.
        positions (`Positions`, *optional*): of the tokens; without them keys are left as they are before RoPE.
        source (`torch.Tensor` of shape `[B, H, T, R]` and `RowTable`, *optional*): rows of a finer table, which are
            coded instead of states.
        **others: what the kernel writes and reads besides, by field.
    """
    threads = None
    fields: dict[str, Any] = {"is_back": name != "decode_rows", "rows": rows, **others}
    if source is not None:
        own, finer = source[0].contiguous(), source[1]
        shape = torch.Size((*own.shape[:3], finer.head_dim))
        described = _description(finer, shape[0])
        fields["source"] = make("Coding", {"rows": own, "capacity": shape[2]}, base=described)
    else:
        assert states is not None
        shape = states.shape
        if name == "decode_rows":
            assert rows is not None
            fields |= {"rows": rows.contiguous(), "result": states}
        else:
            states = states if states.dtype in KINDS else states.float()
            states = states if states.stride(3) == 1 and states.is_cpu else states.cpu().contiguous()
            fields |= {"states": states.data_ptr(), "strides": states.stride()[:3], "kind": KINDS[states.dtype]}
    fields["capacity"] = 0 if rows is None else rows.shape[2]
    if positions is not None and layout is not None and layout.frequencies:
        if layout.head_dim != shape[3]:
            raise ValueError(f"keys of {shape[3]} channels, a rotary embedding of {layout.head_dim}")
        padding = None if positions.padding is None else positions.padding.long().contiguous()
        rotary = rotary_of(layout, positions.first + shape[2])
        fields |= {"rotary": rotary, "start": positions.first, "padding": padding}
    if table is None:
        base, fields["rotation"] = None, 1
        fields |= {"batch": shape[0], "heads": shape[1], "channels": shape[3], "dim": shape[3]}
    else:
        base = _description(table, shape[0])
        if (base.heads, base.channels) != (shape[1], shape[3]):
            raise ValueError(f"`states` of {shape[1]} heads of {shape[3]}, a table of {base.heads} of {base.channels}")
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
    count = shape[0] * shape[1]
    if name != "measure_channels":
        count *= -(-(shape[2] + TILE - 1) // _TASK_TOKENS)
    if is_run:
        run(name, call, count, threads)
    return call


def _description(table: RowTable, batch_size: int) -> Structure:
    """Describes a table for tokens of so many sequences, and keeps that while the table lives."""
    found = _CODINGS.get(table)
    if found is not None and found.batch == batch_size:
        return found
    num_heads, num_coded, basis = table.widths.shape[1], table.num_coded, table.basis
    fields: dict[str, Any] = {"batch": batch_size, "heads": num_heads, "dim": num_coded, "row_size": table.row_size}
    fields |= {"is_trellis": table.is_trellis, "is_weighted": table.is_weighted}
    fields |= {"by_energy": table.by_energy, "refits": table.num_refits, "blocks": -(-num_coded // BLOCK)}
    fields |= {"rotation": rotation_size(table.head_dim) if table.is_rotated else 1, "channels": table.head_dim}
    if table.order is not None:
        fields |= {"order": table.order.contiguous(), "order_size": table.order.element_size()}
    widths, mean = table.widths, table.mean
    if basis is not None:
        # Of a model's tables there is one for all sequences
        widths, mean = widths.expand(batch_size, -1, -1), None if mean is None else mean.expand(batch_size, -1, -1)
        fields |= {"basis": basis.vectors, "inverse": basis.inverse, "steps": basis.steps, "factors": basis.factors}
    if mean is not None:
        fields["mean"] = mean.contiguous()
    deviation = table.deviation
    if deviation is None:
        deviation = torch.ones(batch_size, num_heads, 1, dtype=torch.float16)
    fields |= {"deviation": deviation.contiguous(), "deviations": num_coded if deviation.shape[2] > 1 else 1}
    fields |= {"widths": widths.contiguous(), "codebook": _codebook(table.quantizer, table.is_weighted)}
    found = make("Coding", fields)
    # A copy would not see what is written into a table for another sequence
    for own in () if basis is not None else (table.order, table.mean, table.deviation, table.widths):
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


class PreparedCoding:
    """
    Codes tokens of a buffer as rows behind others, as often as it is full, and rows of those that are finer as older
    ones: what stays the same is checked once.

    Args:
        codec, older (`RowCodec`): whose rows tokens become, of scalar quantizers, and whose rows these become.
        limit (`float`): what all numbers have to be below.
    """

    def __init__(self, codec: RowCodec, older: RowCodec, padding: torch.Tensor | None, limit: float):
        self.codec, self.padding, self._limit = codec, padding, limit
        self._tables, self._older = codec.tables(), older.tables()
        self._states: tuple[torch.Tensor, torch.Tensor] | None = None
        self._most = 0

    def append(
        self,
        states: tuple[torch.Tensor, torch.Tensor],
        count: int,
        start: int,
        kept: KeptRows,
        num_left: int = 0,
        older: KeptRows | None = None,
    ) -> list[torch.Tensor] | None:
        """
        Codes `count` tokens, the first of which has the index `start`, behind rows that are `kept`, and all rows in
        front of these behind `older` ones.

        Args:
            states (two `torch.Tensor` of shape `[B, H, at least T, D]`, contiguous): keys and values, as storage that
                they are in time and again; `num_left` of them, behind those that are coded, move to the front.

        Returns:
            `list[torch.Tensor]`: storage of rows of keys and of values, and of older ones. `None` if tokens cannot be
            stored, of which `RowTable.encode` and whoever calls it say more: nothing has changed then.

        Raises:
            ValueError: if anything does not fit the tables, or is not where it should be.
        """
        if states is not self._states or start + count >= self._most:
            self._prepare(states, count, start, kept)
        if count + num_left > min(each.shape[2] for each in states):
            raise ValueError(f"{count} tokens and {num_left} behind them of {[tuple(each.shape) for each in states]}")
        made = [self._place(number, each, kept, count) for number, each in enumerate(kept.rows)]
        for words in self._words[:2]:
            words[_AT.start] = start
        if older is not None:
            made += [self._place(2 + number, each, older, kept.first) for number, each in enumerate(older.rows)]
            for words, rows in zip(self._sources, kept.rows, strict=True):
                words[_AT.rows], words[_AT.capacity] = rows.data_ptr(), rows.shape[2]
        call = self._call
        call.left, call.is_unfit, call.tasks.next, call.tasks.ended = num_left, 0, 0, 0
        run("append_rows", call, len(made) * self._num_matrices)
        return None if call.is_unfit else made

    def _prepare(self, states: tuple[torch.Tensor, torch.Tensor], count: int, start: int, kept: KeptRows) -> None:
        for each in states:
            if not each.is_contiguous() or not each.is_cpu or each.dtype not in KINDS:
                raise ValueError(f"tokens in {each.dtype}, strides {each.stride()}, on {each.device}")
        where: dict[str, Any] = {"positions": Positions(start, self.padding), "limit": self._limit, "is_run": False}
        calls = [
            code("encode_rows", own[:, :, :count], None, layout=table.rope, table=table, **where)
            for own, table in zip(states, self._tables, strict=True)
        ]
        for own, table, finer in zip(kept.rows, self._older, self._tables, strict=True):
            calls.append(code("encode_rows", None, None, None, None, table, source=(own, finer), is_run=False))
        codings = (_CODING * len(calls))(*calls)
        self._sources = [as_numbers(call.given["source"]) for call in calls[2:]]
        # Positions up to here have angles
        rotary = calls[0].given.get("rotary")
        self._most = sys.maxsize if rotary is None else rotary.tiles * TILE
        self._words, self._known = list(map(as_numbers, codings)), [call.given for call in calls]
        self._call = make("Appended", codings=ctypes.addressof(codings))
        self._call.alive, self._states = (codings, calls), states
        self._num_matrices = states[0].shape[0] * states[0].shape[1]
        self._rows: list[torch.Tensor | None] = [None] * len(calls)

    def _place(self, number: int, rows: torch.Tensor, kept: KeptRows, count: int) -> torch.Tensor:
        """Has rows be written behind those that stay, in other storage if there is to be more or less of it."""
        words, capacity = self._words[number], kept.capacity
        if rows is not self._rows[number]:
            check("rows", rows, _CODING.arrays["rows"], {**self._known[number], "capacity": rows.shape[2]})
        end = kept.first + kept.length
        if not (0 <= kept.first <= end <= rows.shape[2] and kept.length + count <= capacity and 0 < count <= TILE):
            raise ValueError(f"{count} tokens behind rows {kept.first} to {end} of {rows.shape[2]} in {capacity}")
        storage = rows
        if kept.first or capacity != rows.shape[2]:
            # Which can be written to outside of inference mode, too
            with torch.inference_mode(False):
                storage = torch.empty((*rows.shape[:2], capacity, rows.shape[3]), dtype=torch.uint8)
            words[_AT.moved_capacity], words[_AT.moved_first] = rows.shape[2], kept.first
        words[_AT.moved] = 0 if storage is rows else rows.data_ptr()
        words[_AT.rows], words[_AT.capacity] = storage.data_ptr(), capacity
        words[_AT.used], words[_AT.tokens], words[_AT.is_unfit] = kept.length, count, 0
        self._rows[number] = storage
        return storage
