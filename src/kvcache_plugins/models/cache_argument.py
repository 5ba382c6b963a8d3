"""The name that a model's `forward` and `generate` have for a cache: `cache` since Transformers 5.24, before that
`past_key_values`, which is deprecated there.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import Cache, GenerationMixin


_OLD_NAME = "past_key_values"
# Whether the installed release has the new name
IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The new one first
CACHE_NAMES = ("cache", _OLD_NAME)


def as_argument(cache: Cache, function: Callable[..., Any] | None = None) -> dict[str, Cache]:
    """
    Names a cache, for `**`, as the installed Transformers does, or the function that it is passed to, perhaps older.
    """
    is_old = function is not None and _OLD_NAME in inspect.signature(function).parameters
    return {"cache" if IS_RENAMED and not is_old else _OLD_NAME: cache}


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Finds the cache among the keyword arguments of a model, by either name; `None` where there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)
