"""Calls of the C kernel of `cpu/attention.c`: attention of a few queries over all parts of a layer.

A call is made of a query and its parts. It runs once, or is prepared for later queries: in a model's step whatever
Python touches comes from memory, so only addresses and one length of a prepared call are written for a token.

Legend: B batch, H key/value heads, G query heads a key/value head, Q new tokens, T tokens, D and E channels of keys
and values, R bytes of a row.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from kvcache_plugins.formats.parts import DensePart, GroupPart, OpaqueRowPart, PagedRowPart, Part, RowPart
from kvcache_plugins.formats.positions import START, Positions
from kvcache_plugins.formats.rows import RowFormat, RowFormats

from .c_formats import c_chunks_of, c_format_of, is_copied, key_basis_fields, key_basis_sizes, rotary_of
from .c_structs import (
    BLOCK_QUERIES,
    CONSTANTS,
    KINDS,
    MAX_CHANNELS,
    STRUCTURES,
    TILE,
    Structure,
    as_words,
    check,
    make,
    word_offsets,
)
from .library import bind, num_threads
from .masks import slice_mask


# A task has at least this many tiles, and there are enough tasks for the threads to end together
_MIN_TILES_PER_TASK = 8
_TASKS_PER_THREAD = 4
# Words of structures that change from token to token
_PART, _EXACT, _ARGS = (word_offsets(name) for name in ("Part", "ExactPart", "AttentionArgs"))
_NEXT = _ARGS.tasks + STRUCTURES["Tasks"].next.offset // 8
_ENDED = _ARGS.tasks + STRUCTURES["Tasks"].ended.offset // 8
_ROWS_OF_SIDE = STRUCTURES["RowSide"].tensors["rows"]


class LayerParts:
    """
    Structures of C that describe parts of a layer, for queries of a shape `[B, H * G, Q, D]`. A `ValueError` if parts
    do not fit each other or their kernels.
    """

    def __init__(self, shape: torch.Size, num_heads: int, value_dim: int):
        batch_size, num_query_heads, _, head_dim = self._shape = shape
        if num_query_heads % num_heads or max(head_dim, value_dim) > MAX_CHANNELS:
            raise ValueError(f"{num_query_heads} query heads of {head_dim} channels over {num_heads} key/value heads")
        self.sizes = {"batch": batch_size, "heads": num_heads, "key_dim": head_dim, "value_dim": value_dim}
        self.parts: list[Structure] = []
        # Structure and part of the last exact tokens, which may grow in a prepared call
        self.exact: tuple[Structure, DensePart] | None = None
        # True if any part reads a copy, which does not see later writes to the storage
        self.has_copies = False

    def add(self, part: Part) -> None:
        """Add a part; the exact one that grows is the last."""
        mask, lengths, kind = None if isinstance(part, PagedRowPart) else part.mask, None, "PART_ROWS"
        if isinstance(part, RowPart):
            stored = self.rows_of(part.keys, part.values, part.formats, part.positions, part.length)
        elif isinstance(part, PagedRowPart):
            stored = self.rows_of(part.keys, part.values, part.formats, START, part.length, part)
            lengths = part.lengths
            # A single column would be that of all tokens
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
        self.parts.append(
            make(
                "Part",
                self.sizes,
                kind=CONSTANTS[kind],
                length=part.length,
                lengths=lengths,
                mask_shape=(0, 0, 0, 0) if mask is None else tuple(mask.shape),
                mask=mask,
                stored=stored,
            )
        )

    def _exact_of(self, part: DensePart) -> Structure:
        keys, values = part.keys, part.values
        if keys.dtype is not values.dtype or keys.dtype not in KINDS:
            keys, values = keys.float(), values.float()
            self.has_copies = True
        keys, values, capacity = self._contiguous(keys), self._contiguous(values), max(keys.shape[2], part.length)
        stored = make("ExactPart", self.sizes, dtype=KINDS[keys.dtype], capacity=capacity, keys=keys, values=values)
        self.exact = stored, DensePart(keys, values, part.length, None)
        return stored

    def _groups_of(self, part: GroupPart) -> Structure:
        if part.values.axis == "channel" or part.keys.is_rotated:
            raise ValueError("the compiled kernel takes values in groups of a token, and keys that are not rotated")
        chunks, chunk_length = part.keys.num_chunks, part.keys.chunk_length
        if not 0 <= part.length <= chunks * chunk_length:
            raise ValueError(f"{part.length} tokens of {chunks} chunks of {chunk_length}")
        keys, values = c_chunks_of(part.keys), c_chunks_of(part.values)
        self.has_copies |= is_copied(part.keys, keys) or is_copied(part.values, values)
        for side, dim in ((keys, self.sizes["key_dim"]), (values, self.sizes["value_dim"])):
            wanted = self.sizes["batch"], self.sizes["heads"], chunks, chunk_length, dim
            own = tuple(getattr(side, name) for name in ("batch", "heads", "chunks", "chunk_length", "dim"))
            if own != wanted:
                raise ValueError(f"compressed keys and values have to be {wanted}, but got {own}")
        return make("GroupPart", chunks=chunks, chunk_length=chunk_length, keys=keys, values=values)

    def _contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.contiguous()
        self.has_copies |= own is not tensor
        return own

    def rows_of(
        self,
        key_rows: torch.Tensor,
        value_rows: torch.Tensor | None,
        formats: RowFormats,
        positions: Positions,
        length: int,
        paged: PagedRowPart | None = None,
    ) -> Structure:
        """Describe tokens that are rows, or rows in pages; without those of values, which may stand elsewhere."""
        keys, values = formats
        layout, padding = keys.rope, positions.padding
        assert layout is not None and keys.mean is not None
        if layout.head_dim != self.sizes["key_dim"]:
            raise ValueError(f"a rotary embedding of {layout.head_dim} channels for keys of {self.sizes['key_dim']}")
        rotary = rotary_of(layout, positions.first + length)
        assert (keys.basis is None) == (values.basis is None) and (keys.basis or keys.order) is not None
        return make(
            "RowPart",
            {**self.sizes, **key_basis_sizes(keys.num_coefficients, rotary.padded_pairs)},
            keys=self._row_side(key_rows, length, keys, self.sizes["key_dim"], paged),
            values=self._row_side(value_rows, length, values, self.sizes["value_dim"], paged),
            rotary=rotary,
            first_position=positions.first,
            padding=None if padding is None else padding.cpu().long().contiguous(),
            **({} if keys.basis is None else key_basis_fields(keys.basis, keys.mean, layout)),
        )

    def _row_side(
        self, rows: torch.Tensor | None, length: int, row_format: RowFormat, dim: int, paged: PagedRowPart | None
    ) -> Structure:
        described = c_format_of(row_format, self.sizes["batch"], self.sizes["heads"], dim)
        self.has_copies |= is_copied(row_format, described)
        pages: dict[str, object] = {}
        if paged is not None and rows is not None:
            pages, rows = _page_fields(rows, paged, self.sizes["heads"], row_format.row_size), None
        rows = None if rows is None else self._contiguous(rows)
        capacity = length if rows is None else rows.shape[2]
        if (
            capacity < length
            or not 0 < row_format.row_size <= MAX_CHANNELS + 1
            # Only components may be fewer than channels
            or not 0 < described.num_coefficients <= dim
            or (row_format.basis is None and described.num_coefficients < dim)
        ):
            own = f"{row_format.row_size} bytes for {described.num_coefficients} numbers"
            raise ValueError(f"{length} rows of {own} in room for {capacity}, of {dim} channels")
        return make(
            "RowSide",
            self.sizes,
            format=described,
            row_size=row_format.row_size,
            capacity=capacity,
            rows=rows,
            **pages,
        )


class GrowingStates(Protocol):
    """
    Exact keys and values; a prepared call writes the newest token.

    Attributes:
        storage (two `torch.Tensor` of shape `[B, H, capacity, D or E]`): keys and values.
        capacity, length (`int`): tokens that fit, and tokens in use, the unwritten one included.
        unwritten (two `torch.Tensor` of shape `[B, H, 1, D or E]`, *optional*): the newest token, until a call has
            written it.
    """

    storage: tuple[torch.Tensor, torch.Tensor]
    capacity: int
    length: int
    unwritten: tuple[torch.Tensor, torch.Tensor] | None


class TailReader:
    """
    Calls that read a tail of exact tokens, and write its newest token behind the others.

    Args:
        sizes (`Mapping[str, int]`): `batch`, `heads`, `key_dim` and `value_dim`.
        dtype (`torch.dtype`, *optional*): dtype of the tokens.
        scale (`float`): factor of the scores.
    """

    def __init__(self, sizes: Mapping[str, int], dtype: torch.dtype | None, scale: float):
        batch_size, num_heads = sizes["batch"], sizes["heads"]
        dims = sizes["key_dim"], sizes["value_dim"]
        # Kind of the storage `[B, H, any, D or E]`, and of the newest token
        self._kind = tuple((batch_size, num_heads, dim, dtype, True) for dim in dims)
        self._newest_kind = (*(torch.Size((batch_size, num_heads, 1, dim)) for dim in dims), dtype, dtype, True, True)
        # Storage whose addresses C has
        self._storage: tuple[torch.Tensor, torch.Tensor] | None = None
        self._capacity = 0
        self._scale = scale
        self._threads = num_threads()
        self._origin = torch.get_num_threads(), os.getpid()


class PreparedCall(TailReader):
    """
    Attention of queries `[B, H * G, Q, D]` over all parts, exact ones behind the others: of these queries, or of later
    ones of their shape and dtype, if only the last part, exact, may grow and none is a copy (`is_lasting`).
    """

    def __init__(self, query: torch.Tensor, parts: Sequence[Part], num_heads: int, scale: float):
        described = LayerParts(query.shape, num_heads, parts[0].head_dims[1])
        for part in parts:
            described.add(part)
        sizes = described.sizes
        super().__init__(sizes, None if described.exact is None else described.exact[1].keys.dtype, scale)
        self.is_lasting = described.exact is not None and not described.has_copies
        self._shape = query.shape
        self._dtype = query.dtype
        self._sizes = sizes
        self._parts = (STRUCTURES["Part"] * len(described.parts))(*described.parts)
        # Objects that the structures point to
        self._keepalive = described
        groups, num_queries = query.shape[1] // num_heads, query.shape[2]
        blocks = query.shape[0] * num_heads * -(-groups * num_queries // BLOCK_QUERIES)
        tiles = sum(-(-part.length // TILE) for part in self._parts)
        wanted = -(-self._threads * _TASKS_PER_THREAD // blocks) if self._threads > 1 else 1
        splits = max(min(wanted, tiles // _MIN_TILES_PER_TASK), 1)
        partials, partial_size = None, sizes["value_dim"] + 2
        if splits > 1:
            shape = blocks, splits, BLOCK_QUERIES, partial_size
            partials = torch.empty(shape, dtype=torch.float32, device="cpu")
        self._call = make(
            "AttentionArgs",
            {"blocks": blocks, "partial_size": partial_size},
            **sizes,
            query_groups=groups,
            queries=num_queries,
            splits=splits,
            dtype=KINDS[query.dtype],
            scale=scale,
            partials=partials,
            num_parts=len(self._parts),
            parts=ctypes.addressof(self._parts),
        )
        self._call.tasks.count = blocks * splits
        # Words are written in a third of the time that fields of structures take
        self._words, self._last = as_words(self._call), as_words(self._parts[-1])
        self._run = bind("attend", self._call, min(self._threads, blocks * splits))
        self._result_shape = *query.shape[:3], sizes["value_dim"]
        self._is_like_query = self._result_shape == query.shape
        # Rows that may be others later: their structure, the words of their part, and the part
        self._rows = [
            (own.inputs["stored"], as_words(words), part)
            for own, words, part in zip(described.parts[:-1], self._parts, parts, strict=False)
            if isinstance(part, RowPart)
        ]
        if described.exact is not None:
            self._exact = as_words(described.exact[0])

    def extend(self, parts: Sequence[RowPart | OpaqueRowPart]) -> bool:
        """
        Replace the last rows by those of other parts: more of them, or from another position on, of the same formats
        and with the same masks. Return False if the call cannot; it is of no use then.
        """
        first = len(self._rows) - len(parts)
        if not 0 <= first < len(self._rows):
            return False
        for number, part in enumerate(parts, start=first):
            rows, words, before = self._rows[number]
            positions = part.positions
            if not isinstance(part, RowPart) or before.mask is not None and positions.first != before.positions.first:
                # Columns of the mask would be others
                return False
            most = rows.inputs["rotary"].tiles * TILE
            if positions.first + part.length > most or positions.padding is not rows.inputs.get("padding"):
                return False
            if not part.length <= part.keys.shape[2] == part.values.shape[2]:
                return False
            if part.keys is not before.keys or part.values is not before.values:
                for side, own in ((rows.keys, part.keys), (rows.values, part.values)):
                    sizes = {**self._sizes, "capacity": own.shape[2], "row_size": side.row_size}
                    side.rows, side.capacity = check("rows", own, _ROWS_OF_SIDE, sizes), own.shape[2]
            self._rows[number] = rows, words, replace(part, mask=before.mask)
            words[_PART.length] = part.length
            rows.first_position = positions.first
        return True

    def attend(
        self, query: torch.Tensor, scale: float | None = None, tail: GrowingStates | None = None
    ) -> torch.Tensor | None:
        """
        Attend over all parts with queries `[B, H * G, Q, D]`.

        Args:
            scale (`float`, *optional*, defaults to `1 / sqrt(D)`): factor of the scores.
            tail (`GrowingStates`, *optional*): the last part as it is now; its newest token is written.

        Returns:
            `torch.Tensor` of shape `[B, H * G, Q, E]`, in the queries' dtype; `None` if queries, scale or threads are
            others than the call was prepared for.

        Raises:
            ValueError: if tail or newest token are not of the dtype and sizes that the call was prepared for.
        """
        if (
            query.dtype is not self._dtype
            or query.shape != self._shape
            or not query.is_cpu
            or (query.shape[3] ** -0.5 if scale is None else scale) != self._scale
            or (torch.get_num_threads(), os.getpid()) != self._origin
        ):
            return None
        if not query.is_contiguous():
            query = query.contiguous()
        if tail is not None:
            stored, newest = self._exact, tail.unwritten
            if tail.storage is not self._storage:
                self._set_storage(tail.storage)
            if not 0 <= tail.length <= self._capacity:
                raise ValueError(f"{tail.length} tokens in use of {self._capacity}")
            stored[_EXACT.newest_key] = stored[_EXACT.newest_value] = 0
            if newest is not None:
                key, value = newest
                kind = key.shape, value.shape, key.dtype, value.dtype, key.is_cpu, value.is_cpu
                if kind != self._newest_kind or not (tail.length and key.is_contiguous() and value.is_contiguous()):
                    raise ValueError(f"the newest token has to be {self._newest_kind}, contiguous, as in the call")
                stored[_EXACT.newest_key], stored[_EXACT.newest_value] = key.data_ptr(), value.data_ptr()
            self._last[_PART.length] = tail.length
        # A tensor like another is made in half the time
        result = torch.empty_like(query) if self._is_like_query else query.new_empty(self._result_shape)
        words = self._words
        words[_NEXT] = words[_ENDED] = 0
        words[_ARGS.query], words[_ARGS.result] = query.data_ptr(), result.data_ptr()
        self._run()
        if tail is not None:
            tail.unwritten = None
        return result

    def _set_storage(self, storage: tuple[torch.Tensor, torch.Tensor]) -> None:
        keys, values = storage
        if (kind_of_tokens(keys), kind_of_tokens(values)) != self._kind or keys.shape[2] != values.shape[2]:
            raise ValueError(f"exact tokens have to be {self._kind}, as when the call was prepared")
        stored = self._exact
        stored[_EXACT.keys], stored[_EXACT.values] = keys.data_ptr(), values.data_ptr()
        stored[_EXACT.capacity] = keys.shape[2]
        self._storage = storage
        self._capacity = keys.shape[2]


def kind_of_tokens(states: torch.Tensor) -> tuple[object, ...]:
    """List sizes, dtype and layout of tokens `[B, H, any, D]`: all that a call relies on when it reads them."""
    return states.shape[0], states.shape[1], states.shape[3], states.dtype, states.is_contiguous()


def _page_fields(rows: torch.Tensor, part: PagedRowPart, num_heads: int, row_size: int) -> dict[str, object]:
    """List the fields of rows `[pages, H, tokens of a page, R]` in the memory of their part, to its last byte."""
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
    fields: dict[str, object] = {"memory": part.memory, "memory_size": part.memory.numel(), "pages": part.pages}
    fields |= {"num_pages": count, "max_pages": most, "page_tokens": tokens}
    return {**fields, "page_start": start, "page_stride": stride}
