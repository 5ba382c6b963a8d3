"""
`generate` with a compressed KV cache: what `model.generate(..., custom_generate="<this repository>")` calls, and
`model.generate` itself where this folder is in the model's own repository.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvcache_plugins import create_cache
from kvcache_plugins.models.cache_argument import as_argument


def generate(
    *inputs: Any, model: Any, cache: str = "gear", cache_options: Mapping[str, object] | None = None, **arguments: Any
) -> Any:
    """
    `model.generate` with a fresh cache.

    Args:
        inputs: What `generate` was called with by position.
        model: The model that `generate` was called on.
        cache (`str`, *optional*, defaults to `"gear"`): A name of `kvcache_plugins.list_caches()`.
        cache_options (`Mapping`, *optional*): Options of that cache.
        arguments: Everything else that `generate` was called with, a streamer and an assistant model included.

    Raises:
        ValueError: for an unknown cache or option, or if there is a cache in the arguments already.
    """
    given = [arguments.pop(name, None) for name in ("past_key_values", "cache_implementation")]
    if given != [None, None] or not isinstance(cache, str):
        raise ValueError("leave out `past_key_values` and `cache_implementation`: `cache` takes the name of a cache")
    made = create_cache(cache, model, **(cache_options or {}))
    # Caches that listen to the model do so until the call ends
    with made if isinstance(made, AbstractContextManager) else nullcontext():
        # The class's: the model's own is this function where it is in the model's repository
        return type(model).generate(model, *inputs, **arguments, **as_argument(made))
