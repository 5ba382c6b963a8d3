"""Pages of coded rows for the paged cache of Transformers' continuous batching.

Transformers' `PagedAttentionCache` gives every kind of layer an allocator, which divides flat memory into blocks of
pages; blocks are copied for forks, shared by prefixes and moved to host memory as they are. `CodedAllocator` keeps
everything of that but what is in a block, layer by layer:

    [ key rows [H, P, R] | value rows [H, P, R] | exact first tokens [S, 2, H, D] | exact newest tokens [N, 2, H, D] ]

The first tokens are those of a request, in its first block; the newest are those of the page, at their position modulo
N. So a block has all that its tokens need, whoever refers to it.

Legend: B requests, H key/value heads, P tokens of a page, R bytes of a row, S first tokens, N newest tokens, D head
dim, Q new tokens of a request.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import DensePart, PagedPart, Part
from kvcache_plugins.codecs.rows import RowCodec


try:
    from transformers.generation.continuous_batching import cache as paged_cache
    from transformers.generation.continuous_batching.cache_allocators import (
        FullAttentionCacheAllocator,
        SlidingAttentionCacheAllocator,
    )
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
    Requests of a pass with equally many new tokens, Q each, and where in their pages everything stands.

    Attributes:
        tokens (`torch.Tensor` of shape `[B, Q]`): new tokens among all of the pass.
        past (`torch.Tensor` of shape `[B]`): tokens before them.
        blocks (`torch.Tensor` of shape `[B, most]`): blocks of all tokens.
        coded (`torch.Tensor` of shape `[B]`): tokens whose rows are attended to, the first ones among them.
        mask (`torch.Tensor` of shape `[B, 1, Q, S + N + Q]`): added to scores of exact tokens.
        held (two `torch.Tensor` of shape `[B, N]`): block and slot of the exact newest tokens before the new ones.
        missing (`torch.Tensor` of shape `[B, S + N]`, *optional*): exact tokens that there are not; `None` for none.
        rows (two `torch.Tensor` of shape `[B * Q]`): block and slot of the new tokens' rows.
        recent, sinks (three `torch.Tensor` each): of the new tokens that stay as they are, where: token, block, slot.
    """

    tokens: torch.Tensor
    past: torch.Tensor
    blocks: torch.Tensor
    coded: torch.Tensor
    mask: torch.Tensor
    held: tuple[torch.Tensor, torch.Tensor]
    missing: torch.Tensor | None
    rows: tuple[torch.Tensor, torch.Tensor]
    recent: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sinks: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(
        cls, tokens: torch.Tensor, past: torch.Tensor, blocks: torch.Tensor, size: int, recipe: Recipe
    ) -> "Requests":
        """Works out where everything stands in pages of `size` tokens."""
        num_sinks, num_recent, device = recipe.num_sink_tokens, recipe.num_recent_tokens, past.device
        batch_size, num_new = tokens.shape
        positions = past[:, None] + torch.arange(num_new, device=device)
        pages = blocks.gather(1, positions // size)
        newest = past[:, None] + torch.arange(-num_recent, 0, device=device)
        exists = torch.cat(((torch.arange(num_sinks, device=device) < past[:, None]), newest >= num_sinks), dim=1)
        coded = past - exists[:, num_sinks:].sum(dim=1)
        mask = torch.zeros(batch_size, 1, num_new, num_sinks + num_recent + num_new, device=device)
        mask[..., : num_sinks + num_recent].masked_fill_(~exists[:, None, None], -torch.inf)
        future = torch.ones(num_new, num_new, dtype=torch.bool, device=device).triu(1)
        mask[..., num_sinks + num_recent :].masked_fill_(future, -torch.inf)
        newest = newest.clamp(min=0)

        def places(kept: torch.Tensor, modulus: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            found = kept.flatten().nonzero()[:, 0]
            return found, pages.flatten()[found], positions.flatten()[found] % max(modulus, 1)

        # Of every page its newest tokens, as others may go on from there
        ends = torch.minimum((positions // size + 1) * size, positions[:, -1:] + 1)
        return cls(
            tokens,
            past,
            blocks,
            torch.where(coded > num_sinks, coded, 0),
            mask,
            (blocks.gather(1, newest // size), newest % max(num_recent, 1)),
            None if bool(exists.all()) else ~exists,
            (pages.flatten(), (positions % size).flatten()),
            places(positions >= ends - num_recent, num_recent),
            places(positions < num_sinks, size),
        )


class Page(NamedTuple):
    """Holds what all blocks have of one layer; the first dimension of every tensor is the block."""

    key_rows: torch.Tensor
    value_rows: torch.Tensor
    sinks: torch.Tensor
    recent: torch.Tensor


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
        self._places: dict[int, tuple[int, ...]] = {}
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
            sizes = [heads * page_size * size for size in codec.row_sizes]
            sizes += [recipe.num_sink_tokens * token, recipe.num_recent_tokens * token]
            places = []
            for size in sizes:
                places.append(end)
                end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
            self._places[layer_idx] = tuple(places)
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
            bytes_per_page=_fit_page(end, len(layer_indices), others),
            allow_block_sharing=allow_block_sharing,
        )

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

        def exact(place: int, count: int) -> torch.Tensor:
            size, itemsize = heads * self.head_dim, self.cache_dtype.itemsize
            strides = self.bytes_per_block // itemsize, 2 * size, size, self.head_dim, 1
            return states.as_strided((blocks, count, 2, heads, self.head_dim), strides, place // itemsize)

        self._pages: dict[int, Page] = {}
        for layer_idx, (keys, values, sinks, recent) in self._places.items():
            key_size, value_size = recipe.codecs[layer_idx].row_sizes
            self._pages[layer_idx] = Page(
                rows(keys, key_size),
                rows(values, value_size),
                exact(sinks, recipe.num_sink_tokens),
                exact(recent, recipe.num_recent_tokens),
            )

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses what Transformers calls where `compressed_batching` has ended."""
        raise RuntimeError("`compressed_batching` has ended: a manager that was made in it has to be stopped in it")

    def requests(
        self, starts: list[int], key_starts: list[int], read: torch.Tensor, write: torch.Tensor
    ) -> list[Requests]:
        """
        Lists the requests of a pass: those of one new token together, the others each alone. `read` and `write` are
        physical indices of all tokens (none where no request has a past) and of new ones.
        """
        blocks, device, size = (read if read.numel() else write) // self.block_physical_stride, write.device, 0
        groups: dict[int, list[tuple[int, int, int, torch.Tensor]]] = {}
        for first, stop, key_first, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            if stop > first:
                own = blocks[key_first if read.numel() else first :][: key_stop - key_first : self.tokens_per_page]
                request = first, stop - first, key_stop - key_first - (stop - first), own
                groups.setdefault(-1 if stop - first == 1 else first, []).append(request)
        found = []
        for members in groups.values():
            firsts, counts, pasts, own_blocks = zip(*members, strict=True)
            size = max(len(own) for own in own_blocks)
            table = torch.stack([F.pad(own, (0, size - len(own))) for own in own_blocks])
            tokens = torch.tensor(firsts, device=device)[:, None] + torch.arange(counts[0], device=device)
            past = torch.tensor(pasts, device=device)
            found.append(Requests.of(tokens, past, table, self.tokens_per_page, self.recipe))
        return found

    def exact(self, layer_idx: int, requests: Requests) -> torch.Tensor:
        """Copies the exact tokens before the new ones, `[B, S + N, 2, H, D]`, which these may take the place of."""
        page = self._pages[layer_idx]
        states = torch.cat((page.sinks[requests.blocks[:, 0]], page.recent[requests.held]), dim=1)
        # Memory that no token has been written to may hold anything
        return states if requests.missing is None else states.masked_fill(requests.missing[..., None, None, None], 0)

    def write(self, layer_idx: int, requests: Requests, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the new tokens `[B, H, Q, D]` of requests."""
        page, most = self._pages[layer_idx], int(requests.past.max())
        padding = None if len(requests.past) == 1 else most - requests.past
        coded = self._codec(layer_idx, len(keys)).encode(keys, values, Positions(most, padding))
        for stored, rows in zip((page.key_rows, page.value_rows), coded, strict=True):
            stored.transpose(1, 2)[requests.rows] = rows.transpose(1, 2).flatten(0, 1)
        states = torch.stack((keys, values), dim=1).permute(0, 3, 1, 2, 4).flatten(0, 1)
        for kept, (tokens, blocks, slots) in ((page.recent, requests.recent), (page.sinks, requests.sinks)):
            if len(tokens):
                kept[blocks, slots] = states[tokens]

    def parts(
        self, layer_idx: int, requests: Requests, exact: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[Part]:
        """Yields what new tokens `[B, H, Q, D]` attend to; `exact` was returned before they were written."""
        page, length = self._pages[layer_idx], int(requests.coded.max())
        if length:
            yield PagedPart(
                page.key_rows,
                page.value_rows,
                self._memory,
                requests.blocks,
                requests.coded,
                length,
                self.recipe.num_sink_tokens,
                self._codec(layer_idx, len(keys)),
            )
        held = exact.permute(2, 0, 3, 1, 4)
        keys, values = torch.cat((held[0], keys), dim=2), torch.cat((held[1], values), dim=2)
        yield DensePart(keys, values, keys.shape[2], requests.mask)

    def _codec(self, layer_idx: int, batch_size: int) -> RowCodec:
        """Finds a layer's codec for so many sequences: tables without bases have each its own, here the same."""
        codec = self.recipe.codecs[layer_idx]
        tables = codec.tables(self._memory.device)
        if tables[0].basis is not None or batch_size == 1:
            return codec
        known = self._codecs.get(layer_idx)
        if known is None or known[0] != batch_size:
            keys, values = (table.map(lambda own: own.repeat(batch_size, *[1] * (own.dim() - 1))) for table in tables)
            known = self._codecs[layer_idx] = batch_size, RowCodec((keys, values))
        return known[1]
