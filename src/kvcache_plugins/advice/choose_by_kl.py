"""The cheapest preset that keeps a bound on a prompt of the user's own, found by measuring on that prompt.

How much a preset loses depends on the model and on the text. So the end of the prompt is held out, what comes before
it is prefilled once, dense, and every candidate is filled with those very states. The held-out tokens, the prompt's
own, then go through the candidate, and each next-token distribution is held against the dense one at the same
position. They are fed in chunks, as decoded tokens come: all at once, each would be exact for those after it.

    t[0] ... t[p-1]              t[p] ... t[n-1]
    prefix: one dense forward    held out: one dense forward, and a few short ones through each candidate
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.layers.query_recorder import QueryRecordingLayer, record_queries
from kvcache_plugins.models.cache_argument import reading_options
from kvcache_plugins.option_checks import check_left_padding, check_number
from kvcache_plugins.packed.cache import PackedCache, makes_packed_cache
from kvcache_plugins.packed.snapshot import PresetChoice
from kvcache_plugins.registry import create_cache, parse_cache_spec, unwrap_model
from kvcache_plugins.transform_coding.calibration import find_calibration

from .memory_prediction import RecordedCall, fill_without_data


# By default a quarter of the prompt is held out, within these
_FEWEST_HELD_OUT, _MOST_HELD_OUT = 16, 128
# Of this many tokens groups of every usual size leave none over
_WHOLE_GROUPS = 1024
# Held-out tokens a forward through a candidate
_CHUNK = 16


class HeldOutPrompt:
    """
    Cuts a checked prompt into a prefix that fills caches and tokens that are scored. After `prefill` there are
    `layers`, dense with the prefix, newest `queries` of each, `[B, H * G, Q, D]` or None, and `logits` `[B, held_out,
    vocabulary]`.
    """

    layers: list[Any]
    queries: list[torch.Tensor | None]
    logits: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        held_out: int | None,
    ) -> None:
        self.model, inner = model, unwrap_model(model)
        self.config: Any = inner.config
        if model.training:
            raise ValueError("`model` is in training mode, where dropout differs each time: call `model.eval()` first")
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError("`input_ids` has to be a tensor of token ids of shape `[batch_size, prompt length]`")
        self.input_ids = input_ids.to(inner.device)
        self.length = input_ids.shape[1]
        self.held_out = _choose_held_out(held_out, self.length)
        self.prefix_length = self.length - self.held_out
        self.mask = None
        if attention_mask is not None:
            check_left_padding(attention_mask, input_ids)
            # None is padding in most batches, and attention is faster without a mask
            self.mask = None if bool(attention_mask.all()) else attention_mask.to(inner.device).long()
        # Padding of every item, `[batch_size]`
        self.padding = None if self.mask is None else (self.mask == 0).sum(dim=1)

    def feed(self, cache: Cache, stop: int) -> torch.Tensor:
        """Feeds a cache the tokens up to `stop` that it does not hold: their logits `[B, tokens, vocabulary]`."""
        forward = unwrap_model(self.model).forward
        # Those of the prefix are nobody's
        needs_logits = stop > self.prefix_length
        options = reading_options(forward, cache, self.input_ids, self.mask, stop, needs_logits=needs_logits)
        output = self.model(**options)
        if cache.get_seq_length() != stop:
            raise ValueError(
                f"`model` left {cache.get_seq_length()} tokens in the cache after {stop}: it does not go through "
                "`past_key_values` alone, so nothing can be measured"
            )
        return output.logits

    def prefill(self) -> None:
        """Feeds the prompt, in two parts, to a dense cache."""
        dense = DynamicCache(config=self.config)
        record_queries(dense, of_windows=True)
        self.feed(dense, self.prefix_length)
        self.queries = [layer.queries if isinstance(layer, QueryRecordingLayer) else None for layer in dense.layers]
        # Bounded layers forget, and may write in place: they are copied. Others are cut back, so that the prompt
        # stands in memory once.
        self.layers = [
            layer if isinstance(layer, QueryRecordingLayer) else copy.deepcopy(layer) for layer in dense.layers
        ]
        self.logits = self.feed(dense, self.length)
        for layer in self.layers:
            if isinstance(layer, QueryRecordingLayer) and layer.is_initialized:
                layer.crop(-self.held_out)

    def bytes_held(self, cache: PackedCache) -> int:
        """
        Counts the bytes, shared ones too, of a prompt as long as the prefix in whole groups: how many tokens are exact
        for want of others says nothing of what is generated.
        """
        calls: list[list[RecordedCall]] = [
            [RecordedCall("update", (layer.keys.to("meta"), layer.values.to("meta")), 2)]
            if isinstance(layer, QueryRecordingLayer) and layer.keys is not None and layer.values is not None
            else []
            for layer in self.layers
        ]
        empty = copy.deepcopy(cache)
        fill_without_data(empty, calls, len(self.logits), -(-self.prefix_length // _WHOLE_GROUPS) * _WHOLE_GROUPS)
        memory = empty.memory()
        return memory.total_bytes + sum(memory.shared.values())

    def fill(self, cache: PackedCache) -> None:
        """Puts the prefix into an empty cache, compressed, of a window its part, or as a copy of the layer."""
        for index, (layer, queries) in enumerate(zip(self.layers, self.queries, strict=True)):
            own = cache.layers[index]
            is_held = isinstance(layer, QueryRecordingLayer) and layer.is_initialized
            if type(own) is DynamicSlidingWindowLayer and isinstance(layer, QueryRecordingLayer):
                if layer.keys is not None and layer.values is not None:
                    own.update(layer.keys, layer.values)
            elif not isinstance(own, CompressedLayer):
                cache.layers[index] = copy.deepcopy(layer)
            elif is_held:
                within = None if self.padding is None else self.padding.clamp(max=self.prefix_length)
                if own.policy.num_recorded_queries and queries is not None:
                    # Tables are made of queries too: as if attention had just computed with them
                    own.update(layer.keys, layer.values)
                    own.padding = within
                    own.on_exact_attention(AttentionCall(queries, is_causal=True))
                else:
                    own.take_prompt(layer.keys, layer.values, within)
                # Of a short item padding may go on behind the prefix
                own.padding = self.padding

    def mean_kl(self, cache: PackedCache) -> float:
        """Computes the mean KL(dense || cache) of the held-out tokens, padding left out, through a filled cache."""
        total, num_real, first = 0.0, 0, self.prefix_length
        for start in range(first, self.length, _CHUNK):
            stop = min(start + _CHUNK, self.length)
            logits = self.feed(cache, stop)
            # Item by item: in float64 the logits of a whole batch may be large
            for item in range(len(logits)):
                real = slice(None) if self.mask is None else self.mask[item, start:stop] != 0
                exact = F.log_softmax(self.logits[item, start - first : stop - first][real].double(), dim=-1)
                log_probs = F.log_softmax(logits[item][real].double(), dim=-1)
                total += F.kl_div(log_probs, exact, reduction="sum", log_target=True).item()
                num_real += len(exact)
        return total / num_real


def _choose_held_out(held_out: int | None, length: int) -> int:
    if held_out is None:
        held_out = max(_FEWEST_HELD_OUT, min(length // 4, _MOST_HELD_OUT))
        if held_out >= length:
            raise ValueError(
                f"`input_ids` has {length} tokens, which is too short: {held_out} are held out at the end, and those "
                "before them have to be enough to be compressed"
            )
    if not isinstance(held_out, int) or isinstance(held_out, bool) or not 1 <= held_out < length:
        raise ValueError(
            f"`held_out` has to be an integer from 1 to {length - 1} for this prompt, but got {held_out!r}"
        )
    return held_out


# Of the presets measured those than which no smaller one is nearer to a dense cache, and one that is nearer still
DEFAULT_CANDIDATES = (
    "transform-16",
    "transform-22",
    "transform",
    "transform-30",
    "gear-k4v3:key_nbits=8,value_nbits=8",
)
# The same of models that were calibrated
CALIBRATED_CANDIDATES = (
    "calibrated-12",
    "calibrated-16",
    "calibrated-16:nbits=2.55",
    "calibrated-20",
    "calibrated-28",
)


@torch.no_grad()
def choose_cache(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    max_kl: float = 0.05,
    attention_mask: torch.Tensor | None = None,
    candidates: Sequence[str] | None = None,
    held_out: int | None = None,
) -> PackedCache:
    """
    Returns an empty cache of the cheapest candidate whose divergence from a dense cache, measured on the prompt's own
    last tokens, is at most `max_kl`. None is returned unmeasured: a prompt that is too short to tell is an error.

    The cost is one dense forward of the prompt, in two parts, and for each candidate tried a compression of the prompt
    and a forward of the held-out tokens. A dense cache of the prompt has to fit in memory meanwhile.

    The choice stands in the cache's `stats()` as `chosen_preset`, `chosen_kl`, `max_kl` and `kl_by_preset` (the
    candidates that were tried, the cheapest first). `reset`, copies, `fork`, and `save` and `load` keep it.

    Args:
        model (`PreTrainedModel`): the model, in eval mode.
        input_ids (`torch.Tensor` of shape `[batch_size, prompt length]`): the prompt. With a text that is like the
            later ones, one choice can stand for many.
        max_kl (`float`, *optional*, defaults to 0.05): largest mean of KL(dense || cache), in nats, over the held-out
            tokens of all items, padding left out.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): 0 for padding, which has to
            be on the left, and 1 for tokens. None is padding by default.
        candidates (`Sequence[str]`, *optional*): presets of `TransformCodingCache` or `GEARCache`, with options as
            `name:key=value,key=value`, in any order. Defaults to the presets of transform coding (calibrated
            ones too, if the model has a calibration), and one of 8 bits.
        held_out (`int`, *optional*): tokens at the prompt's end that are scored. Defaults to a quarter of the prompt,
            at least 16 and at most 128.

    Returns:
        `TransformCodingCache` or `GEARCache`: empty, for `generate` or a forward of the whole prompt.

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
    check_number("max_kl", max_kl, above=0.0)
    prompt = HeldOutPrompt(model, input_ids, attention_mask, held_out)
    caches = _create_candidates(prompt, candidates)
    prompt.prefill()
    kl_by_preset: dict[str, float] = {}
    for spec in sorted(caches, key=lambda spec: prompt.bytes_held(caches[spec])):
        cache = copy.deepcopy(caches[spec])
        prompt.fill(cache)
        if not cache.stats()["tokens_compressed"]:
            raise ValueError(
                f"`input_ids` is too short to measure `{spec}`: of the {prompt.prefix_length} tokens before the "
                f"{prompt.held_out} held out it compresses none, as an item needs at least "
                f"{cache.cache_config.shortest_prompt} there. Give a longer prompt, or a smaller `held_out`"
            )
        kl_by_preset[spec] = prompt.mean_kl(cache)
        # No comparison with NaN holds
        if kl_by_preset[spec] <= max_kl:
            caches[spec].choice = PresetChoice(
                preset=spec, kl=kl_by_preset[spec], max_kl=float(max_kl), kl_by_preset=kl_by_preset
            )
            return caches[spec]
    measured = ", ".join(f"`{spec}` {kl:.4g}" for spec, kl in kl_by_preset.items())
    raise ValueError(
        f"`max_kl` is {max_kl}, but on this prompt no candidate comes as near to a dense cache: {measured}. Accepted "
        "is a bound from the smallest of these on, or `candidates` with more bits"
    )


def default_candidates(model: torch.nn.Module) -> tuple[str, ...]:
    """The presets that are tried for a model, or for what wraps it."""
    is_calibrated = find_calibration(unwrap_model(model)) is not None
    return DEFAULT_CANDIDATES + (CALIBRATED_CANDIDATES if is_calibrated else ())


def _create_candidates(prompt: HeldOutPrompt, candidates: Sequence[str] | None) -> dict[str, PackedCache]:
    if isinstance(candidates, str) or (candidates is not None and not candidates):
        raise ValueError(f"`candidates` has to be a sequence of names of caches but got {candidates!r}")
    caches = {}
    options: dict[str, Any] = {}
    if prompt.mask is not None and prompt.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        # Attention that does not show its mask to the cache
        options["attention_mask"] = prompt.mask
    for spec in default_candidates(prompt.model) if candidates is None else candidates:
        name, own = parse_cache_spec(spec)
        cache = create_cache(name, prompt.model, **{**options, **own}) if makes_packed_cache(spec) else None
        if not isinstance(cache, PackedCache):
            listed = ", ".join(f"`{each}`" for each in DEFAULT_CANDIDATES)
            raise ValueError(
                f"`candidates` have to be presets of `TransformCodingCache` or `GEARCache`, such as {listed}, but got "
                f"`{spec}`"
            )
        caches[spec] = cache
    return caches
