"""Pages of coded rows for the paged cache of Transformers' continuous batching.

Transformers' `PagedAttentionCache` gives every kind of layer an allocator, which divides flat memory into blocks of
pages; blocks are copied for forks, shared by prefixes and moved to host memory as they are. `CodedAllocator` keeps
everything of that but what is in a block, layer by layer:

    [ key rows [H, P, R] | value rows [H, P, R] | exact first tokens [S, 2, H, D] | exact newest tokens [N, 2, H, D] ]

The first tokens are those of a request, in its first block; the newest are those of the page, at their position modulo
N. So a block has all that its tokens need, whoever refers to it.

Legend: H key/value heads, P tokens of a page, R bytes of a row, S first tokens, N newest tokens, D head dim, Q tokens
of a pass.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, DensePart, Part
from kvcache_plugins.codecs.rows import RowCodec


try:
    from transformers.generation.continuous_batching import cache as paged_cache
    from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
except ImportError as error:
    raise ImportError("`compressed_batching` needs the paged cache of Transformers 5.23 or newer") from error


__all__ = ["FULL", "CodedAllocator", "FullAttentionCacheAllocator", "Recipe", "Request", "paged_cache"]

FULL = "full_attention"
# Addresses in a page are multiples of so many bytes
_ALIGNMENT = 16
# Tokens that pages are multiples of: those of a tile of compiled kernels
_TILE = 64


class Recipe(NamedTuple):
    """
    How a model's pages are coded.

    Attributes:
        codecs (`Mapping[int, RowCodec]`): of every layer of full attention; its tables are the model's.
        num_sink_tokens, num_recent_tokens (`int`): exact first tokens of a request, and exact newest ones.
    """

    codecs: Mapping[int, RowCodec]
    num_sink_tokens: int
    num_recent_tokens: int


class Request(NamedTuple):
    """
    A request's share of a pass.

    Attributes:
        tokens (`slice`): its new tokens among all of the pass.
        past (`int`): tokens before them.
        blocks (`list[int]`): blocks of all its tokens.
    """

    tokens: slice
    past: int
    blocks: list[int]

    @property
    def num_new(self) -> int:
        """New tokens."""
        return int(self.tokens.stop - self.tokens.start)


class Page(NamedTuple):
    """What all blocks hold of one layer; the first dimension of every tensor is the block."""

    key_rows: torch.Tensor
    value_rows: torch.Tensor
    sinks: torch.Tensor
    recent: torch.Tensor


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class CodedAllocator(FullAttentionCacheAllocator):  # type: ignore[misc]
    """
    Allocates pages of coded rows; see the module.

    Args:
        recipe (`Recipe`): how they are coded.
        index, config, num_key_value_heads, cache_dtype, page_size, layer_indices, allow_block_sharing: as Transformers
            gives them.

    Raises:
        ValueError: if the recipe is not of these layers or heads, or `page_size` no multiple of a tile.
    """

    supports_block_table = False

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
                end = _aligned(end + size)
            self._places[layer_idx] = tuple(places)
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=page_size,
            bytes_per_page=_aligned(-(-end // len(layer_indices))),
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: torch.Tensor, pool: Any
    ) -> None:
        """Takes the memory that blocks stand in: see `FullAttentionCacheAllocator.register_cache_tensor`."""
        self.bytes_per_sector = bytes_per_sector
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
    ) -> list[Request]:
        """
        Lists the requests of a pass.

        Args:
            starts, key_starts (`list[int]`): where the new tokens and all tokens of each begin, and the end.
            read (`torch.Tensor`): physical indices of all tokens; empty where no request has a past.
            write (`torch.Tensor`): physical indices of new tokens.
        """
        blocks = (read if read.numel() else write).cpu() // self.block_physical_stride
        found = []
        for first, stop, key_first, key_stop in zip(starts, starts[1:], key_starts, key_starts[1:], strict=False):
            if stop > first:
                own = blocks[key_first if read.numel() else first :][: key_stop - key_first : self.tokens_per_page]
                found.append(Request(slice(first, stop), key_stop - key_first - (stop - first), own.tolist()))
        return found

    def newest(self, layer_idx: int, request: Request) -> torch.Tensor:
        """Copies the exact tokens before the new ones, `[at most N, 2, H, D]`, which these may take the place of."""
        recent, count = self._pages[layer_idx].recent, self.recipe.num_recent_tokens
        positions = range(max(request.past - count, self.recipe.num_sink_tokens), request.past)
        blocks = [request.blocks[position // self.tokens_per_page] for position in positions]
        return recent[blocks, [position % count for position in positions]]

    def write(self, layer_idx: int, request: Request, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores the new tokens `[1, H, Q, D]` of a request."""
        page, codec, size = self._pages[layer_idx], self.recipe.codecs[layer_idx], self.tokens_per_page
        rows = codec.encode(keys, values, Positions(request.past, None))
        states = torch.stack((keys[0], values[0]), dim=1).permute(2, 1, 0, 3)
        sinks, recent = self.recipe.num_sink_tokens, self.recipe.num_recent_tokens
        end = request.past + request.num_new
        for number in range(request.past // size, -(-end // size)):
            block, first = request.blocks[number], number * size
            start, stop = max(first, request.past), min(first + size, end)
            there, own = slice(start - first, stop - first), slice(start - request.past, stop - request.past)
            page.key_rows[block, :, there], page.value_rows[block, :, there] = rows[0][0, :, own], rows[1][0, :, own]
            newest = range(max(start, stop - recent), stop)
            if newest:
                slots = [position % recent for position in newest]
                page.recent[block, slots] = states[newest.start - request.past :][: len(newest)]
            if start < sinks:
                page.sinks[block, start : min(stop, sinks)] = states[own][: sinks - start]

    def parts(
        self, layer_idx: int, request: Request, newest: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> Iterator[Part]:
        """
        Yields what a request's new tokens attend to.

        Args:
            layer_idx (`int`): the layer.
            request (`Request`): the request.
            newest (`torch.Tensor`): what `newest` returned before they were written.
            keys, values (`torch.Tensor` of shape `[1, H, Q, D]`): the new tokens.
        """
        page, codec, size = self._pages[layer_idx], self.recipe.codecs[layer_idx], self.tokens_per_page
        num_sinks, num_coded = min(self.recipe.num_sink_tokens, request.past), request.past - len(newest)
        if num_sinks:
            sinks = page.sinks[request.blocks[0], :num_sinks].permute(1, 2, 0, 3)[:, None].to(keys.dtype)
            yield DensePart(sinks[0], sinks[1], num_sinks, None)
        for number in range(-(-num_coded // size) if num_coded > num_sinks else 0):
            block, length = request.blocks[number], min(num_coded - number * size, size)
            mask = None
            if number == 0 and num_sinks:
                mask = (torch.arange(min(length, _aligned(num_sinks)), device=keys.device) >= num_sinks)[
                    None, None, None
                ]
            rows = page.key_rows[block, None], page.value_rows[block, None]
            yield CodedPart(*rows, codec, Positions(number * size, None), length, mask)
        held = newest.permute(1, 2, 0, 3)[:, None].to(keys.dtype)
        keys, values = torch.cat((held[0], keys), dim=2), torch.cat((held[1], values), dim=2)
        count, length = request.num_new, keys.shape[2]
        mask = (
            torch.ones(count, length, dtype=torch.bool, device=keys.device).tril(length - count) if count > 1 else None
        )
        yield DensePart(keys, values, length, None if mask is None else mask[None, None])
