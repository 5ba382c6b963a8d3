"""The name that a model's `forward` and `generate` have for a cache: `cache` since Transformers 5.24, before that
`past_key_values`, which is deprecated there; and what else a forward over a part of a prompt is given.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Cache, GenerationMixin


_OLD_NAME = "past_key_values"
# Whether the installed release has the new name
IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The new one first
CACHE_NAMES = ("cache", _OLD_NAME)


def as_argument(cache: Cache, function: Callable[..., Any] | None = None) -> dict[str, Cache]:
    """Names a cache, for `**`, as the installed Transformers does, or the function that takes it, perhaps older."""
    is_old = function is not None and _OLD_NAME in inspect.signature(function).parameters
    return {"cache" if IS_RENAMED and not is_old else _OLD_NAME: cache}


def find_cache(arguments: Mapping[str, Any]) -> Any:
    """Finds the cache among the keyword arguments of a model, by either name; `None` where there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def reading_options(
    function: Callable[..., Any],
    cache: Cache,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    stop: int,
    *,
    needs_logits: bool = True,
) -> dict[str, Any]:
    """
    Lists what a model's `function` is given to read the tokens before `stop` of `input_ids` `[B, tokens]` that a cache
    does not hold: a `mask` of the same shape is 0 for padding, and positions are as `generate` counts them. Where none
    `needs_logits`, only the last token's are computed.
    """
    start = cache.get_seq_length()
    accepted = inspect.signature(function).parameters
    options = {"input_ids": input_ids[:, start:stop], **as_argument(cache, function), "use_cache": True}
    if mask is not None:
        options["attention_mask"] = mask[:, :stop]
    if "position_ids" in accepted:
        real = torch.ones_like(input_ids[:1]) if mask is None else mask.long()
        options["position_ids"] = (real.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
    if not needs_logits and "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1
    return options
