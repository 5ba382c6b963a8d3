"""Blocks of coded rows for the paged cache of Transformers' continuous batching.

Transformers' `PagedAttentionCache` gives every kind of layer an allocator, which divides flat memory into blocks of
pages; blocks are copied for forks, shared by prefixes and moved to host memory as they are. `CodedAllocator` keeps
everything of that but what is in blocks. The table of a request is

    [ blocks of exact first tokens | blocks of exact newest tokens | blocks of rows, of P tokens each ]

and a block has, layer by layer, either rows or as many exact tokens X as there is room for:

    [ key rows [H, P, R] | value rows [H, P, R] ]        [ keys and values [X, 2, H, D] ]

First tokens are known by the first block of rows, and shared as that is. The newest are the request's own, at their
position modulo N; a request that has found a prefix begins with those that the rows of its last block say.

Legend: B requests, H key/value heads, P tokens of a page, R bytes of a row, S first tokens, N newest tokens, D head
dim, Q new tokens of a request.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any, NamedTuple

import torch

from kvcache_plugins.codecs.rows import RowCodec
from kvcache_plugins.formats.parts import DensePart, PagedRowPart, Part
from kvcache_plugins.formats.positions import Positions


try:
    from transformers.generation.continuous_batching import cache as paged_cache
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator,
        SlidingAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import compute_block_hash
    from transformers.generation.continuous_batching.continuous_api import ContinuousMixin
    from transformers.generation.continuous_batching.utils import find_head_dim
except ImportError as error:
    raise ImportError("`compressed_batching` needs the paged cache of Transformers 5.23 or newer") from error


__all__ = [
    "FULL",
    "CodedAllocator",
    "ContinuousMixin",
    "FullAttentionCacheAllocator",
    "Recipe",
    "Requests",
    "find_head_dim",
    "paged_cache",
]

FULL, WINDOWS = "full_attention", "sliding_attention"
# Addresses in a page are multiples of so many bytes
_ALIGNMENT = 16
# Tokens that pages are multiples of: those of a tile of compiled kernels
_TILE = 64


class Recipe(NamedTuple):
    """
    Says how a model's pages are coded: codecs by layer of full attention, exact first and newest tokens of a request.
    """

    codecs: Mapping[int, RowCodec]
    num_sink_tokens: int
    num_recent_tokens: int


class Requests(NamedTuple):
    """
    Requests of a pass with equally many new tokens, Q each, and where in their blocks everything stands.

    Attributes:
        tokens (`torch.Tensor` of shape `[B, Q]`): new tokens among all of the pass.
        past (`torch.Tensor` of shape `[B]`): tokens before them.
        blocks (`torch.Tensor` of shape `[B, most]`): blocks of all tokens' rows.
        coded (`torch.Tensor` of shape `[B]`): tokens whose rows are attended to, the first ones among them.
        mask (`torch.Tensor` of shape `[B, 1, Q, S + N + Q]`): added to scores of exact tokens.
        held (two `torch.Tensor` of shape `[B, S + N]`): block and slot of the exact tokens before the new ones.
        missing (`torch.Tensor` of shape `[B, S + N]`, *optional*): exact tokens that there are not; `None` for none.
        rows (two `torch.Tensor` of shape `[B * Q]`): block and slot of the new tokens' rows.
        kept (three `torch.Tensor`): of the new tokens that stay as they are, where: token, block, slot.
    """

    tokens: torch.Tensor
    past: torch.Tensor
    blocks: torch.Tensor
    coded: torch.Tensor
    mask: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor]
    missing: torch.Tensor | None
    rows: tuple[torch.Tensor, torch.Tensor]
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(
        cls, tokens: torch.Tensor, past: torch.Tensor, table: torch.Tensor, allocator: "CodedAllocator"
    ) -> "Requests":
        """Works out where everything stands, given the tables `[B, most]` of an allocator's requests."""
        _, num_sinks, num_recent = allocator.recipe
        size, device = allocator.tokens_per_page, past.device
        (batch_size, num_new), blocks = tokens.shape, table[:, allocator.num_lead :].contiguous()
        positions = past[:, None] + torch.arange(num_new, dtype=torch.int64, device=device)
        first = torch.arange(num_sinks, dtype=torch.int64, device=device).expand(batch_size, -1)
        newest = past[:, None] + torch.arange(-num_recent, 0, dtype=torch.int64, device=device)
        exists = torch.cat((first < past[:, None], newest >= num_sinks), dim=1)
        coded = past - exists[:, num_sinks:].sum(dim=1)
        num_columns = num_sinks + num_recent + num_new
        mask = torch.zeros(batch_size, 1, num_new, num_columns, dtype=torch.float32, device=device)
        mask[..., : num_sinks + num_recent].masked_fill_(~exists[:, None, None], -torch.inf)
        future = torch.ones(num_new, num_new, dtype=torch.bool, device=device).triu(1)
        mask[..., num_sinks + num_recent :].masked_fill_(future, -torch.inf)

        def newest_slots(positions: torch.Tensor) -> torch.Tensor:
            return allocator.num_first * allocator.num_exact + positions % max(num_recent, 1)

        def places(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return table.gather(1, slots // allocator.num_exact), slots % allocator.num_exact

        kept = []
        for slots, is_kept in (
            (positions, positions < num_sinks),
            (newest_slots(positions), positions > positions[:, -1:] - num_recent),
        ):
            found = is_kept.flatten().nonzero()[:, 0]
            block, slot = places(slots.where(is_kept, 0))
            kept.append((found, block.flatten()[found], slot.flatten()[found]))
        return cls(
            tokens,
            past,
            blocks,
            torch.where(coded > num_sinks, coded, 0),
            mask,
            places(torch.cat((first, newest_slots(newest.clamp(min=0))), dim=1)),
            None if bool(exists.all()) else ~exists,
            (blocks.gather(1, positions // size).flatten(), (positions % size).flatten()),
            tuple(torch.cat(each) for each in zip(*kept, strict=True)),  # type: ignore[arg-type]
        )


class Page(NamedTuple):
    """Holds what all blocks have of one layer, as rows and as exact tokens; the first dimension is the block."""

    key_rows: torch.Tensor
    value_rows: torch.Tensor
    exact: torch.Tensor


def _fit_page(size: int, num_pages: int, others: int) -> int:
    """
    Rounds bytes of the pages of a block up to one page's, so that the least common multiple of blocks and of the
    `others` bytes of a block of windows (0 for none), in which memory is given out, stays small.
    """
    unit = num_pages * _ALIGNMENT
    block = -(-size // unit) * unit
    if others:
        # As many of ours as can be in one of theirs, or one of ours as large as several of theirs
        counts = range(others // block, 0, -1)
        parts = (others // count for count in counts if others % (count * unit) == 0)
        multiples = (others * count for count in range(-(-block // others), unit + 1) if others * count % unit == 0)
        block = next(parts, None) or next(multiples, block)
    return block // num_pages


class CodedAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """
    Allocates pages of rows that a recipe codes, see the module; a `ValueError` for layers that are not the recipe's.
    """

    supports_block_table = False
    # The context that it was made in
    batching: Any

    def __init__(
        self,
        recipe: Recipe,
        *,
        index: int,
        config: Any,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        missing = [layer_idx for layer_idx in layer_indices if layer_idx not in recipe.codecs]
        if missing:
            raise ValueError(f"the cache has no tables of layers {missing}, which attend to all tokens")
        if page_size % _TILE:
            raise ValueError(f"`page_size` has to be a multiple of {_TILE} but got {page_size}")
        self.recipe, self.cache_dtype, self.num_key_value_heads = recipe, cache_dtype, num_key_value_heads
        self._places: dict[int, tuple[int, int]] = {}
        end = 0
        for layer_idx in layer_indices:
            codec = recipe.codecs[layer_idx]
            (heads, key_dim), (_, value_dim) = codec.head_shapes
            if heads != num_key_value_heads or key_dim != value_dim:
                raise ValueError(
                    f"layer {layer_idx}: tables of {heads} heads of {key_dim} and {value_dim} channels do not fit "
                    f"pages of {num_key_value_heads} heads; keys and values have to be of one size"
                )
            self.head_dim = key_dim
            token = 2 * heads * key_dim * cache_dtype.itemsize
            key_size, value_size = (heads * page_size * size for size in codec.row_sizes)
            self._places[layer_idx] = end, end + key_size
            end += key_size + value_size
        options = {"config": config, "num_key_value_heads": num_key_value_heads, "cache_dtype": cache_dtype}
        windows = [i for i, kind in enumerate(getattr(config, "layer_types", None) or ()) if kind == WINDOWS]
        others = 0
        if windows:
            options |= {"page_size": page_size, "layer_indices": windows, "allow_block_sharing": False}
            others = SlidingAttentionCacheAllocator(index=0, **options).bytes_per_block
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=_fit_page(max(end, len(layer_indices) * token), len(layer_indices), others),
            allow_block_sharing=allow_block_sharing,
        )
        # Exact tokens of a block; blocks of first ones, and of all exact ones
        self.num_exact = self.bytes_per_page // token
        self.num_first = ceil(recipe.num_sink_tokens / self.num_exact)
        self.num_lead = self.num_first + ceil(recipe.num_recent_tokens / self.num_exact)
        # Of requests of the next passes, by where their first new token is written: their blocks, and whether the
        # newest tokens are to be made of rows
        self._tables: dict[int, tuple[list[int], bool]] = {}
        # Requests that have found a prefix, until their first pass, offloaded before it or not
        self._found: set[str] = set()

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Takes the memory that blocks stand in: see `FullAttentionCacheAllocator.register_cache_tensor`."""
        self.bytes_per_sector, self._memory = bytes_per_sector, cache_tensor
        # Of the batch size that was met last
        self._codecs: dict[int, tuple[int, RowCodec]] = {}
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
        blocks, heads, recipe = len(self._copy_view), self.num_key_value_heads, self.recipe
        states = cache_tensor.view(self.cache_dtype)

        def rows(place: int, size: int) -> torch.Tensor:
            strides = self.bytes_per_block, self.tokens_per_page * size, size, 1
            return cache_tensor.as_strided((blocks, heads, self.tokens_per_page, size), strides, place)

        size, itemsize, count = heads * self.head_dim, self.cache_dtype.itemsize, self.num_exact
        strides = self.bytes_per_block // itemsize, 2 * size, size, self.head_dim, 1
        self._pages: dict[int, Page] = {}
        for number, (layer_idx, places) in enumerate(self._places.items()):
            keys, values = map(rows, places, recipe.codecs[layer_idx].row_sizes)
            exact = states.as_strided((blocks, count, 2, heads, self.head_dim), strides, number * count * 2 * size)
            self._pages[layer_idx] = Page(keys, values, exact)

    def _compute_blocks_needed(self, allocated_blocks: int, past_length: int, query_length: int) -> int:
        needed: int = super()._compute_blocks_needed(0, past_length, query_length) + self.num_lead
        return max(0, needed - allocated_blocks)

    def count_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """Counts the blocks that a fork shares: all but those of newest tokens and the last of rows."""
        shared: int = past_length // self.tokens_per_page if self.use_block_sharing else 0
        return shared + self.num_first if shared else 0

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Makes the table of a fork, and returns the blocks to be copied and where to."""
        source = self.block_table[source_request_id]
        shared = self.count_shareable_blocks(source_request_id, past_length)
        end = shared + self.num_lead - self.num_first if shared else 0
        copied = [i for i in range(len(source)) if i >= end or self.num_first <= i < self.num_lead]
        fresh = self.pool.get_free_blocks(self.index, len(copied))
        table = source.copy()
        for number, block in zip(copied, fresh, strict=True):
            table[number] = block
        for block, own in zip(source, table, strict=True):
            if block == own:
                self.ledger.acquire(block)
        self.block_table[dest_request_id] = table
        return [source[number] for number in copied], fresh

    def _first_hashes(self, block: int) -> list[int]:
        """Hashes by which first tokens are known, of the first block of rows; none if that is not known."""
        parent = self.ledger.block_to_hash.get(block)
        return [] if parent is None else [compute_block_hash(parent, [-1 - i]) for i in range(self.num_first)]

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Makes complete blocks of a request known, its first tokens with the first of them."""
        table, ledger = self.block_table[request_id], self.ledger
        lead, rows = table[: self.num_lead], table[self.num_lead :]
        self.block_table[request_id] = rows
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        for number, content in enumerate(self._first_hashes(rows[0])):
            own = lead[number]
            known = None if own in ledger.block_to_hash else ledger.register_new_hash(own, content)
            if known is not None:
                ledger.acquire(known)
                lead[number] = known
                if ledger.release(own):
                    self.pool.free_blocks(self.index, [own])
        self.block_table[request_id] = lead + rows

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """Finds blocks of rows that a prompt begins with, if there is room for newest tokens."""
        matched: list[int] = super().match_prefix_blocks(prompt_ids)
        missing = self.num_lead - self.num_first - self.pool.count_free_blocks(self.index)
        has_room = missing <= self.pool.num_free_sectors * self.blocks_per_sector
        known = self.ledger.hash_to_block
        return matched if matched and has_room and all(i in known for i in self._first_hashes(matched[0])) else []

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Makes the table of a request out of the blocks of a prefix."""
        super().acquire_prefix_blocks(request_id, prefix_len, block_ids)
        first = [self.ledger.hash_to_block[content] for content in self._first_hashes(block_ids[0])]
        for block in first:
            self.ledger.acquire(block)
        while self.pool.count_free_blocks(self.index) < self.num_lead - self.num_first:
            self.pool.allocate_sector(self.index)
        newest = self.pool.get_free_blocks(self.index, self.num_lead - self.num_first)
        self.block_table[request_id] = first + newest + self.block_table[request_id]
        self._found.add(request_id)

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Lists where rows stand, as Transformers counts it."""
        lead = self.num_lead * self.tokens_per_page
        return super().get_read_indices(request_id, past_length + lead, query_length)[lead:]  # type: ignore[no-any-return]

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Lists where new tokens' rows are to stand, and notes the blocks of their request."""
        lead = self.num_lead * self.tokens_per_page
        places: list[int] = super().get_write_indices(request_id, past_length + lead, query_length)
        self._tables[places[0]] = self.block_table[request_id].copy(), request_id in self._found and past_length > 0
        self._found.discard(request_id)
        return places

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses what Transformers calls where `compressed_batching` has ended."""
        raise RuntimeError("`compressed_batching` has ended: a manager that was made in it has to be stopped in it")

    def requests(self, starts: list[int], key_starts: list[int], write: torch.Tensor) -> list[Requests]:
        """
        Lists the requests of a pass, given physical indices of all new tokens: those of one new token together, the
        others each alone.
        """
        device, places, size = write.device, write.tolist(), self.tokens_per_page
        groups: dict[int, list[tuple[int, int, int, list[int]]]] = {}
        for first, stop, key_first, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            if stop > first:
                table, is_found = self._tables.pop(places[first])
                past = key_stop - key_first - (stop - first)
                if is_found and self.recipe.num_recent_tokens:
                    self._make_newest(table, past)
                own = table[: self.num_lead + ceil((key_stop - key_first) / size)]
                groups.setdefault(-1 if stop - first == 1 else first, []).append((first, stop - first, past, own))
        found = []
        for members in groups.values():
            firsts, counts, pasts, tables = zip(*members, strict=True)
            most = max(map(len, tables))
            rows = ([own + [0] * (most - len(own)) for own in tables], firsts, pasts)
            padded, first_tokens, past_lengths = (
                torch.tensor(each, dtype=torch.int64, device=device) for each in rows
            )
            tokens = first_tokens[:, None] + torch.arange(counts[0], dtype=torch.int64, device=device)
            found.append(Requests.of(tokens, past_lengths, padded, self))
        return found

    def _make_newest(self, table: list[int], past: int) -> None:
        """Makes the newest tokens of a prefix that was found out of their rows, in all layers."""
        size, count, num_recent = self.tokens_per_page, self.num_exact, self.recipe.num_recent_tokens
        positions = range(max(past - num_recent, 0), past)
        places = [self.num_first * count + position % num_recent for position in positions]
        exact = [table[place // count] for place in places], [place % count for place in places]
        blocks, slots = [table[self.num_lead + i // size] for i in positions], [i % size for i in positions]
        for layer_idx, page in self._pages.items():
            codec = self.recipe.codecs[layer_idx]
            keys, values = (side[blocks, :, slots].transpose(0, 1)[None].contiguous() for side in page[:2])
            states = codec.decode_keys(keys, Positions(positions.start, None)), codec.decode_values(values)
            page.exact[exact] = torch.cat(states).permute(2, 0, 1, 3).to(page.exact.dtype)

    def exact(self, layer_idx: int, requests: Requests) -> torch.Tensor:
        """Copies the exact tokens before the new ones, `[B, S + N, 2, H, D]`, which these may take the place of."""
        states = self._pages[layer_idx].exact[requests.held]
        # Memory that no token has been written to may hold anything
        return states if requests.missing is None else states.masked_fill(requests.missing[..., None, None, None], 0)

    def write(self, layer_idx: int, requests: Requests, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the new tokens `[B, H, Q, D]` of requests."""
        page, most = self._pages[layer_idx], int(requests.past.max())
        padding = None if len(requests.past) == 1 else most - requests.past
        coded = self._codec(layer_idx, len(keys)).encode(keys, values, Positions(most, padding))
        for stored, rows in zip((page.key_rows, page.value_rows), coded, strict=True):
            stored.transpose(1, 2)[requests.rows] = rows.transpose(1, 2).flatten(0, 1)
        tokens, blocks, slots = requests.kept
        page.exact[blocks, slots] = torch.stack((keys, values), dim=1).permute(0, 3, 1, 2, 4).flatten(0, 1)[tokens]

    def parts(
        self, layer_idx: int, requests: Requests, exact: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[Part]:
        """Yields what new tokens `[B, H, Q, D]` attend to; `exact` was returned before they were written."""
        page, length = self._pages[layer_idx], int(requests.coded.max())
        if length:
            yield PagedRowPart(
                page.key_rows,
                page.value_rows,
                self._memory,
                requests.blocks,
                requests.coded,
                length,
                self.recipe.num_sink_tokens,
                self._codec(layer_idx, len(keys)).formats(self._memory.device),
            )
        held = exact.permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((held[0], keys), dim=2), torch.cat((held[1], values), dim=2)
        yield DensePart(keys, values, keys.shape[2], requests.mask)

    def _codec(self, layer_idx: int, batch_size: int) -> RowCodec:
        """Finds a layer's codec for so many sequences: tables without bases have each its own, here the same."""
        codec = self.recipe.codecs[layer_idx]
        tables = codec.formats(self._memory.device)
        if tables[0].basis is not None or batch_size == 1:
            return codec
        known = self._codecs.get(layer_idx)
        if known is None or known[0] != batch_size:
            keys, values = (table.map(lambda own: own.repeat(batch_size, *[1] * (own.dim() - 1))) for table in tables)
            known = self._codecs[layer_idx] = batch_size, RowCodec((keys, values))
        return known[1]
