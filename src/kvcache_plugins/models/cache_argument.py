"""Arguments of a forward through a cache.

Models call the cache `cache` since Transformers 5.24, and `past_key_values` before that, which is deprecated there.
"""

import inspect
from collections.abc import Callable, Mapping

import torch
from transformers import Cache, GenerationMixin


_OLD_NAME = "past_key_values"
# True if the installed release has the new name
IS_RENAMED = "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The new name comes first
CACHE_NAMES = ("cache", _OLD_NAME)


def as_argument(cache: Cache, function: Callable[..., object] | None = None) -> dict[str, Cache]:
    """
    Return a cache as a keyword argument of the installed Transformers' models, or of `function`, which may be written
    for an older release.
    """
    is_old = function is not None and _OLD_NAME in inspect.signature(function).parameters
    return {"cache" if IS_RENAMED and not is_old else _OLD_NAME: cache}


def find_cache(arguments: Mapping[str, object]) -> object:
    """Return the cache among a model's keyword arguments, under either name; `None` if there is none."""
    return next((arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None), None)


def reading_options(
    function: Callable[..., object],
    cache: Cache,
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    stop: int,
    *,
    needs_logits: bool = True,
) -> dict[str, object]:
    """
    Return the arguments of a forward over the tokens before `stop` that a cache does not hold.

    Args:
        function (`Callable`): the model's forward; it is given the arguments that it accepts.
        input_ids (`torch.Tensor` of shape `[B, tokens]`): all tokens, cached ones too.
        mask (`torch.Tensor` of the same shape, *optional*): 0 for padding. Positions are counted as in `generate`.
        needs_logits (`bool`, *optional*, defaults to `True`): compute logits of all tokens, not of the last alone.
    """
    start = cache.get_seq_length()
    accepted = inspect.signature(function).parameters
    options: dict[str, object] = {"input_ids": input_ids[:, start:stop], "use_cache": True}
    options |= as_argument(cache, function)
    if mask is not None:
        options["attention_mask"] = mask[:, :stop]
    if "position_ids" in accepted:
        real = torch.ones_like(input_ids[:1]) if mask is None else mask.long()
        options["position_ids"] = (real.cumsum(dim=1) - 1).clamp(min=0)[:, start:stop]
    if not needs_logits and "logits_to_keep" in accepted:
        options["logits_to_keep"] = 1
    return options
