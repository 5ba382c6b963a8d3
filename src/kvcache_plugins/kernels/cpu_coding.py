"""Calls of the C kernels of `cpu/coding.c` and `cpu/states.c`: rows coded, rotary embeddings, moments of channels.

Legend: B batch, H heads, T tokens, D channels, R bytes of a row.
"""

import sys

import torch

from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.formats.rotary import RotaryLayout
from kvcache_plugins.formats.rows import KeptRows, RowFormat, RowFormats

from .c_formats import c_format_of, rotary_of
from .c_structs import KINDS, MAX_CHANNELS, STRUCTURES, TILE, Structure, as_words, check, make, word_offsets
from .library import run


# Tokens of a task, counted from the start of a tile: see `token_vectors.h`
_TASK_TOKENS = 128
_SIZES, _POSITIONS, _TARGET = (word_offsets(name) for name in ("TokenSizes", "TokenPositions", "RowTarget"))
_REQUANTIZE = word_offsets("RequantizeArgs")
_TOKEN_SIZES = STRUCTURES["TokenSizes"]
_TARGET_ROWS = STRUCTURES["RowTarget"].tensors["rows"]

Sizes = dict[str, int]
Pair = tuple[torch.Tensor, torch.Tensor]


@torch.compiler.disable
def encode_rows(states: torch.Tensor, row_format: RowFormat, positions: Positions) -> torch.Tensor:
    """
    Encode states `[B, H, T, D]` of any floating dtype as rows `[B, H, T, R]`, uint8.

    Raises:
        ValueError: if the states do not fit the format or the positions.
    """
    sizes = _sizes_of(states.shape)
    rows = torch.empty((*states.shape[:3], row_format.row_size), dtype=torch.uint8, device="cpu")
    placed = _positions(positions, row_format.rope, sizes)
    call = _encode_args(states, sizes, placed, _target(row_format, sizes, rows))
    run("encode_rows", call, _num_tasks(sizes))
    return rows


@torch.compiler.disable
def requantize_rows(rows: torch.Tensor, finer: RowFormat, row_format: RowFormat) -> torch.Tensor:
    """Encode rows `[B, H, T, R]` of a format with more bits as rows of `row_format`."""
    sizes = _sizes_of(torch.Size((*rows.shape[:3], finer.head_dim)))
    requantized = torch.empty((*rows.shape[:3], row_format.row_size), dtype=torch.uint8, device="cpu")
    call = _requantize_args(rows.contiguous(), finer, sizes, _target(row_format, sizes, requantized))
    run("requantize_rows", call, _num_tasks(sizes))
    return requantized


@torch.compiler.disable
def decode_rows(rows: torch.Tensor, row_format: RowFormat, positions: Positions | None) -> torch.Tensor:
    """
    Decode rows `[B, H, T, R]` to states `[B, H, T, D]`, float32; keys before RoPE if positions are `None`.

    Raises:
        ValueError: if the rows do not fit the format or the positions.
    """
    states = torch.empty((*rows.shape[:3], row_format.head_dim), dtype=torch.float32, device="cpu")
    sizes = _sizes_of(states.shape)
    call = make(
        "DecodeArgs",
        {**sizes, "row_size": row_format.row_size},
        sizes=_TOKEN_SIZES(**sizes),
        format=c_format_of(row_format, sizes["batch"], sizes["heads"], sizes["channels"]),
        capacity=rows.shape[2],
        rows=rows.contiguous(),
        positions=_positions(positions, row_format.rope, sizes),
        result=states,
    )
    run("decode_rows", call, _num_tasks(sizes))
    return states


@torch.compiler.disable
def apply_rope(keys: torch.Tensor, layout: RotaryLayout, positions: Positions, *, inverse: bool) -> torch.Tensor:
    """
    Return keys `[B, H, T, D]`, float32, with the rotary embedding of their positions applied, or undone.

    Raises:
        ValueError: if the keys do not fit the layout or the positions.
    """
    sizes = _sizes_of(keys.shape)
    rotated = torch.empty(keys.shape, dtype=torch.float32, device="cpu")
    call = make(
        "RopeArgs",
        sizes,
        sizes=_TOKEN_SIZES(**sizes),
        states=_states(keys),
        positions=_positions(positions, layout, sizes),
        inverse=inverse,
        result=rotated,
    )
    run("apply_rope", call, _num_tasks(sizes))
    return rotated


@torch.compiler.disable
def channel_moments(
    states: torch.Tensor, valid: torch.Tensor | None, layout: RotaryLayout | None, positions: Positions
) -> Pair:
    """
    Compute means and variances of channels `[B, H, D]`, float32, of states `[B, H, T, D]` of any floating dtype whose
    rotary embedding is undone, over all tokens or those that are `valid` `[B, T]`. Heads without tokens have zeros.

    Raises:
        ValueError: if tensors do not fit each other or the layout.
    """
    sizes = _sizes_of(states.shape)
    means = torch.empty((*states.shape[:2], states.shape[3]), dtype=torch.float32, device="cpu")
    variances = torch.empty_like(means)
    call = make(
        "MomentsArgs",
        sizes,
        sizes=_TOKEN_SIZES(**sizes),
        states=_states(states),
        positions=_positions(positions, layout, sizes),
        valid=None if valid is None else valid.contiguous(),
        means=means,
        variances=variances,
    )
    run("channel_moments", call, sizes["batch"] * sizes["heads"])
    return means, variances


def _sizes_of(shape: torch.Size) -> Sizes:
    if shape[3] > MAX_CHANNELS:
        raise ValueError(f"at most {MAX_CHANNELS} channels are coded, but got {shape[3]}")
    return dict(zip(("batch", "heads", "tokens", "channels"), shape, strict=True))


def _num_tasks(sizes: Sizes) -> int:
    # The first token is anywhere in its tile
    return sizes["batch"] * sizes["heads"] * -(-(sizes["tokens"] + TILE - 1) // _TASK_TOKENS)


def _states(states: torch.Tensor) -> Structure:
    """Describe states of any floating dtype, which are copied if C cannot read them."""
    states = states if states.dtype in KINDS else states.float()
    states = states if states.stride(3) == 1 and states.is_cpu else states.cpu().contiguous()
    described = make("States", dtype=KINDS[states.dtype], strides=states.stride()[:3], data=states.data_ptr())
    described.keepalive = states
    return described


def _positions(positions: Positions | None, layout: RotaryLayout | None, sizes: Sizes) -> Structure | None:
    """Describe positions and the rotary embedding that is applied or undone there; `None` if there is none."""
    if positions is None or layout is None or not layout.frequencies:
        return None
    if layout.head_dim != sizes["channels"]:
        raise ValueError(f"keys of {sizes['channels']} channels, a rotary embedding of {layout.head_dim}")
    padding = None if positions.padding is None else positions.padding.long().contiguous()
    rotary = rotary_of(layout, positions.first + sizes["tokens"])
    return make("TokenPositions", sizes, rotary=rotary, first=positions.first, padding=padding)


def _target(row_format: RowFormat, sizes: Sizes, rows: torch.Tensor | None = None) -> Structure:
    """Describe rows that are written; without them the caller fills in where they are."""
    return make(
        "RowTarget",
        {**sizes, "row_size": row_format.row_size},
        format=c_format_of(row_format, sizes["batch"], sizes["heads"], sizes["channels"]),
        capacity=0 if rows is None else rows.shape[2],
        rows=rows,
    )


def _encode_args(
    states: torch.Tensor, sizes: Sizes, positions: Structure | None, target: Structure, limit: float = 0.0
) -> Structure:
    return make(
        "EncodeArgs",
        sizes,
        sizes=_TOKEN_SIZES(**sizes),
        states=_states(states),
        positions=positions,
        target=target,
        limit=limit,
    )


def _requantize_args(rows: torch.Tensor, finer: RowFormat, sizes: Sizes, target: Structure) -> Structure:
    return make(
        "RequantizeArgs",
        {**sizes, "source_row_size": finer.row_size},
        sizes=_TOKEN_SIZES(**sizes),
        source_format=c_format_of(finer, sizes["batch"], sizes["heads"], sizes["channels"]),
        source_capacity=rows.shape[2],
        source=rows,
        target=target,
    )


class PreparedCoding:
    """
    Encodes tokens of a buffer behind the rows of a block whenever the buffer is full, and the block's oldest rows with
    fewer bits. Arguments that stay the same are checked once.

    Args:
        formats, older (two `RowFormat` each): formats of the rows that tokens are encoded as, and that these are
            encoded as later.
        limit (`float`): exclusive bound on the magnitude of numbers.
    """

    def __init__(self, formats: RowFormats, older: RowFormats, padding: torch.Tensor | None, limit: float):
        self.formats, self.padding = formats, padding
        self._older, self._limit = older, limit
        self._states: Pair | None = None
        self._most = 0

    def append(
        self,
        states: Pair,
        count: int,
        start: int,
        kept: KeptRows,
        num_left: int = 0,
        older: KeptRows | None = None,
    ) -> list[torch.Tensor] | None:
        """
        Encode `count` tokens from index `start` on behind rows that are `kept`, and requantize all rows in front of
        these behind `older` ones.

        Args:
            states (two `torch.Tensor` of shape `[B, H, at least T, D]`, contiguous): keys and values; the `num_left`
                tokens behind those that are encoded move to the front. The same storage is expected again.

        Returns:
            `list[torch.Tensor]`: storage of rows of keys and of values, and of older ones. `None` if a token cannot be
            stored: nothing has changed then.

        Raises:
            ValueError: if anything does not fit the formats, or is not where it should be.
        """
        if states is not self._states or start + count >= self._most:
            self._prepare(states, count, start, kept)
        if count + num_left > min(each.shape[2] for each in states):
            raise ValueError(f"{count} tokens and {num_left} behind them of {[tuple(each.shape) for each in states]}")
        made = [self._place(number, each, kept, count) for number, each in enumerate(kept.rows)]
        for words in self._positions:
            words[_POSITIONS.first] = start
        if older is not None:
            made += [self._place(2 + number, each, older, kept.first) for number, each in enumerate(older.rows)]
            for words, rows in zip(self._sources, kept.rows, strict=True):
                words[_REQUANTIZE.source] = rows.data_ptr()
                words[_REQUANTIZE.source_capacity] = rows.shape[2]
        call = self._call
        call.remaining, call.overflow = num_left, 0
        call.tasks.next = call.tasks.ended = 0
        for args in call.encode:
            args.overflow = 0
        run("append_rows", call, len(made) * self._num_heads)
        return None if call.overflow else made

    def _prepare(self, states: Pair, count: int, start: int, kept: KeptRows) -> None:
        for each in states:
            if not each.is_contiguous() or not each.is_cpu or each.dtype not in KINDS:
                raise ValueError(f"tokens in {each.dtype}, strides {each.stride()}, on {each.device}")
        positions = Positions(start, self.padding)
        encode: list[Structure] = []
        requantize: list[Structure] = []
        targets: list[Structure] = []
        for side, row_format in zip(states, self.formats, strict=True):
            sizes = _sizes_of(side[:, :, :count].shape)
            placed = _positions(positions, row_format.rope, sizes)
            targets.append(_target(row_format, sizes))
            encode.append(_encode_args(side, sizes, placed, targets[-1], self._limit))
        for rows, finer, row_format in zip(kept.rows, self.formats, self._older, strict=True):
            sizes = _sizes_of(torch.Size((*rows.shape[:3], finer.head_dim)))
            targets.append(_target(row_format, sizes))
            requantize.append(_requantize_args(rows, finer, sizes, targets[-1]))
        self._call = call = make(
            "AppendArgs",
            encode=(STRUCTURES["EncodeArgs"] * 2)(*encode),
            requantize=(STRUCTURES["RequantizeArgs"] * 2)(*requantize),
        )
        call.keepalive = encode, requantize
        parts = [*call.encode, *call.requantize]
        self._sizes = [as_words(args.sizes) for args in parts]
        self._targets = [as_words(args.target) for args in parts]
        self._positions = [as_words(args.positions) for args in call.encode]
        self._sources = [as_words(args) for args in call.requantize]
        # Sizes that the rows of each part are declared with
        self._known = [target.inputs for target in targets]
        # Positions before this one have angles
        placed = encode[0].inputs["positions"]
        self._most = sys.maxsize if placed is None else placed.inputs["rotary"].tiles * TILE
        self._states = states
        self._num_heads = states[0].shape[0] * states[0].shape[1]
        self._rows: list[torch.Tensor | None] = [None] * len(parts)

    def _place(self, number: int, rows: torch.Tensor, kept: KeptRows, count: int) -> torch.Tensor:
        """Point a part at the place behind the rows that stay, in other storage if its capacity changes."""
        words = self._targets[number]
        capacity = kept.capacity
        if rows is not self._rows[number]:
            check("rows", rows, _TARGET_ROWS, {**self._known[number], "capacity": rows.shape[2]})
        end = kept.first + kept.length
        if not (0 <= kept.first <= end <= rows.shape[2] and kept.length + count <= capacity and 0 < count <= TILE):
            raise ValueError(f"{count} tokens behind rows {kept.first} to {end} of {rows.shape[2]} in {capacity}")
        storage = rows
        if kept.first or capacity != rows.shape[2]:
            # Rows may be written outside of inference mode, too
            with torch.inference_mode(False):
                storage = torch.empty((*rows.shape[:2], capacity, rows.shape[3]), dtype=torch.uint8, device="cpu")
            words[_TARGET.moved_capacity], words[_TARGET.moved_first] = rows.shape[2], kept.first
        words[_TARGET.moved] = 0 if storage is rows else rows.data_ptr()
        words[_TARGET.rows], words[_TARGET.capacity] = storage.data_ptr(), capacity
        words[_TARGET.used] = kept.length
        self._sizes[number][_SIZES.tokens] = count
        self._rows[number] = storage
        return storage
