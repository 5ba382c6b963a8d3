"""Patches of Transformers: three names of its paged cache are replaced while `compressed_batching` is open.

Transformers has no hook for another paged cache. `patched` replaces

    ATTN_TYPE_TO_ALLOCATOR["full_attention"]     class of the allocator of layers that attend to all tokens
    PagedAttentionCache.update                   storage of a layer's new tokens, and the states to attend to
    PagedAttentionMemoryHandler                  memory that a token takes beside the cache

and restores them when the last context is closed. Models without an open context get Transformers' own.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator
from transformers.generation.continuous_batching.utils import find_head_dim

from .paged_allocator import AllocatorOptions, CodedAllocator
from .paged_states import PagedStates


if TYPE_CHECKING:
    from typing_extensions import Unpack


RELEASES = "Transformers 5.23 and 5.24"
_FULL = "full_attention"
_DENSE_UPDATE = paged_cache.PagedAttentionCache.update
_DENSE_SIZING = paged_cache.PagedAttentionMemoryHandler


class AllocatorFactory(Protocol):
    """Function that makes the allocator of a context."""

    def __call__(self, **options: Unpack[AllocatorOptions]) -> CodedAllocator: ...


_LOCK = threading.RLock()
# Open contexts, the innermost last, by the identity of the config of their model
_OPEN: dict[int, list[AllocatorFactory]] = {}


def check_release() -> None:
    """Raise a `RuntimeError` if the installed paged cache is not the one that patches are written for."""
    allocator = set(inspect.signature(FullAttentionCacheAllocator.__init__).parameters)
    update = set(inspect.signature(_DENSE_UPDATE).parameters)
    if allocator != {"self", *AllocatorOptions.__annotations__} or update != set(
        inspect.signature(_update).parameters
    ):
        raise RuntimeError(
            f"`compressed_batching` knows the paged cache of {RELEASES}, but that of {transformers.__version__} is "
            "another"
        )


@contextmanager
def patched(config: PreTrainedConfig, make_allocator: AllocatorFactory) -> Iterator[None]:
    """Make allocators of paged caches for a model's `config` by `make_allocator` inside the context."""
    key = id(config)
    with _LOCK:
        _OPEN.setdefault(key, []).append(make_allocator)
        install_patches()
    try:
        yield
    finally:
        with _LOCK:
            _OPEN[key].remove(make_allocator)
            if not _OPEN[key]:
                del _OPEN[key]
            if not _OPEN:
                remove_patches()


def install_patches() -> None:
    """Replace Transformers' names."""
    paged_cache.ATTN_TYPE_TO_ALLOCATOR[_FULL] = _Allocator  # type: ignore[assignment]
    paged_cache.PagedAttentionCache.update = _update  # type: ignore[method-assign]
    paged_cache.PagedAttentionMemoryHandler = _Sizing  # type: ignore[misc]


def remove_patches() -> None:
    """Restore Transformers' names."""
    paged_cache.ATTN_TYPE_TO_ALLOCATOR[_FULL] = FullAttentionCacheAllocator
    paged_cache.PagedAttentionCache.update = _DENSE_UPDATE  # type: ignore[method-assign]
    paged_cache.PagedAttentionMemoryHandler = _DENSE_SIZING  # type: ignore[misc]


class _Allocator(FullAttentionCacheAllocator):
    """Replaces Transformers' allocator class while a context is open."""

    # Transformers reads it of the class: models without a context have no block tables meanwhile, and are slower
    supports_block_table = False

    def __new__(cls, **options: Unpack[AllocatorOptions]) -> FullAttentionCacheAllocator:  # type: ignore[misc]
        """Make the allocator of a model, of coded rows if a context is open for it."""
        factories = _OPEN.get(id(options["config"]))
        return factories[-1](**options) if factories else FullAttentionCacheAllocator(**options)


class _Sizing(_DENSE_SIZING):  # type: ignore[misc, valid-type]
    """Replaces Transformers' sizing while a context is open: no dense copy of coded tokens is read."""

    @property
    def bytes_per_cache_token(self) -> int:
        """Return the bytes that a token takes beside the cache when it is read."""
        dense = int(super().bytes_per_cache_token)
        if id(self.config) not in _OPEN or self.num_groups > 1:
            return dense
        return dense - self.kv_heads_at_peak * find_head_dim(self.config) * self.activation_dtype.itemsize


@torch.compiler.disable
def _update(
    self: paged_cache.PagedAttentionCache,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    layer_idx: int,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `PagedAttentionCache.update` while a context is open."""
    allocator = self.layer_to_allocator[layer_idx]
    if not isinstance(allocator, CodedAllocator):
        return _DENSE_UPDATE(self, key_states, value_states, layer_idx, kwargs)
    key_starts = kwargs["cu_seq_lens_k"][allocator.layer_type]
    if layer_idx == allocator.layer_indices[0]:
        write = kwargs["write_index"][allocator.index]
        allocator.begin_pass(kwargs["cu_seq_lens_q"].tolist(), key_starts.tolist(), write)
    kwargs["cu_seq_lens_k"] = key_starts.to(torch.int32)
    kwargs["max_length_k"] = kwargs["max_length_k"][allocator.layer_type]
    states = PagedStates.store(allocator, layer_idx, key_states, value_states)
    # Without past tokens the new ones are all that is attended to
    has_past = kwargs["read_index"][allocator.index].numel() > 0
    return states.lazy() if has_past else (key_states, value_states)
