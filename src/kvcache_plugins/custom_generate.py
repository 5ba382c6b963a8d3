"""Caches for tools that hand arguments to `generate` and nothing else: Transformers' `custom_generate`.

A cache object is for one prompt; pipelines, chat loops and evaluations call `generate` again and again with the same
arguments. What stands in those arguments here makes a new cache for each call.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument, find_cache
from kvcache_plugins.registry import check_cache, create_cache


# That can be reached through a callable
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")


def _decode(
    name: str,
    options: dict[str, object],
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    **arguments: Any,
) -> Any:
    """Decodes in place of `model.generate`, which calls this."""
    mode = generation_config.get_generation_mode().value
    if mode not in _MODES:
        raise ValueError(
            f"`custom_generate` serves greedy search, sampling and beams, but got {mode}: pass "
            f"`past_key_values=create_cache({name!r}, model)` instead"
        )
    _refuse_other_cache(arguments)
    cache = create_cache(name, model, **options)
    decode = getattr(model, "_beam_search" if mode.startswith("beam") else "_sample")
    with listening(cache):
        return decode(input_ids, generation_config=generation_config, **{**arguments, **as_argument(cache)})


def generate_with(name: str, **options: object) -> Callable[..., Any]:
    """
    A `custom_generate` for `model.generate` that gives every call a fresh cache of the registry.

    Greedy search, sampling and beam search are Transformers' own. Transformers hands no `streamer` and no
    `assistant_model` to a callable, and drops them without a word: for those pass
    `past_key_values=create_cache(name, model)`, or the folder that the guide describes. `generate_batch` calls no
    callable at all.

    Args:
        name (`str`): One of `list_caches()`.
        options: Of the cache, as `create_cache` takes them.

    Returns:
        A callable that can be pickled. With `return_dict_in_generate=True` the cache that was used is the output's
        `past_key_values`.

    Raises:
        ValueError: for an unknown name or option. When it is called, also where `generate` is told of a cache in
            another way, or not to use any.

    Example:

    ```python
    >>> from kvcache_plugins import generate_with
    >>> model.generate(**inputs, custom_generate=generate_with("transform"))
    >>> pipeline("text-generation", model=model, tokenizer=tokenizer)(text, custom_generate=generate_with("transform"))
    ```
    """
    check_cache(name, **options)
    return partial(_decode, name, options)


def _refuse_other_cache(arguments: Mapping[str, Any]) -> None:
    """Refuses a cache among `arguments` but the empty `DynamicCache` that `generate` prepares by itself."""
    if not arguments.get("use_cache", True):
        raise ValueError("`use_cache=False` beside `custom_generate=generate_with(...)`: leave one of them out")
    prepared = find_cache(arguments)
    if prepared is not None and (type(prepared) is not DynamicCache or prepared.get_seq_length()):
        raise ValueError(
            f"`custom_generate=generate_with(...)` makes a new cache for each call, but `generate` was also given a "
            f"{type(prepared).__name__}: leave out `past_key_values` and `cache_implementation`, or `custom_generate`"
        )


def listening(cache: Cache) -> AbstractContextManager[object]:
    """Has a cache that listens to its model do so until a call ends; others need nothing."""
    return cache if isinstance(cache, AbstractContextManager) else nullcontext()
