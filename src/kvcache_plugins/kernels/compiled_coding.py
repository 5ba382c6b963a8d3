"""Rows coded and decoded by the C kernels, keys turned, and channels measured: what these are told.

Legend: B batch, H key/value heads, T tokens, K numbers of a token that are coded, D head dim, R bytes of a row.
"""

import ctypes
import sys
from typing import Any

import torch

from kvcache_plugins.codecs.quantizers import BLOCK, NUM_STATES
from kvcache_plugins.codecs.rope import Positions, RotaryLayout
from kvcache_plugins.codecs.rows import KeptRows, RowCodec, RowTable

from .compiled import as_numbers, places, rotary_of, table_of
from .library import num_threads, run
from .structs import KINDS, MOST_CHANNELS, STRUCTURES, TILE, Structure, check, make


# As in `coding.c`
_TASK_TOKENS = 128
_MOST_LANES = 16
# Minima of a step of the search for a trellis, at most
_MOST_MINIMA = NUM_STATES // 2
_CODING, _AT = STRUCTURES["Coding"], places("Coding")


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
        of_source = {**_sizes_of(shape), "rows": own, "capacity": shape[2], "table": table_of(finer, shape[0])}
        fields["source"] = make("Coding", of_source, sizes={"row_size": finer.row_size})
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
    sizes = {}
    if table is not None:
        sizes["row_size"], described = table.row_size, table_of(table, shape[0])
        if (described.heads, described.channels) != (shape[1], shape[3]):
            own = described.heads, described.channels
            raise ValueError(f"`states` of {shape[1]} heads of {shape[3]}, a table of {own[0]} of {own[1]}")
        fields["table"] = described
        if table.is_trellis and name == "encode_rows":
            threads = num_threads()
            size = (described.blocks * BLOCK * _MOST_MINIMA + 1) * _MOST_LANES
            fields |= {"scratch": torch.empty(threads, size), "threads": threads, "scratch_size": size}
    if shape[3] > MOST_CHANNELS:
        raise ValueError(f"at most {MOST_CHANNELS} channels are coded, but got {shape[3]}")
    call = make("Coding", {**fields, **_sizes_of(shape)}, sizes=sizes)
    # A copy of them may be this call's alone
    call.alive = call.alive, states
    # Of so many tokens, which are counted from the start of a tile; channels are measured of all
    count = shape[0] * shape[1]
    if name != "measure_channels":
        count *= -(-(shape[2] + TILE - 1) // _TASK_TOKENS)
    if is_run:
        run(name, call, count, threads)
    return call


def _sizes_of(shape: torch.Size) -> dict[str, int]:
    return dict(zip(("batch", "heads", "tokens", "channels"), shape, strict=True))


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
