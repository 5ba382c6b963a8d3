"""The cheapest GEAR preset that keeps a bound on a prompt of the user's own, found by measuring on that prompt.

How much a preset loses depends on the model and on the text: a table made elsewhere is no promise for either. So the
end of the prompt is held out, what comes before it is prefilled once, dense, and every candidate is filled with those
very states. The held-out tokens then go through the candidate, and each next-token distribution is held against the
dense one at the same position.

    t[0] ... t[p-1]              t[p] ... t[n-1]
    prefix: one dense forward    held out: one dense forward, and a few short ones through each candidate

The tokens held out are the prompt's own: nothing is generated, so that all candidates are measured on one text, and a
cache that strays cannot stray from itself. They are fed in chunks, as decoded tokens come, so that what is measured is
compressed as in a decode too; all at once, every one of them would be exact for those after it.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvcache_plugins.gear import GEARCache
from kvcache_plugins.gear.cache import create_gear
from kvcache_plugins.gear.config import PresetChoice
from kvcache_plugins.gear.transform.calibrations import find_calibration
from kvcache_plugins.registry import check_cache, create_cache, parse_cache_spec, unwrap_model

from .filled_caches import bytes_held, fill, mean_kl, prefill_dense
from .held_out_prompt import HeldOutPrompt


# Of the presets measured those than which no smaller one is nearer to a dense cache, and one that is nearer still
DEFAULT_CANDIDATES = ("gear-t16", "gear-t22", "gear-t25", "gear-t30", "gear-k4v4:nbits=8")
# The same of models that were calibrated
CALIBRATED_CANDIDATES = ("gear-c12", "gear-c16", "gear-c18", "gear-c20", "gear-c28")


@torch.no_grad()
def choose_cache(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    max_kl: float = 0.05,
    attention_mask: torch.Tensor | None = None,
    candidates: Sequence[str] | None = None,
    held_out: int | None = None,
) -> GEARCache:
    """
    Returns an empty cache of the cheapest candidate whose divergence from a dense cache, measured on the prompt's own
    last tokens, is at most `max_kl`. None is returned unmeasured: a prompt that is too short to tell is an error.

    The cost is one dense forward of the prompt, in two parts, and for each candidate tried a compression of the prompt
    and a forward of the held-out tokens. A dense cache of the prompt has to fit in memory meanwhile.

    The choice stands in the cache's `stats()` as `chosen_preset`, `chosen_kl`, `max_kl` and `kl_by_preset` (the
    candidates that were tried, the cheapest first). `reset`, copies, `fork`, and `save` and `load` keep it.

    Args:
        model (`PreTrainedModel`):
            The model, in eval mode.
        input_ids (`torch.Tensor` of shape `[batch_size, prompt length]`):
            The prompt. With a text that is like the later ones, one choice can stand for many.
        max_kl (`float`, *optional*, defaults to 0.05):
            Largest mean of KL(dense || cache), in nats, over the held-out tokens of all items, padding left out.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*):
            0 for padding, which has to be on the left, and 1 for tokens. None is padding by default.
        candidates (`Sequence[str]`, *optional*):
            GEAR caches by name of `list_caches()`, or `name:key=value,key=value` with options, in any order. Defaults
            to the presets of transform coding (calibrated ones too, if the model has a calibration), and one of 8
            bits.
        held_out (`int`, *optional*):
            Tokens at the prompt's end that are scored. Defaults to a quarter of the prompt, at least 16 and at most
            128.

    Returns:
        `GEARCache`: empty, for `generate` or a forward of the whole prompt.

    Raises:
        ValueError: if no candidate meets the bound, naming the KL of each; if the prompt is too short for a candidate
            to compress anything of it; or if an argument is none of the accepted ones.

    Example:

    ```python
    >>> from kvcache_plugins import choose_cache
    >>> cache = choose_cache(model, inputs.input_ids, max_kl=0.02)
    >>> cache.stats()["chosen_preset"]
    >>> model.generate(**inputs, past_key_values=cache)
    ```
    """
    _check_max_kl(max_kl)
    prompt = HeldOutPrompt(model, input_ids, attention_mask, held_out)
    caches = _create_candidates(prompt, candidates)
    prefill = prefill_dense(prompt)
    kl_by_preset: dict[str, float] = {}
    for spec in sorted(caches, key=lambda spec: bytes_held(caches[spec], prefill)):
        cache = copy.deepcopy(caches[spec])
        fill(cache, prefill, prompt)
        if not cache.stats()["tokens_compressed"]:
            raise _too_short(prompt, spec, cache)
        kl_by_preset[spec] = mean_kl(cache, prompt, prefill.logits)
        # No comparison with NaN holds
        if kl_by_preset[spec] <= max_kl:
            chosen = caches[spec]
            chosen.choice = PresetChoice(
                preset=spec, kl=kl_by_preset[spec], max_kl=float(max_kl), kl_by_preset=kl_by_preset
            )
            return chosen
    measured = ", ".join(f"`{spec}` {kl:.4g}" for spec, kl in kl_by_preset.items())
    raise ValueError(
        f"`max_kl` is {max_kl}, but on this prompt no candidate comes as near to a dense cache: {measured}. Accepted "
        "is a bound from the smallest of these on, or `candidates` with more bits"
    )


def default_candidates(model: torch.nn.Module) -> tuple[str, ...]:
    """The presets that are tried for a model, or for what wraps it."""
    is_calibrated = find_calibration(unwrap_model(model)) is not None
    return DEFAULT_CANDIDATES + (CALIBRATED_CANDIDATES if is_calibrated else ())


def _check_max_kl(max_kl: float) -> None:
    if isinstance(max_kl, bool) or not isinstance(max_kl, (int, float)) or not 0 < max_kl < math.inf:
        raise ValueError(f"`max_kl` has to be a number above 0, in nats, but got {max_kl!r}")


def _create_candidates(prompt: HeldOutPrompt, candidates: Sequence[str] | None) -> dict[str, GEARCache]:
    """An empty cache of every candidate."""
    if isinstance(candidates, str) or (candidates is not None and not candidates):
        raise ValueError(f"`candidates` has to be a sequence of names of GEAR caches but got {candidates!r}")
    caches = {}
    options: dict[str, Any] = {}
    if prompt.mask is not None and prompt.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        # Attention that does not show its mask to the cache
        options["attention_mask"] = prompt.mask
    for spec in default_candidates(prompt.model) if candidates is None else candidates:
        name, own = parse_cache_spec(spec)
        # Only these are known to do nothing to the model, whose weights tell its calibration
        is_gear = check_cache(name).load_factory() is create_gear
        cache = create_cache(name, prompt.model if is_gear else prompt.config, **{**options, **own})
        if not isinstance(cache, GEARCache):
            raise ValueError(
                f"`candidates` have to be GEAR caches, such as {', '.join(f'`{each}`' for each in DEFAULT_CANDIDATES)}"
                f", but `{spec}` is a `{type(cache).__name__}`"
            )
        caches[spec] = cache
    return caches


def _too_short(prompt: HeldOutPrompt, spec: str, cache: GEARCache) -> ValueError:
    shortest = cache.gear_config.shortest_prompt
    return ValueError(
        f"`input_ids` is too short to measure `{spec}`: of the {prompt.prefix_length} tokens before the "
        f"{prompt.held_out} held out it compresses none, as an item needs at least {shortest} "
        "there. Give a longer prompt, or a smaller `held_out`"
    )
