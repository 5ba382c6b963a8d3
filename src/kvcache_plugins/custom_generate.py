"""`custom_generate` of Transformers: a fresh cache for every call of `generate`.

A cache object serves one prompt, but pipelines, chat loops and evaluations call `generate` many times with the same
arguments. A callable from `generate_with` among them makes a new cache for each call.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel

from kvcache_plugins.models.cache_argument import as_argument, find_cache
from kvcache_plugins.registry import check_cache, create_cache


if TYPE_CHECKING:
    from transformers.generation.utils import GenerateOutput


# Modes that a callable can serve
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
# Token ids, or an output with `return_dict_in_generate=True`
Generated: TypeAlias = "GenerateOutput | torch.LongTensor"


def _decode(
    name: str,
    options: dict[str, object],
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    **arguments: object,
) -> Generated:
    """Decode through a fresh cache; `model.generate` calls this function."""
    mode = generation_config.get_generation_mode().value
    if mode not in _MODES:
        raise ValueError(
            f"`custom_generate` serves greedy search, sampling and beams, but got {mode}: pass "
            f"`past_key_values=create_cache({name!r}, model)` instead"
        )
    _refuse_other_cache(arguments)
    cache = given = create_cache(name, model, **options)
    prepared = find_cache(arguments)
    if isinstance(prepared, EncoderDecoderCache):
        given = EncoderDecoderCache(cache, prepared.cross_attention_cache)
    decode = getattr(model, "_beam_search" if mode.startswith("beam") else "_sample")
    with attached(cache):
        return decode(input_ids, generation_config=generation_config, **{**arguments, **as_argument(given)})


def generate_with(name: str, **options: object) -> Callable[..., Generated]:
    """
    Return a `custom_generate` for `model.generate` that gives every call a fresh cache of the registry; in
    encoder-decoders for the decoder's own tokens.

    Greedy search, sampling and beam search are Transformers' own. Transformers passes no `streamer` and no
    `assistant_model` to a callable, and drops them silently. To use one, pass
    `past_key_values=create_cache(name, model)`, or the folder that the guide describes. `generate_batch` calls no
    callable at all.

    Args:
        name (`str`): one of `list_caches()`.
        options: the cache's options, as in `create_cache`.

    Returns:
        A callable that can be pickled. With `return_dict_in_generate=True` the output's `past_key_values` is the cache
        that was used.

    Raises:
        ValueError: for an unknown name or option. The callable raises it if `generate` is also given another cache, or
            `use_cache=False`.

    Example:

    ```python
    >>> from kvcache_plugins import generate_with
    >>> model.generate(**inputs, custom_generate=generate_with("transform"))
    >>> pipeline("text-generation", model=model, tokenizer=tokenizer)(text, custom_generate=generate_with("transform"))
    ```
    """
    check_cache(name, **options)
    return partial(_decode, name, options)


def _refuse_other_cache(arguments: Mapping[str, object]) -> None:
    """Raise a `ValueError` for a cache among `arguments`, except an empty one as `generate` prepares it."""
    if not arguments.get("use_cache", True):
        raise ValueError("`use_cache=False` beside `custom_generate=generate_with(...)`: leave one of them out")
    prepared = find_cache(arguments)
    own = prepared.self_attention_cache if type(prepared) is EncoderDecoderCache else prepared
    if own is not None and (type(own) is not DynamicCache or own.get_seq_length()):
        raise ValueError(
            f"`custom_generate=generate_with(...)` makes a new cache for each call, but `generate` was also given a "
            f"{type(prepared).__name__}: leave out `past_key_values` and `cache_implementation`, or `custom_generate`"
        )


def attached(cache: Cache) -> AbstractContextManager[object]:
    """Return a context that detaches the cache from its model at its end, if the cache has hooks on the model."""
    return cache if isinstance(cache, AbstractContextManager) else nullcontext()
