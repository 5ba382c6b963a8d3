"""`compressed_by_default`: every `generate` of a block of code has a cache of the registry.

`generate` makes its cache in `GenerationMixin._prepare_cache_for_generation`, which knows the model. While a block is
open in any thread, another function replaces that method: it calls the method, and then replaces an empty
`DynamicCache` in threads with an open block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin

from .models.cache_argument import CACHE_NAMES, find_cache
from .registry import check_cache, create_cache


_TRANSFORMERS_OWN = GenerationMixin._prepare_cache_for_generation
_LOCK = threading.Lock()
# Open blocks of all threads
_OPEN: list[object] = []
# Function that makes a model's cache; threads do not inherit it
_MAKE: ContextVar[Callable[[GenerationMixin], Cache] | None] = ContextVar("_MAKE", default=None)


@contextmanager
def compressed_by_default(name: str, **options: object) -> Iterator[None]:
    """
    Give every `generate` in the block a fresh cache of the registry, where Transformers would make a `DynamicCache`:
    in pipelines, in libraries of agents, in rollouts of trainers, and for the own tokens of an encoder-decoder's
    decoder. A cache that `generate` is given, or that `cache_implementation` names, stays. So do caches that models
    make by code of their own: in a forward without a cache, and in the few families that override
    `_prepare_cache_for_generation` whole.

    The block is of one thread, or of one `asyncio` task; other threads get Transformers' caches.

    Args:
        name (`str`): one of `list_caches()`.
        options: the cache's options, as in `create_cache`.

    Raises:
        ValueError: for an unknown name or option, in another such block, and from `generate` of a model that cannot
            have the cache.

    Example:

    ```python
    >>> from kvcache_plugins import compressed_by_default
    >>> with compressed_by_default("transform"):
    ...     answers = pipeline("text-generation", model=model, tokenizer=tokenizer)(texts)
    ```
    """
    check_cache(name, **options)
    if _MAKE.get() is not None:
        raise ValueError("`compressed_by_default` is entered in another such block: leave one of them out")
    block = object()
    token = _MAKE.set(lambda model: create_cache(name, model, **options))  # type: ignore[arg-type]
    with _LOCK:
        _OPEN.append(block)
        GenerationMixin._prepare_cache_for_generation = _prepare  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.remove(block)
            if not _OPEN:
                GenerationMixin._prepare_cache_for_generation = _TRANSFORMERS_OWN  # type: ignore[method-assign]
        # Last, as it raises if the block ends in another thread or task than it began in
        _MAKE.reset(token)


def _prepare(
    self: GenerationMixin,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, object],
    *args: object,
    **kwargs: object,
) -> object:
    """Replaces `GenerationMixin._prepare_cache_for_generation` while a block is open."""
    is_given = find_cache(model_kwargs) is not None or generation_config.cache_implementation is not None
    prepared = _TRANSFORMERS_OWN(self, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[arg-type]
    make = _MAKE.get()
    if make is None or is_given:
        return prepared
    for name in CACHE_NAMES:
        found = model_kwargs.get(name)
        if type(found) is DynamicCache:
            model_kwargs[name] = _made(make(self), generation_config)
        elif type(found) is EncoderDecoderCache and type(found.self_attention_cache) is DynamicCache:
            own = _made(make(self), generation_config)
            model_kwargs[name] = EncoderDecoderCache(own, found.cross_attention_cache)
    return prepared


def _made(cache: Cache, generation_config: GenerationConfig) -> Cache:
    """Let the cache of an assistant record the past, as its drafts are taken back."""
    if generation_config.is_assistant:
        cache.activate_past_recording()
    return cache
