"""Blocks of coded rows for the paged cache of Transformers' continuous batching.

Transformers' `PagedAttentionCache` has an allocator for every kind of layer, which divides flat memory into blocks of
pages. Blocks are copied for forks, shared by prefixes and moved to host memory, whatever they hold. `CodedAllocator`
keeps all of that and changes the content of blocks. The block table of a request is

    [ blocks of exact sink tokens | blocks of exact recent tokens | blocks of rows, P tokens each ]

and a block holds, layer by layer, either rows or as many exact tokens X as fit into the same bytes:

    [ key rows [H, P, R] | value rows [H, P, R] ]        [ keys and values [X, 2, H, D] ]

Sink tokens are shared together with the first block of rows. Recent tokens belong to one request, in a ring of N
slots. A request that finds a known prefix decodes its first recent tokens from the prefix's rows.

Legend: B requests, H key/value heads, P tokens of a page, R bytes of a row, X exact tokens of a block, S sink tokens,
N recent tokens, D head dim, Q new tokens of a request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypedDict

import torch
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching.cache_allocators import (
    CachePool,
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.files.schema import Stored, check_layout
from kvcache_plugins.formats.parts import DensePart, PagedRowPart, Part
from kvcache_plugins.formats.positions import Positions
from kvcache_plugins.layers.exact_tokens import ExactPrefix
from kvcache_plugins.layers.layer_state import LayerState, SegmentState, State
from kvcache_plugins.layers.segments import ROWS
from kvcache_plugins.user_warnings import warn_user

from .page_store import PageStore
from .request_batch import BlockLayout, Request, RequestBatch


if TYPE_CHECKING:
    from typing_extensions import Unpack


_SLIDING = "sliding_attention"
# Rows and exact tokens begin at multiples of this many bytes
_ALIGNMENT = 16
# Compiled kernels read pages in tiles of this many tokens
_TILE = 64


class PageCodecConfig(NamedTuple):
    """
    Options of pages.

    Attributes:
        codecs (`Mapping[int, RowCodec]`): codecs of the layers that attend to all tokens.
        num_sink_tokens, num_recent_tokens (`int`): first and newest tokens of a request that stay exact.
    """

    codecs: Mapping[int, RowCodec]
    num_sink_tokens: int
    num_recent_tokens: int


@dataclass(slots=True)
class BatchingCounters:
    """Counters of a `compressed_batching` context, added up over layers."""

    tokens_coded: int = 0
    tokens_loaded: int = 0
    attend_calls: int = 0
    fused_calls: int = 0
    kernel_fallbacks: int = 0
    dense_reads: int = 0


class AllocatorOptions(TypedDict):
    """Arguments that Transformers passes to an allocator of full attention."""

    index: int
    config: PreTrainedConfig
    num_key_value_heads: int
    cache_dtype: torch.dtype
    page_size: int
    layer_indices: list[int]
    allow_block_sharing: bool


class LayerPages(NamedTuple):
    """Memory of one layer in all blocks, viewed as rows and as exact tokens; the first dimension is the block."""

    key_rows: torch.Tensor
    value_rows: torch.Tensor
    exact: torch.Tensor


class CodedAllocator(FullAttentionCacheAllocator):
    """
    Allocator of blocks of coded rows, see the module.

    Raises a `ValueError` for layers without a codec, or whose heads do not fit pages of one size.
    """

    supports_block_table = False

    def __init__(
        self,
        codec_config: PageCodecConfig,
        counters: BatchingCounters,
        page_store: PageStore | None = None,
        **options: Unpack[AllocatorOptions],
    ) -> None:
        self.head_dim = _common_head_dim(codec_config, options)
        self.num_key_value_heads = options["num_key_value_heads"]
        self.cache_dtype = options["cache_dtype"]
        self.codec_config = codec_config
        self.counters = counters
        self._page_store = page_store
        # Hashes of blocks that are on disk
        self._stored_hashes: set[int] = set()
        page_size, layer_indices = options["page_size"], options["layer_indices"]
        # Bytes from the beginning of a block to each layer's key rows and value rows
        self._row_offsets: dict[int, tuple[int, int]] = {}
        end = 0
        for layer_idx in layer_indices:
            key_size, value_size = (
                self.num_key_value_heads * page_size * row_size
                for row_size in codec_config.codecs[layer_idx].row_sizes
            )
            self._row_offsets[layer_idx] = end, end + key_size
            end += key_size + value_size
        num_layers = len(layer_indices)
        token_bytes = 2 * self.num_key_value_heads * self.head_dim * self.cache_dtype.itemsize
        self._before_cache_tensor_init(
            index=options["index"],
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=_fit_page(max(end, num_layers * token_bytes), num_layers, _sliding_block_bytes(options)),
            allow_block_sharing=options["allow_block_sharing"],
        )
        self.layout = BlockLayout(
            codec_config.num_sink_tokens,
            codec_config.num_recent_tokens,
            exact_per_block=self.bytes_per_page // token_bytes,
            rows_per_block=page_size,
        )
        # Block table of a request, and True if its recent tokens have to be decoded from rows, by the physical index
        # of its first new token in a coming pass
        self._tables: dict[int, tuple[list[int], bool]] = {}
        # Requests that share a prefix and have had no pass with tokens yet
        self._sharing: set[str] = set()
        # Requests of the pass under way
        self.batches: list[RequestBatch] = []

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: CachePool
    ) -> None:
        """View the memory of all blocks as rows and exact tokens, as `FullAttentionCacheAllocator` does as states."""
        self.bytes_per_sector = bytes_per_sector
        self._memory = cache_tensor
        # Codecs by layer for the newest batch size: see `_codec`
        self._repeated_codecs: dict[int, tuple[int, RowCodec]] = {}
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        num_blocks, num_heads = len(self._copy_view), self.num_key_value_heads
        num_exact = self.layout.exact_per_block

        def view_rows(offset: int, row_size: int) -> torch.Tensor:
            shape = (num_blocks, num_heads, self.tokens_per_page, row_size)
            strides = (self.bytes_per_block, self.tokens_per_page * row_size, row_size, 1)
            return cache_tensor.as_strided(shape, strides, offset)

        states = cache_tensor.view(self.cache_dtype)
        token_size = num_heads * self.head_dim
        shape = (num_blocks, num_exact, 2, num_heads, self.head_dim)
        strides = (self.bytes_per_block // self.cache_dtype.itemsize, 2 * token_size, token_size, self.head_dim, 1)
        self._pages: dict[int, LayerPages] = {}
        for number, (layer_idx, (key_offset, value_offset)) in enumerate(self._row_offsets.items()):
            key_size, value_size = self.codec_config.codecs[layer_idx].row_sizes
            exact = states.as_strided(shape, strides, number * num_exact * 2 * token_size)
            self._pages[layer_idx] = LayerPages(
                view_rows(key_offset, key_size), view_rows(value_offset, value_size), exact
            )

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        row_blocks: int = super()._compute_blocks_needed(0, past_length, query_length)
        return max(0, self.layout.num_exact_blocks + row_blocks - allocated_blocks)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Count the blocks that a fork shares: those of sink tokens and whole ones of rows."""
        shared: int = past_length // self.tokens_per_page if self.use_block_sharing else 0
        return shared + self.layout.num_sink_blocks if shared else 0

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Make the block table of a fork; return the blocks to copy, and the new blocks to copy them to."""
        layout = self.layout
        source = self.block_table[source_request_id]
        num_shared = self.count_shareable_blocks(source_request_id, past_length)
        shared_end = num_shared + layout.num_recent_blocks if num_shared else 0
        recent = range(layout.num_sink_blocks, layout.num_exact_blocks)
        copied = [number for number in range(len(source)) if number >= shared_end or number in recent]
        fresh = self.pool.get_free_blocks(self.index, len(copied))
        table = source.copy()
        for number, block in zip(copied, fresh, strict=True):
            table[number] = block
        for block, own in zip(source, table, strict=True):
            if block == own:
                self.ledger.acquire(block)
        self.block_table[dest_request_id] = table
        if source_request_id in self._sharing:
            # Without recent tokens yet
            self._sharing.add(dest_request_id)
        return [source[number] for number in copied], fresh

    def _sink_hashes(self, block: int) -> list[int]:
        """Return the hashes of the blocks of sink tokens, given the first block of rows; none if that has no hash."""
        parent = self.ledger.block_to_hash.get(block)
        if parent is None:
            return []
        return [compute_block_hash(parent, [-1 - number]) for number in range(self.layout.num_sink_blocks)]

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Register the hashes of a request's complete blocks of rows, and with the first those of its sink tokens."""
        table, ledger = self.block_table[request_id], self.ledger
        exact, rows = table[: self.layout.num_exact_blocks], table[self.layout.num_exact_blocks :]
        self.block_table[request_id] = rows
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        for number, content in enumerate(self._sink_hashes(rows[0])):
            own = exact[number]
            if own in ledger.block_to_hash:
                continue
            identical = ledger.register_new_hash(own, content)
            if identical is not None:
                ledger.acquire(identical)
                exact[number] = identical
                if ledger.release(own):
                    self.pool.free_blocks(self.index, [own])
        self.block_table[request_id] = exact + rows
        if self._page_store is not None:
            self._write_blocks(self._page_store, exact, rows, token_ids)

    def _write_blocks(self, page_store: PageStore, exact: list[int], rows: list[int], token_ids: list[int]) -> None:
        """Write the complete blocks of a request that are not on disk."""
        known = self.ledger.block_to_hash
        hashes = [known[block] for block in takewhile(lambda block: block in known, rows)]
        missing = [number for number, content in enumerate(hashes) if content not in self._stored_hashes]
        if missing:
            states = {number: self._read_states(number, rows[number], exact) for number in missing}
            page_store.write(token_ids[: len(hashes) * self.tokens_per_page], self.tokens_per_page, states)
            self._stored_hashes.update(hashes[number] for number in missing)

    def _read_states(self, number: int, block: int, exact: list[int]) -> list[LayerState | None]:
        """Return the states of all layers in a block of a request, whose blocks of `exact` tokens are given."""
        size = self.tokens_per_page
        num_sinks = self.layout.num_sink_tokens
        sink_blocks, sink_slots = self._locate_sinks(exact)
        padding = torch.zeros(1, dtype=torch.int64, device="cpu")
        states: list[LayerState | None] = [None] * (max(self._pages) + 1)
        for layer_idx, pages in self._pages.items():
            prefix = None
            if number == 0 and num_sinks:
                keys, values = pages.exact[sink_blocks, sink_slots].permute(1, 2, 0, 3)[:, None]
                prefix = ExactPrefix.of(keys, values, padding, padding + num_sinks)
            sides = {ROWS: pages.key_rows[block][None]}, {ROWS: pages.value_rows[block][None]}
            states[layer_idx] = LayerState(
                dtype=self.cache_dtype,
                batch_size=1,
                num_heads=self.num_key_value_heads,
                key_head_dim=self.head_dim,
                value_head_dim=self.head_dim,
                length=(number + 1) * size,
                held_start=0,
                is_open=False,
                counters={},
                padding=None,
                prefix=prefix,
                blocks=[SegmentState(number * size, size, *sides)],
                buffer=None,
            )
        return states

    def _locate_sinks(self, exact: list[int]) -> tuple[list[int], list[int]]:
        """Return block and slot of each sink token."""
        slots = range(self.layout.num_sink_tokens)
        per_block = self.layout.exact_per_block
        return [exact[slot // per_block] for slot in slots], [slot % per_block for slot in slots]

    def _load_blocks(self, page_store: PageStore, prompt_ids: list[int]) -> None:
        """Load the blocks of a prompt's prefix that are on disk alone, and cache them as of an ended request."""
        size = self.tokens_per_page
        ledger, layout = self.ledger, self.layout
        hashes: list[int] = []
        for start in range(0, len(prompt_ids) - size, size):
            hashes.append(compute_block_hash(hashes[-1] if hashes else None, prompt_ids[start : start + size]))
        num_known = len(list(takewhile(lambda content: content in ledger.hash_to_block, hashes)))
        free = self.pool.count_free_blocks(self.index) + self.pool.num_free_sectors * self.blocks_per_sector
        room = free - layout.num_recent_blocks - (0 if num_known else layout.num_sink_blocks)
        most = min(len(hashes) - num_known, room)
        blocks = page_store.read(prompt_ids, size, num_known, most) if most > 0 else []
        for number, block in enumerate(blocks, num_known):
            try:
                self._check_states(number, block.layers)
            except ValueError as error:
                warn_user(f"a page on disk is damaged, and its tokens are read again: {error}")
                break
            sinks = [] if number else [self._take_free_block() for _ in range(layout.num_sink_blocks)]
            own = self._take_free_block()
            try:
                self._write_states(own, sinks, block.layers)
            except BaseException:
                self.pool.free_blocks(self.index, [own, *sinks])
                raise
            ledger.register_new_hash(own, hashes[number])
            for each, content in zip(sinks, self._sink_hashes(own), strict=False):
                ledger.register_new_hash(each, content)
            ledger.cached_blocks.update(dict.fromkeys([own, *sinks]))
            self._stored_hashes.add(hashes[number])
            self.counters.tokens_loaded += size
        if blocks and self._memory.is_cuda:
            # Passes run on a stream of their own
            torch.cuda.synchronize(self._memory.device)

    def _take_free_block(self) -> int:
        if not self.pool.count_free_blocks(self.index):
            self.pool.allocate_sector(self.index)
        (block,) = self.pool.get_free_blocks(self.index, 1)
        return int(block)

    def _check_states(self, number: int, states: Sequence[State]) -> None:
        """Raise a `ValueError` unless states of a file, which may be forged, are those of a block of this number."""
        heads, size = (1, self.num_key_value_heads), self.tokens_per_page
        exact_shape = (*heads, self.layout.num_sink_tokens, self.head_dim)
        for layer_idx in self._pages:
            state = states[layer_idx] if layer_idx < len(states) else None
            if not isinstance(state, LayerState) or len(state.blocks) != 1:
                raise ValueError(f"layer {layer_idx} has no rows")
            row_sizes = self.codec_config.codecs[layer_idx].row_sizes
            for side, row_size in zip((state.blocks[0].keys, state.blocks[0].values), row_sizes, strict=True):
                check_layout(f"layers.{layer_idx}", side, {ROWS: Stored((*heads, size, row_size), torch.uint8)})
            prefix = state.prefix
            if number == 0 and exact_shape[2] and (prefix is None or prefix.keys.shape != exact_shape):
                raise ValueError(f"layer {layer_idx} has no sink tokens")

    def _write_states(self, block: int, sinks: list[int], states: Sequence[State]) -> None:
        """Write checked states into a block, and exact tokens of the first one into blocks of `sinks`."""
        for layer_idx, pages in self._pages.items():
            state = states[layer_idx]
            assert isinstance(state, LayerState), "it is checked"
            pages.key_rows[block] = state.blocks[0].keys[ROWS][0].to(self._memory.device)
            pages.value_rows[block] = state.blocks[0].values[ROWS][0].to(self._memory.device)
            if sinks and state.prefix is not None:
                exact = torch.cat((state.prefix.keys, state.prefix.values))  # [2, H, S, D]
                pages.exact[self._locate_sinks(sinks)] = exact.permute(2, 0, 1, 3).to(pages.exact)

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """
        Find the blocks of rows of a prompt's prefix, also on disk, if its sink tokens are known and recent ones have
        room.
        """
        if self._page_store is not None:
            self._load_blocks(self._page_store, prompt_ids)
        matched: list[int] = super().match_prefix_blocks(prompt_ids)
        num_missing = self.layout.num_recent_blocks - self.pool.count_free_blocks(self.index)
        if not matched or num_missing > self.pool.num_free_sectors * self.blocks_per_sector:
            return []
        has_sinks = all(content in self.ledger.hash_to_block for content in self._sink_hashes(matched[0]))
        return matched if has_sinks else []

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Make the block table of a request from the blocks of a prefix, and new blocks of recent tokens."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        sinks = [self.ledger.hash_to_block[content] for content in self._sink_hashes(block_ids[0])]
        for block in sinks:
            self.ledger.acquire(block)
        while self.pool.count_free_blocks(self.index) < self.layout.num_recent_blocks:
            self.pool.allocate_sector(self.index)
        recent = self.pool.get_free_blocks(self.index, self.layout.num_recent_blocks)
        self.block_table[request_id] = sinks + recent + self.block_table[request_id]
        self._sharing.add(request_id)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the physical indices of a request's rows."""
        skipped = self.layout.num_exact_blocks * self.tokens_per_page
        indices: list[int] = super().get_read_indices(request_id, past_length + skipped, query_length)
        return indices[skipped:]

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Return the physical indices of new tokens' rows, and remember the request's block table for the pass."""
        skipped = self.layout.num_exact_blocks * self.tokens_per_page
        indices: list[int] = super().get_write_indices(request_id, past_length + skipped, query_length)
        if not indices:
            # Transformers runs a request with one token left without it before it is forked
            return indices
        # A request without past has lost its prefix to an offload
        shares_prefix = request_id in self._sharing and past_length > 0
        self._sharing.discard(request_id)
        self._tables[indices[0]] = self.block_table[request_id].copy(), shares_prefix
        return indices

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error: Transformers calls this after `compressed_batching` has ended."""
        raise RuntimeError("`compressed_batching` has ended: a manager that was made in it has to be stopped in it")

    def begin_pass(self, starts: list[int], key_starts: list[int], write: torch.Tensor) -> None:
        """
        Batch the requests of a pass: those of one new token together, each other one alone.

        Args:
            starts, key_starts (`list[int]`): boundaries of the requests' new tokens, and of all of their tokens.
            write (`torch.Tensor` of shape `[tokens]`): physical indices of all new tokens.
        """
        indices = write.tolist()
        single: list[Request] = []
        batches: list[list[Request]] = [single]
        for number, first in enumerate(starts[:-1]):
            num_new = starts[number + 1] - first
            # Transformers pads the boundaries by empty requests
            if num_new == 0:
                continue
            length = key_starts[number + 1] - key_starts[number]
            table, shares_prefix = self._tables.pop(indices[first])
            if shares_prefix:
                self._decode_recent(table, length - num_new)
            num_blocks = self.layout.num_exact_blocks + ceil(length / self.tokens_per_page)
            request = Request(first, num_new, length - num_new, table[:num_blocks])
            if num_new == 1:
                single.append(request)
            else:
                batches.append([request])
        self.batches = [RequestBatch.locate(requests, self.layout, write.device) for requests in batches if requests]

    def _decode_recent(self, table: list[int], past: int) -> None:
        """Decode the recent tokens of a shared prefix from their rows, in all layers."""
        layout = self.layout
        positions = range(max(past - layout.num_recent_tokens, 0), past)
        if not positions:
            return
        slots = [
            layout.num_sink_blocks * layout.exact_per_block + each % layout.num_recent_tokens for each in positions
        ]
        exact_blocks = [table[slot // layout.exact_per_block] for slot in slots]
        exact_slots = [slot % layout.exact_per_block for slot in slots]
        row_blocks = [table[layout.num_exact_blocks + each // layout.rows_per_block] for each in positions]
        row_slots = [each % layout.rows_per_block for each in positions]
        for layer_idx, pages in self._pages.items():
            codec = self.codec_config.codecs[layer_idx]
            keys, values = (
                rows[row_blocks, :, row_slots].transpose(0, 1)[None].contiguous()
                for rows in (pages.key_rows, pages.value_rows)
            )
            decoded_keys = codec.decode_keys(keys, Positions(positions.start, None))
            states = torch.cat((decoded_keys, codec.decode_values(values)))  # [2, H, tokens, D]
            pages.exact[exact_blocks, exact_slots] = states.permute(2, 0, 1, 3).to(pages.exact.dtype)

    def read_exact(self, layer_idx: int, batch: RequestBatch) -> torch.Tensor:
        """Copy the exact tokens before the new ones, `[B, S + N, 2, H, D]`; the new ones may overwrite them."""
        states = self._pages[layer_idx].exact[batch.exact_slots]
        if batch.empty_slots_mask is None:
            return states
        # Memory without a token may hold NaN
        return states.masked_fill(batch.empty_slots_mask[..., None, None, None], 0)

    def write(self, layer_idx: int, batch: RequestBatch, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new tokens `[B, H, Q, D]` of a batch."""
        pages, most = self._pages[layer_idx], int(batch.past.max())
        padding = None if len(batch.past) == 1 else most - batch.past
        coded = self._codec(layer_idx, len(keys)).encode(keys, values, Positions(most, padding))
        for stored, rows in zip((pages.key_rows, pages.value_rows), coded, strict=True):
            stored.transpose(1, 2)[batch.new_rows] = rows.transpose(1, 2).flatten(0, 1)
        tokens, blocks, slots = batch.new_exact
        exact = torch.stack((keys, values), dim=1).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [B * Q, 2, H, D]
        pages.exact[blocks, slots] = exact[tokens]
        self.counters.tokens_coded += batch.tokens.numel()

    def row_part(self, layer_idx: int, batch: RequestBatch) -> PagedRowPart | None:
        """Return the rows that a batch's new tokens attend to; `None` if all tokens before them are exact."""
        length = int(batch.num_rows.max())
        if not length:
            return None
        pages = self._pages[layer_idx]
        return PagedRowPart(
            pages.key_rows,
            pages.value_rows,
            self._memory,
            batch.blocks,
            batch.num_rows,
            length,
            self.layout.num_sink_tokens,
            self._codec(layer_idx, len(batch.past)).formats(self._memory.device),
        )

    def parts(
        self, layer_idx: int, batch: RequestBatch, exact: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[Part]:
        """Yield all parts that new tokens `[B, H, Q, D]` attend to; `exact` is from `read_exact` before `write`."""
        rows = self.row_part(layer_idx, batch)
        if rows is not None:
            yield rows
        exact_keys, exact_values = exact.permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((exact_keys, keys), dim=2), torch.cat((exact_values, values), dim=2)
        yield DensePart(keys, values, keys.shape[2], batch.mask)

    def _codec(self, layer_idx: int, batch_size: int) -> RowCodec:
        """Return a layer's codec for a batch: without a basis it has a table for each sequence, here copies."""
        codec = self.codec_config.codecs[layer_idx]
        tables = codec.formats(self._memory.device)
        if tables[0].basis is not None or batch_size == 1:
            return codec
        known = self._repeated_codecs.get(layer_idx)
        if known is None or known[0] != batch_size:
            keys, values = (table.map(lambda own: own.repeat(batch_size, *[1] * (own.dim() - 1))) for table in tables)
            known = batch_size, RowCodec((keys, values))
            self._repeated_codecs[layer_idx] = known
        return known[1]


def _fit_page(num_bytes: int, num_pages: int, sliding_bytes: int) -> int:
    """
    Return the bytes of a page, so that a block of `num_pages` holds `num_bytes`.

    Transformers allocates memory in sectors, whose size is the least common multiple of that of a block and that of a
    block of sliding windows, `sliding_bytes` (0 for none). To keep it small, a block divides the latter or is a
    multiple of it.
    """
    unit = num_pages * _ALIGNMENT
    block = -(-num_bytes // unit) * unit
    if sliding_bytes:
        counts = range(sliding_bytes // block, 0, -1)
        divisors = (sliding_bytes // count for count in counts if sliding_bytes % (count * unit) == 0)
        factors = range(-(-block // sliding_bytes), unit + 1)
        multiples = (sliding_bytes * factor for factor in factors if sliding_bytes * factor % unit == 0)
        block = next(divisors, None) or next(multiples, block)
    return block // num_pages


def _common_head_dim(codec_config: PageCodecConfig, options: AllocatorOptions) -> int:
    """Return the head dim of all layers; raise a `ValueError` if pages cannot hold them."""
    missing = [layer_idx for layer_idx in options["layer_indices"] if layer_idx not in codec_config.codecs]
    if missing:
        raise ValueError(f"the cache has no tables of layers {missing}, which attend to all tokens")
    if options["page_size"] % _TILE:
        raise ValueError(f"`page_size` has to be a multiple of {_TILE} but got {options['page_size']}")
    num_heads = options["num_key_value_heads"]
    head_dim = codec_config.codecs[options["layer_indices"][0]].head_shapes[0][1]
    for layer_idx in options["layer_indices"]:
        shapes = codec_config.codecs[layer_idx].head_shapes
        if shapes != [(num_heads, head_dim)] * 2:
            raise ValueError(
                f"layer {layer_idx}: tables of keys and values of {shapes} heads and channels do not fit pages of "
                f"{(num_heads, head_dim)}; all have to be of one size"
            )
    return head_dim


def _sliding_block_bytes(options: AllocatorOptions) -> int:
    """Return the bytes of a block of the model's layers with sliding windows; 0 if it has none."""
    layer_types = getattr(options["config"], "layer_types", None) or ()
    windows = [layer_idx for layer_idx, kind in enumerate(layer_types) if kind == _SLIDING]
    if not windows:
        return 0
    own: AllocatorOptions = {**options, "index": 0, "layer_indices": windows, "allow_block_sharing": False}
    num_bytes: int = SlidingAttentionCacheAllocator(**own).bytes_per_block
    return num_bytes
