"""
`generate` with a compressed KV cache: what `model.generate(..., custom_generate="<this repository>")` calls, and
`model.generate` itself where this folder is in the model's own repository.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvcache_plugins import create_cache


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
    if arguments.get("past_key_values") is not None or arguments.get("cache_implementation") is not None:
        raise ValueError("leave out `past_key_values` and `cache_implementation`, or `custom_generate`")
    made = create_cache(cache, model, **(cache_options or {}))
    # Caches that listen to the model do so until the call ends
    with made if isinstance(made, AbstractContextManager) else nullcontext():
        # The class's: the model's own is this function where it is in the model's repository
        return type(model).generate(model, *inputs, **{**arguments, "past_key_values": made})
