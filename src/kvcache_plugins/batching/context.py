"""A context in which Transformers' continuous batching keeps its paged cache as coded rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
import transformers
from transformers import Cache, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvcache_plugins.codecs.rows import share_formats
from kvcache_plugins.layers.row_layer import RowLayer
from kvcache_plugins.models.cache_argument import as_argument, find_cache
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.packed.cache import PackedCache
from kvcache_plugins.prompt_store.store import PromptStore
from kvcache_plugins.registry import create_cache

from .page_store import PageStore
from .paged_allocator import AllocatorOptions, BatchingCounters, CodedAllocator, PageCodecConfig
from .transformers_patches import RELEASES, check_release, patched


if TYPE_CHECKING:
    from typing_extensions import Unpack


class CompressedBatching:
    """Counters of continuous batching in a `compressed_batching` context, and the bytes of its pages."""

    def __init__(self, codec_config: PageCodecConfig, page_store: PageStore | None) -> None:
        self._codec_config = codec_config
        self._page_store = page_store
        self._counters = BatchingCounters()
        self._allocators: list[CodedAllocator] = []
        # Value of `tokens_coded` after the newest pass
        self._num_checked = 0

    def stats(self) -> dict[str, int]:
        """Return counters since the context was opened, added up over layers."""
        return asdict(self._counters)

    def page_bytes(self) -> tuple[int, int]:
        """Return the bytes of a block of the newest cache, and of a dense one; a `ValueError` without a cache."""
        if not self._allocators:
            raise ValueError("no cache has been made in this context yet: it is when a batch begins")
        newest = self._allocators[-1]
        dense = newest.get_bytes_per_page(
            newest.num_key_value_heads, newest.head_dim, newest.cache_dtype, newest.tokens_per_page
        )
        return newest.bytes_per_block, dense * newest.pages_per_block

    def make_allocator(self, **options: Unpack[AllocatorOptions]) -> CodedAllocator:
        """Make an allocator, given the arguments that Transformers passes."""
        allocator = CodedAllocator(self._codec_config, self._counters, self._page_store, **options)
        self._allocators.append(allocator)
        return allocator

    def check_pass(
        self, model: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object
    ) -> None:
        """Raise a `RuntimeError` if the pass of a batch has coded no tokens; a forward hook of the model."""
        cache = find_cache(kwargs)
        if not isinstance(cache, PagedAttentionCache):
            return
        coded = [each for each in cache.cache_allocators.values() if isinstance(each, CodedAllocator)]
        num_before, self._num_checked = self._num_checked, self._counters.tokens_coded
        is_own = coded and coded[0] in self._allocators
        if not coded or (is_own and self._num_checked == num_before):
            raise RuntimeError(
                "a batch ran from a dense cache in `compressed_batching`: its manager was made before, or "
                f"Transformers {transformers.__version__} has another paged cache than {RELEASES}"
            )


def _find_codecs(
    model: PreTrainedModel, name: str, text: torch.Tensor | None, num_recent_tokens: int
) -> PageCodecConfig:
    """Find the codecs of a preset: from the model's calibration, or fitted to a text that is read once."""
    cache = create_cache(name, model)
    layers = {layer_idx: layer for layer_idx, layer in enumerate(cache.layers) if isinstance(layer, RowLayer)}
    if text is not None:
        _check_text(text, cache)
        with torch.no_grad():
            model(text.to(model.device), **as_argument(cache), logits_to_keep=1)
    codecs = {}
    num_sink_tokens = 0
    for layer_idx, layer in layers.items():
        codec = share_formats(layer.policy.shared_codec if text is None else layer.codec)
        if codec is not None:
            codecs[layer_idx] = codec
            num_sink_tokens = layer.policy.num_sink_tokens
    if not codecs:
        raise ValueError(
            f"`name` is `{name}`, which has no tables of the model's, and requests share blocks: accepted are "
            "calibrated caches, such as `calibrated-16` of a model that `kvcache-plugins calibrate` was run for, and "
            "`transform-16` to `transform-30` with a `text` (`--text-file`) to make tables of (these alone "
            "under tensor parallelism)"
        )
    return PageCodecConfig(codecs, num_sink_tokens, num_recent_tokens)


def _check_text(text: object, cache: Cache) -> None:
    """Raise a `ValueError` unless a text `[1, tokens]` is long enough for tables."""
    if not isinstance(text, torch.Tensor) or text.dim() != 2 or len(text) != 1 or text.is_floating_point():
        got = list(text.shape) if isinstance(text, torch.Tensor) else repr(text)[:40]
        raise ValueError(f"`text` has to be token ids of shape [1, tokens] but got {got}")
    least = cache.cache_config.shortest_prompt if isinstance(cache, PackedCache) else 1
    if text.shape[1] < least:
        raise ValueError(f"`text` (`--text-file`) has {text.shape[1]} tokens, but tables need at least {least}")


def _page_store(store: PromptStore, model: PreTrainedModel, codec_config: PageCodecConfig) -> PageStore:
    """Make the store of a model's pages; raise a `ValueError` if requests of the model share no pages."""
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(codec_config.codecs) < num_layers or getattr(model, "_device_mesh", None) is not None:
        raise ValueError(
            "`store` keeps pages that requests share, which a model with windows of attention, or one that is split "
            "by tensor parallelism, has none of: leave it out"
        )
    return PageStore(store, model, *codec_config)


@contextmanager
def compressed_batching(
    model: PreTrainedModel,
    name: str,
    *,
    num_recent_tokens: int = 8,
    text: torch.Tensor | None = None,
    store: PromptStore | None = None,
) -> Iterator[CompressedBatching]:
    """
    Keep the cache of continuous batching compressed, in all managers that are made and run in this context by
    `generate_batch`, `init_continuous_batching` or `continuous_batching_context_manager`. If contexts of one model are
    nested, the innermost compresses.

    Args:
        model (`PreTrainedModel`): the model.
        name (`str`): a registered cache that codes rows: a calibrated one (`calibrated-16`), or with `text` any
            `transform*`.
        num_recent_tokens (`int`, *optional*, defaults to 8): newest tokens of a request that are attended to exactly.
        text (`torch.Tensor` of shape `[1, tokens]`, *optional*): token ids that tables are made of, for all requests,
            where there is no calibration.
        store (`PromptStore`, *optional*): store that keeps pages on disk, so that requests find beginnings that
            another batch has read.

    Yields:
        `CompressedBatching`: counters, and bytes of a page.

    Raises:
        ValueError: if the cache has no tables that requests can share, the model is split over devices (other than
            by tensor parallelism) or attends by `eager`, or an option is none of the accepted values.
        RuntimeError: if this release of Transformers has another paged cache, or a batch ran from a dense one.

    Example:

    >>> with compressed_batching(model, "calibrated-16") as batching:
    ...     outputs = model.generate_batch(prompts, generation_config=config)
    >>> batching.stats()["tokens_coded"]
    """
    check_integer("num_recent_tokens", num_recent_tokens, 0)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"`model` is split over {' and '.join(devices)}, but all pages are on one device")
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention in ("eager", "paged|eager"):
        raise ValueError(
            f"`model` attends by `{attention}`, which would need dense pages: `model.set_attn_implementation('sdpa')`"
        )
    check_release()
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise ValueError("`model` has a persistent manager of another cache: destroy it first")
    codecs = _find_codecs(model, name, text, num_recent_tokens)
    batching = CompressedBatching(codecs, None if store is None else _page_store(store, model, codecs))
    hook = model.register_forward_hook(batching.check_pass, with_kwargs=True)
    try:
        with patched(model.config.get_text_config(), batching.make_allocator):
            yield batching
    finally:
        hook.remove()
