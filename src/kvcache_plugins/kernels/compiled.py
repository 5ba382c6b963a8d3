"""Calls of the C kernels of `cpu/attention.c` and `cpu/coding.c`: attention of a few queries over all parts of a
layer; rows coded and decoded, keys turned, and channels measured.

A call is made of a query and its parts. It runs once, or is prepared for queries to come: in a model's step whatever
Python touches comes from memory, so of a prepared call only addresses and one length are written for a token. Of
tables C takes what is stored, and believes nothing of it but sizes. What belongs to a model is made once: pairs of
channels and their angles, and bases of keys in the order in which C reads them.

Legend: B batch, H key/value heads, G query heads a key/value head, Q new tokens, T tokens, K numbers of a token that
are coded, D and E channels of keys and values, R bytes of a row, P pairs of channels, rounded up to 16.
"""

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from kvcache_plugins.formats.bits import packed_size
from kvcache_plugins.formats.groups import QuantizedChunks, channel_bits, num_offsets
from kvcache_plugins.formats.hadamard import rotation_size
from kvcache_plugins.formats.parts import DensePart, GroupPart, PagedRowPart, Part, RowPart
from kvcache_plugins.formats.positions import START, Positions
from kvcache_plugins.formats.quantizer import BLOCK, COEFFICIENTS, MAX_WIDTH, level_gains, thresholds
from kvcache_plugins.formats.rotary import RotaryLayout, channels_of
from kvcache_plugins.formats.rows import Basis, KeptRows, RowFormat, RowFormats, scale_of

from .library import find_threads, function, level, num_threads, run
from .masks import slice_mask
from .structs import CONSTANTS, KINDS, MOST_CHANNELS, ROWS, STRUCTURES, TILE, Structure, check, make


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
# Where in structures is what changes from token to token
_PART, _EXACT, _CALL, _TASKS = (STRUCTURES[name] for name in ("Part", "Exact", "Call", "Tasks"))
_NEXT, _ENDED = _TASKS.next.offset // 8, _TASKS.ended.offset // 8
_QUERY, _RESULT = _CALL.query.offset // 8, _CALL.result.offset // 8
_LENGTH, _CAPACITY = _PART.length.offset // 8, _EXACT.capacity.offset // 8
_KEYS, _NEWEST = _EXACT.keys.offset // 8, _EXACT.newest_key.offset // 8
# Tiles of positions, whose angles all layers share, at least
_LEAST_TILES = 64
# As in `rows.c`: channels that are summed up at a time
_GROUP, _WORD_GROUP = 4, 8
_NUM_WIDTHS = MAX_WIDTH + 1
_ROWS_OF_SIDE = STRUCTURES["RowSide"].arrays["rows"]
# As in `coding.c`
_TASK_TOKENS = 128
# As in `coding.h`
_LEVELS, _ALL_LEVELS = (0, 16, 32, 48, 64, 80, 112), 192
# Of tables that live
_TABLES: "WeakKeyDictionary[RowFormat, Structure]" = WeakKeyDictionary()
# Bases of keys and means as `calls.h` has them, of tables that live, by layout and level
_BASES: "WeakKeyDictionary[Basis, dict[tuple[RotaryLayout, str], dict[str, torch.Tensor]]]" = WeakKeyDictionary()
# Of states that live, where they are contiguous as they are
_SIDES: "WeakKeyDictionary[QuantizedChunks, Structure]" = WeakKeyDictionary()


class LayerParts:
    """
    Parts of a layer as C is told of them, for queries of a shape `[B, H * G, Q, D]`; a `ValueError` if they do not fit
    each other, or are not what their kernels take them for.
    """

    def __init__(self, shape: torch.Size, num_heads: int, value_dim: int):
        batch_size, num_query_heads, _, head_dim = self._shape = shape
        if num_query_heads % num_heads or max(head_dim, value_dim) > MOST_CHANNELS:
            raise ValueError(f"{num_query_heads} query heads of {head_dim} channels over {num_heads} key/value heads")
        self.sizes = {"batch": batch_size, "heads": num_heads, "key_dim": head_dim, "value_dim": value_dim}
        self.parts: list[Structure] = []
        # The last exact tokens, as C is told of them: they may grow in a prepared call
        self.exact: tuple[Structure, DensePart] | None = None
        # Whether any part reads a copy, which does not see what is written into the storage later
        self.has_copies = False

    def add(self, part: Part) -> None:
        """Adds a part; the exact one that grows is the last."""
        mask, lengths, kind = None if isinstance(part, PagedRowPart) else part.mask, None, "PART_ROWS"
        if isinstance(part, RowPart):
            stored = self.rows_of(part.keys, part.values, part.formats, part.positions, part.length)
        elif isinstance(part, PagedRowPart):
            stored = self.rows_of(part.keys, part.values, part.formats, START, part.length, part)
            lengths = part.lengths
            mask = torch.zeros(1, 1, 1, max(part.num_hidden, 2), dtype=torch.float32, device="cpu")
            mask[..., : part.num_hidden] = -torch.inf
        elif isinstance(part, GroupPart):
            stored, kind = self._groups_of(part), "PART_GROUPS"
        else:
            stored, kind = self._exact_of(part), "PART_EXACT"
        if mask is not None:
            # One column, or more than there are tokens, is not the mask of these tokens as it stands
            if mask.dim() < 4 or mask.shape[3] == 1 or mask.shape[3] > part.length:
                mask = slice_mask(mask, 0, part.length)
                assert mask is not None
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=torch.float32, device="cpu").masked_fill_(~mask, -torch.inf)
            mask = mask.float().contiguous()
            if any(size not in (1, most) for size, most in zip(mask.shape[:3], self._shape, strict=False)):
                raise ValueError(f"a mask of shape {tuple(mask.shape)} for queries {tuple(self._shape)}")
        fields: dict[str, Any] = {"kind": CONSTANTS[kind], "length": part.length, "lengths": lengths, "mask": mask}
        if mask is not None:
            fields["mask_shape"] = tuple(mask.shape)
        self.parts.append(make("Part", fields, sizes=self.sizes, stored=stored))

    def _exact_of(self, part: DensePart) -> Structure:
        keys, values = part.keys, part.values
        if keys.dtype is not values.dtype or keys.dtype not in KINDS:
            keys, values = keys.float(), values.float()
            self.has_copies = True
        keys, values, capacity = self._contiguous(keys), self._contiguous(values), max(keys.shape[2], part.length)
        stored = make("Exact", sizes=self.sizes, kind=KINDS[keys.dtype], capacity=capacity, keys=keys, values=values)
        self.exact = stored, DensePart(keys, values, part.length, None)
        return stored

    def _groups_of(self, part: GroupPart) -> Structure:
        if part.values.axis == "channel" or part.keys.is_rotated:
            raise ValueError("the compiled kernel takes values in groups of a token, and keys that are not rotated")
        chunks, chunk_length = part.keys.num_chunks, part.keys.chunk_length
        if not 0 <= part.length <= chunks * chunk_length:
            raise ValueError(f"{part.length} tokens of {chunks} chunks of {chunk_length}")
        keys, values = self._side(part.keys), self._side(part.values)
        for side, dim in ((keys, self.sizes["key_dim"]), (values, self.sizes["value_dim"])):
            wanted = self.sizes["batch"], self.sizes["heads"], chunks, chunk_length, dim
            own = tuple(getattr(side, name) for name in ("batch", "heads", "chunks", "chunk_length", "dim"))
            if own != wanted:
                raise ValueError(f"compressed keys and values have to be {wanted}, but got {own}")
        return make("Groups", chunks=chunks, chunk_length=chunk_length, keys=keys, values=values)

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.contiguous()
        self.has_copies |= own is not tensor
        return own

    def _side(self, states: QuantizedChunks) -> Structure:
        """Describes one side of groups."""
        side = _SIDES.get(states)
        if side is None:
            stored = states
            if not all(tensor.is_contiguous() for _, tensor in states.named_tensors()):
                stored = states.map(self._contiguous)
            side = _group_side(stored)
            if stored is states:
                _SIDES[states] = side
        return side

    def rows_of(
        self,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor | None,
        formats: RowFormats,
        positions: Positions,
        length: int,
        paged: PagedRowPart | None = None,
    ) -> Structure:
        """Describes tokens that are rows, or rows in pages; without those of values, which may stand elsewhere."""
        keys, values = formats
        layout, padding = keys.rope, positions.padding
        assert layout is not None and keys.mean is not None
        if layout.head_dim != self.sizes["key_dim"]:
            raise ValueError(f"a rotary embedding of {layout.head_dim} channels for keys of {self.sizes['key_dim']}")
        rotary = rotary_of(layout, positions.first + length)
        sizes = {**self.sizes, "all_pairs": rotary.all_pairs, "num_components": keys.num_coefficients}
        fields: dict[str, Any] = {"rotary": rotary, "first_position": positions.first}
        fields["keys"] = self._row_side(key_rows, length, keys, "key_dim", paged)
        fields["values"] = self._row_side(value_rows, length, values, "value_dim", paged)
        if padding is not None:
            fields["padding"] = padding.cpu().long().contiguous()
        assert (keys.basis is None) == (values.basis is None) and (keys.basis or keys.order) is not None
        if keys.basis is not None:
            fields |= _key_basis(keys.basis, keys.mean, layout)
        return make("Rows", fields, sizes=sizes)

    def _row_side(
        self, rows: torch.Tensor | None, length: int, table: RowFormat, dim_name: str, paged: PagedRowPart | None
    ) -> Structure:
        fields: dict[str, Any] = {"table": table_of(table, self.sizes["batch"]), "size": table.row_size}
        described, dim = fields["table"], self.sizes[dim_name]
        self.has_copies |= _TABLES.get(table) is not described
        if paged is not None and rows is not None:
            fields, rows = {**fields, **_page_fields(rows, paged, self.sizes["heads"], table.row_size)}, None
        rows = None if rows is None else self._contiguous(rows)
        capacity = length if rows is None else rows.shape[2]
        if (
            capacity < length
            or not 0 < table.row_size <= MOST_CHANNELS + 1
            or (described.heads, described.channels) != (self.sizes["heads"], dim)
            # Only components may be fewer than channels
            or not 0 < described.dim <= dim
            or (table.basis is None and described.dim < dim)
        ):
            own = described.heads, described.channels, described.dim
            raise ValueError(f"{length} rows of {table.row_size} bytes and a table of {own} for {dim} channels")
        return make("RowSide", fields, sizes=self.sizes, rows=rows, capacity=capacity)


class TokenWriter:
    """Calls that write the newest token behind the others, if it is of the shapes and dtype that they are made for."""

    _accepted: tuple[torch.Tensor, torch.Tensor] | None = None

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype | None, scale: float):
        # What exact keys and values are, `[B, H, any, D or E]`, of the dtype, and where they are as C knows it
        one, dims, self._exact_dtype = (sizes["batch"], sizes["heads"]), (sizes["key_dim"], sizes["value_dim"]), dtype
        self._kind = tuple((*one, dim, dtype, True) for dim in dims)
        self._newest_shapes = tuple(torch.Size((*one, 1, dim)) for dim in dims)
        self._storage: tuple[torch.Tensor, torch.Tensor] | None = None
        self._capacity, self._scale, self._threads = 0, scale, num_threads()
        self._origin = torch.get_num_threads(), os.getpid()

    def accept(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Checks key and value `[B, H, 1, D or E]` of a token that `attend` is to write; `None` if it cannot."""
        if (
            (key.shape, value.shape) == self._newest_shapes
            and key.dtype is value.dtype is self._exact_dtype
            and key.is_contiguous()
            and value.is_contiguous()
            and key.is_cpu
            and value.is_cpu
        ):
            self._accepted = key, value
            return self._accepted
        return None


class PreparedCall(TokenWriter):
    """
    Attention of queries `[B, H * G, Q, D]` over all parts, exact ones behind the others: of these, or of others
    of their shape and dtype, if only the last part, exact, may grow and none is a copy (`is_lasting`).
    """

    def __init__(self, query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float):
        told = LayerParts(query.shape, num_heads, parts[0].head_dims[1])
        for part in parts:
            told.add(part)
        super().__init__(told.sizes, None if told.exact is None else told.exact[1].keys.dtype, scale)
        self.is_lasting = told.exact is not None and not told.has_copies
        sizes, self._parts = told.sizes, (_PART * len(told.parts))(*told.parts)
        self._alive, self._shape, self._dtype, self._sizes = told, query.shape, query.dtype, sizes
        groups, num_queries = query.shape[1] // num_heads, query.shape[2]
        units = query.shape[0] * num_heads * -(-groups * num_queries // ROWS)
        tiles = sum(-(-part.length // TILE) for part in self._parts)
        wanted = -(-self._threads * _TASKS_PER_THREAD // units) if self._threads > 1 else 1
        runs = max(min(wanted, tiles // _MIN_TILES_PER_TASK), 1)
        partial = None
        if runs > 1:
            partial = torch.empty(units, runs, ROWS, sizes["value_dim"] + 2, dtype=torch.float32, device="cpu")
        self._call = make(
            "Call",
            {**sizes, "groups": groups, "queries": num_queries, "runs": runs, "states_kind": KINDS[query.dtype]},
            {"scale": scale, "num_parts": len(self._parts), "parts": ctypes.addressof(self._parts)},
            sizes={"units": units},
            partial=partial,
        )
        self._call.tasks.count = units * runs
        self._kernel, self._address = function("attend"), self._call.address
        # Written as numbers, in a third of the time that fields of structures take
        self._numbers, self._last = as_numbers(self._call), as_numbers(self._parts[-1])
        self._running = min(self._threads, units * runs)
        self._result_shape = *query.shape[:3], sizes["value_dim"]
        self._is_like_query = self._result_shape == query.shape
        # Rows that may be others later: the words of their parts, and what they are of
        self._rows: list[list[Any]] = [
            [own.given["stored"], as_numbers(part), None]
            for own, part in zip(told.parts[:-1], self._parts, strict=False)
            if own.kind == CONSTANTS["PART_ROWS"]
        ]
        if told.exact is not None:
            self._exact = as_numbers(told.exact[0])

    def extend(self, parts: Sequence[RowPart]) -> bool:
        """
        Has the last rows be those of other parts: more of them, or from another position on, of the same tables. Tells
        whether it can; if not, the call is of no use any more.
        """
        if not 0 < len(parts) <= len(self._rows):
            return False
        for known, part in zip(self._rows[-len(parts) :], parts, strict=True):
            (rows, words, before), positions = known, part.positions
            most = rows.given["rotary"].tiles * TILE
            if positions.first + part.length > most or positions.padding is not rows.given.get("padding"):
                return False
            if not part.length <= part.keys.shape[2] == part.values.shape[2]:
                return False
            if before is None or part.keys is not before.keys or part.values is not before.values:
                for side, own in ((rows.keys, part.keys), (rows.values, part.values)):
                    sizes = {**self._sizes, "capacity": own.shape[2], "size": side.size}
                    side.rows, side.capacity = check("rows", own, _ROWS_OF_SIDE, sizes), own.shape[2]
            known[2], words[_LENGTH], rows.first_position = part, part.length, positions.first
        return True

    def attend(
        self,
        query: torch.Tensor,
        scale: float | None,
        storage: tuple[torch.Tensor, torch.Tensor],
        length: int,
        newest: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor | None:
        """
        Attends over all parts with queries `[B, H * G, Q, D]`.

        Args:
            storage (two `torch.Tensor` of shape `[B, H, at least T, D or E]`): keys and values that the last part is
                now.
            length (`int`): its tokens in use, T.
            newest (two `torch.Tensor` of shape `[B, H, 1, D or E]`, *optional*): the last of them, if it is to be
                written there, as `accept` returned it.

        Returns:
            `torch.Tensor` of shape `[B, H * G, Q, E]`, in the queries' dtype; `None` if queries, scale or threads are
            others than the call was prepared for.

        Raises:
            ValueError: if exact tokens are not of the dtype and sizes that the call was prepared for.
        """
        if (
            query.dtype is not self._dtype
            or query.shape != self._shape
            or not query.is_cpu
            or (query.shape[3] ** -0.5 if scale is None else scale) != self._scale
            or (torch.get_num_threads(), os.getpid()) != self._origin
        ):
            return None
        stored = self._exact
        if storage is not self._storage:
            keys, values = storage
            if (kind_of_tokens(keys), kind_of_tokens(values)) != self._kind or keys.shape[2] != values.shape[2]:
                raise ValueError(f"exact tokens have to be {self._kind}, as when the call was prepared")
            stored[_KEYS], stored[_KEYS + 1], stored[_CAPACITY] = keys.data_ptr(), values.data_ptr(), keys.shape[2]
            self._storage, self._capacity = storage, keys.shape[2]
        if not 0 <= length <= self._capacity:
            raise ValueError(f"{length} tokens in use of {self._capacity}")
        if newest is None:
            stored[_NEWEST] = stored[_NEWEST + 1] = 0
        elif newest is self._accepted and length > 0:
            stored[_NEWEST], stored[_NEWEST + 1] = newest[0].data_ptr(), newest[1].data_ptr()
        else:
            raise ValueError("the newest token has to be one that the call has accepted")
        self._last[_LENGTH] = length
        return self.attend_now(query if query.is_contiguous() else query.contiguous())

    def attend_now(self, query: torch.Tensor) -> torch.Tensor:
        """Attends with contiguous queries that fit, over the parts as they are."""
        # What is like another tensor is made in half the time
        result = torch.empty_like(query) if self._is_like_query else query.new_empty(self._result_shape)
        numbers = self._numbers
        numbers[_NEXT] = numbers[_ENDED] = 0
        numbers[_QUERY], numbers[_RESULT] = query.data_ptr(), result.data_ptr()
        if self._running == 1:
            self._kernel(self._address)
        else:
            find_threads()(self._kernel, self._address, self._running)
        return result


def as_numbers(structure: ctypes.Structure) -> "memoryview[int]":
    """Shows a structure as words of 64 bits, which are written in a third of the time that its fields take."""
    return memoryview(structure).cast("B").cast("q")


def places(name: str) -> SimpleNamespace:
    """Finds the words of a structure that its fields are, those of its tasks and `window_length` among them."""
    kind = STRUCTURES[name]
    places = {field: getattr(kind, field).offset // 8 for field, *_ in kind._fields_}
    places["next"], places["count"] = places["tasks"], places["tasks"] + 1
    if "window" in places:
        places["window_length"] = places["window"]
    return SimpleNamespace(**places)


def kind_of_tokens(states: torch.Tensor) -> tuple[object, ...]:
    """Lists sizes, dtype and layout of tokens `[B, H, any, D]`: all that is believed of them when they are read."""
    return states.shape[0], states.shape[1], states.shape[3], states.dtype, states.is_contiguous()


def _group_side(states: QuantizedChunks) -> Structure:
    batch_size, num_heads, chunks, length, _ = states.codes.shape
    dim, scales = states.head_dim, states.scale.shape
    by_channel = states.axis == "channel"
    groups, most = (scales[3], length) if by_channel else (scales[4], dim)
    if scales[1] not in (1, num_heads) or groups == 0 or most % groups:
        raise ValueError(f"scales of shape {tuple(scales)} for {num_heads} heads, {length} tokens, {dim} channels")
    rows, columns = (groups, dim) if by_channel else (length, groups)
    fields: dict[str, Any] = dict(states.named_tensors())
    if states.low_rank_a is not None:
        fields["rank"] = states.low_rank_a.shape[4]
        if fields["rank"] > MOST_CHANNELS:
            raise ValueError(f"low rank of shape {tuple(states.low_rank_a.shape)} for chunks of {length} tokens")
    if states.outlier_indices is not None:
        fields |= {"num_outliers": states.outlier_indices.shape[3], "num_offsets": num_offsets(length, num_heads)}
        fields |= {"is_wide": states.outlier_indices.dtype == torch.int32}
    fields |= {"dim": dim, "nbits": states.nbits, "row_size": packed_size(dim, states.nbits), "groups": groups}
    fields |= {"batch": batch_size, "heads": num_heads, "chunks": chunks, "chunk_length": length}
    fields |= {"by_channel": by_channel, "scale_heads": scales[1], "scale_rows": rows, "scale_columns": columns}
    fields |= {"rotation_size": rotation_size(dim) if states.is_rotated else 1, "channel_bits": channel_bits(dim)}
    return make("GroupSide", fields)


def _page_fields(rows: torch.Tensor, part: PagedRowPart, num_heads: int, row_size: int) -> dict[str, Any]:
    """Tells where rows `[pages, H, tokens of a page, R]` stand in the memory of their part, to its last byte."""
    count, heads, tokens, size = rows.shape
    start, stride, most = rows.data_ptr() - part.memory.data_ptr(), rows.stride(0), part.pages.shape[1]
    end = start + (count - 1) * stride + heads * tokens * size
    if (
        (heads, size, rows.dtype) != (num_heads, row_size, torch.uint8)
        or tokens % TILE
        or rows.stride()[1:] != (tokens * size, size, 1)
        or not 0 <= start < end <= part.memory.numel()
        or stride < 0
        or most * tokens < part.length
    ):
        raise ValueError(f"rows {tuple(rows.shape)} of strides {rows.stride()} are no pages of {part.length} tokens")
    fields: dict[str, Any] = {"memory": part.memory, "memory_size": part.memory.numel(), "pages": part.pages}
    fields |= {"num_pages": count, "most_pages": most, "page_tokens": tokens}
    return {**fields, "page_start": start, "page_stride": stride}


def rotary_of(layout: RotaryLayout, stop: int) -> Structure:
    """Describes a rotary embedding of positions before `stop`, and many more; and as many below 0, for padding."""
    return _rotary(layout, max(2 ** (stop // TILE).bit_length(), _LEAST_TILES))


@cache
def _rotary(layout: RotaryLayout, tiles: int) -> Structure:
    with torch.inference_mode(False):
        pairs, num_turned, num_pairs = _pairs(layout)
        near = _angles_at(layout, torch.arange(TILE, dtype=torch.int64, device="cpu"))
        far = _angles_at(layout, TILE * torch.arange(tiles, dtype=torch.int64, device="cpu"))
        places = F.pad(near.permute(2, 1, 0), (0, CONSTANTS["ANGLES"] - TILE)).contiguous()
    counts = {"num_turned": num_turned, "num_pairs": num_pairs, "all_pairs": len(pairs), "tiles": tiles}
    return make("Rotary", counts, pairs=pairs, near=near, far=far, places=places)


@cache
def _pairs(layout: RotaryLayout) -> tuple[torch.Tensor, int, int]:
    """Pairs of channels `[P, 2]`, int32, -1 for none; and how many are turned, and how many there are."""
    partners = channels_of(layout, torch.device("cpu"))[0].tolist()
    pairs = [[channel, other] for channel, other in enumerate(partners) if other > channel]
    num_turned, alone = len(pairs), [channel for channel, other in enumerate(partners) if other == channel]
    # Those that are not turned share pairs whose angles are 0
    pairs += [[*alone[i : i + 2], -1][:2] for i in range(0, len(alone), 2)]
    padded = torch.tensor(pairs + [[-1, -1]] * (-len(pairs) % 16), dtype=torch.int32, device="cpu")
    return padded, num_turned, len(pairs)


def _angles_at(layout: RotaryLayout, positions: torch.Tensor) -> torch.Tensor:
    """Cosines and signed sines of the first channel of pairs at positions, `[*positions.shape, 2, P]`."""
    channels = _pairs(layout)[0][:, 0].long()
    frequencies = channels_of(layout, torch.device("cpu"))[1][channels.clamp(min=0)]
    angles = positions.double()[..., None] * torch.where(channels < 0, 0.0, frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-2).float()


def table_of(table: RowFormat, batch_size: int) -> Structure:
    """Describes a table for tokens of so many sequences, and keeps that while the table lives."""
    found = _TABLES.get(table)
    if found is not None and found.batch == batch_size:
        return found
    num_heads, num_coded, basis = table.widths.shape[1], table.num_coefficients, table.basis
    fields: dict[str, Any] = {"batch": batch_size, "heads": num_heads, "dim": num_coded, "row_size": table.row_size}
    fields |= {"is_weighted": table.is_weighted, "by_energy": table.by_energy}
    fields |= {"refits": table.num_refits, "blocks": -(-num_coded // BLOCK)}
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
        deviation = torch.ones(batch_size, num_heads, 1, dtype=torch.float16, device="cpu")
    fields |= {"deviation": deviation.contiguous(), "deviations": num_coded if deviation.shape[2] > 1 else 1}
    fields |= {"widths": widths.contiguous(), "codebook": _codebook(table.is_weighted)}
    found = make("Table", fields)
    # A copy would not see what is written into a table for another sequence
    for own in () if basis is not None else (table.order, table.mean, table.deviation, table.widths):
        if own is not None and not own.is_contiguous():
            return found
    _TABLES[table] = found
    return found


@cache
def _codebook(is_weighted: bool) -> torch.Tensor:
    """Makes `Codebook` of `coding.h`."""
    with torch.inference_mode(False):
        coefficients = torch.zeros(_NUM_WIDTHS, 4, dtype=torch.float32, device="cpu")
        coefficients[:, :3] = torch.tensor(COEFFICIENTS, dtype=torch.float32, device="cpu")
        coefficients[:, 3] = 1 if is_weighted else level_gains()
        bounds = torch.zeros(_NUM_WIDTHS, _ALL_LEVELS, dtype=torch.float32, device="cpu")
        for width in range(1, _NUM_WIDTHS):
            half = 2 ** (width - 1)
            bounds[width] = _by_levels(thresholds(bounds.device)[width, half : 2 * half - 1])
        halfway = torch.exp2((torch.arange(16, dtype=torch.float64, device="cpu") + 0.5) / 16).float()
        scale_bounds = _by_levels(halfway[:15])
        scale_bounds[15] = halfway[15]
        scales = scale_of(torch.arange(256, dtype=torch.int64, device="cpu"))
        return torch.cat([part.flatten() for part in (bounds, scale_bounds, scales, coefficients)])


def _by_levels(bounds: torch.Tensor) -> torch.Tensor:
    """Orders bounds, one less than a power of two in number, as a search by halves meets them."""
    levels, placed = len(bounds).bit_length(), torch.zeros(_ALL_LEVELS, dtype=torch.float32, device="cpu")
    for depth in range(levels):
        first = 2 ** (levels - 1 - depth)
        placed[_LEVELS[depth] : _LEVELS[depth] + 2**depth] = bounds[first - 1 :: 2 * first]
    return placed


def _key_basis(basis: Basis, mean: torch.Tensor, layout: RotaryLayout) -> dict[str, torch.Tensor]:
    """Makes the basis that components are multiplied with, and the means `[1, H, D]`, by the channels of pairs."""
    own, key = _BASES.setdefault(basis, {}), (layout, level())
    if key not in own:
        channels = _pairs(layout)[0].flatten().long()
        count, has_channel = basis.num_components, channels >= 0
        channels = channels.clamp(min=0)
        steps = basis.steps[:, :count].contiguous()
        if level() == "avx512":
            # Codes of two components in the halves of a word
            codes = F.pad(basis.vectors[:, :count, channels] * has_channel, (0, 0, 0, count % 2)).int()
            words = (codes[:, ::2] & 0xFFFF) | (codes[:, 1::2] << 16)
            factors = ((1 / basis.factors)[:, channels] * has_channel).unflatten(1, (-1, 2)).contiguous()
            words = words.unflatten(2, (-1, _WORD_GROUP)).transpose(1, 2).contiguous()
            own[key] = {"key_words": words, "key_steps": steps, "key_factors": factors}
        else:
            vectors = basis.vectors[:, :count].float() * steps[:, :, None] / basis.factors[:, None]
            vectors = (vectors[:, :, channels] * has_channel).unflatten(2, (-1, _GROUP)).transpose(1, 2).contiguous()
            own[key] = {"key_basis": vectors}
        own[key]["key_mean"] = (mean[0].float()[:, channels] * has_channel).unflatten(1, (-1, 2)).contiguous()
    return own[key]


_CODING, _AT_CODING = STRUCTURES["Coding"], places("Coding")
_SIZES = "batch", "heads", "tokens", "channels"


@torch.compiler.disable
def code(
    name: str,
    states: torch.Tensor | None,
    rows: torch.Tensor | None,
    positions: Positions | None,
    layout: RotaryLayout | None,
    table: RowFormat | None = None,
    *,
    source: tuple[torch.Tensor, RowFormat] | None = None,
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
        source (`torch.Tensor` of shape `[B, H, T, R]` and `RowFormat`, *optional*): rows of a finer table, which are
            coded instead of states.
        **others: what the kernel writes and reads besides, by field.
    """
    fields: dict[str, Any] = {"is_back": name != "decode_rows", "rows": rows, **others}
    if source is not None:
        own, finer = source[0].contiguous(), source[1]
        shape = torch.Size((*own.shape[:3], finer.head_dim))
        of_source = {"rows": own, "capacity": shape[2], "table": table_of(finer, shape[0])}
        given = dict(zip(_SIZES, shape, strict=True))
        fields["source"] = make("Coding", of_source, given, sizes={"row_size": finer.row_size})
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
            wanted = f"{described.heads} of {described.channels}"
            raise ValueError(f"`states` of {shape[1]} heads of {shape[3]}, a table of {wanted}")
        fields["table"] = described
    if shape[3] > MOST_CHANNELS:
        raise ValueError(f"at most {MOST_CHANNELS} channels are coded, but got {shape[3]}")
    call = make("Coding", fields, dict(zip(_SIZES, shape, strict=True)), sizes=sizes)
    # A copy of them may be this call's alone
    call.alive = call.alive, states
    # Of so many tokens, which are counted from the start of a tile; channels are measured of all
    count = shape[0] * shape[1]
    if name != "measure_channels":
        count *= -(-(shape[2] + TILE - 1) // _TASK_TOKENS)
    if is_run:
        run(name, call, count)
    return call


class PreparedCoding:
    """
    Codes tokens of a buffer as rows behind others, as often as it is full, and rows of those that are finer as older
    ones: what stays the same is checked once.

    Args:
        formats, older (two `RowFormat` each): formats that tokens are encoded in, and those that their rows are
            encoded in later.
        limit (`float`): what all numbers have to be below.
    """

    def __init__(self, formats: RowFormats, older: RowFormats, padding: torch.Tensor | None, limit: float):
        self.formats, self.padding, self._limit = formats, padding, limit
        self._older = older
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
            stored, of which `ops.encode_rows` and whoever calls it say more: nothing has changed then.

        Raises:
            ValueError: if anything does not fit the tables, or is not where it should be.
        """
        if states is not self._states or start + count >= self._most:
            self._prepare(states, count, start, kept)
        if count + num_left > min(each.shape[2] for each in states):
            raise ValueError(f"{count} tokens and {num_left} behind them of {[tuple(each.shape) for each in states]}")
        made = [self._place(number, each, kept, count) for number, each in enumerate(kept.rows)]
        for words in self._words[:2]:
            words[_AT_CODING.start] = start
        if older is not None:
            made += [self._place(2 + number, each, older, kept.first) for number, each in enumerate(older.rows)]
            for words, rows in zip(self._sources, kept.rows, strict=True):
                words[_AT_CODING.rows], words[_AT_CODING.capacity] = rows.data_ptr(), rows.shape[2]
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
            for own, table in zip(states, self.formats, strict=True)
        ]
        for own, table, finer in zip(kept.rows, self._older, self.formats, strict=True):
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
                storage = torch.empty((*rows.shape[:2], capacity, rows.shape[3]), dtype=torch.uint8, device="cpu")
            words[_AT_CODING.moved_capacity], words[_AT_CODING.moved_first] = rows.shape[2], kept.first
        words[_AT_CODING.moved] = 0 if storage is rows else rows.data_ptr()
        words[_AT_CODING.rows], words[_AT_CODING.capacity] = storage.data_ptr(), capacity
        words[_AT_CODING.used], words[_AT_CODING.tokens], words[_AT_CODING.is_unfit] = kept.length, count, 0
        self._rows[number] = storage
        return storage
