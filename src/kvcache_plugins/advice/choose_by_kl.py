"""Choice of the cheapest preset whose KL, measured on the user's own prompt, is within a bound.

The loss of a preset depends on the model and on the text. So the end of the prompt is held out. The tokens before it
are prefilled once, dense, and these keys and values fill every candidate. The held-out tokens then go through the
candidate, and each next-token distribution is compared with the dense one at the same position. They are fed in
chunks, like decoded tokens: if all came at once, each would be exact for those after it.

    t[0] ... t[p-1]              t[p] ... t[n-1]
    prefix: one dense forward    held out: one dense forward, and a few short ones through each candidate

A chat is fed in its order: the first turn is the prefix, and everything after it is held out. Turns that are read go
through a candidate whole, replies in chunks, and replies alone are compared.
"""

import copy
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
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

from .chat_turns import Chat, split_chat
from .memory_prediction import RecordedCall, fill_without_data


# Bounds of the default number of held-out tokens, a quarter of the prompt
_MIN_HELD_OUT = 16
_MAX_HELD_OUT = 128
# Multiple of all usual group sizes
_WHOLE_GROUPS = 1024
# Held-out tokens of a forward through a candidate
_CHUNK = 16


class Turn(NamedTuple):
    """
    Held-out tokens that follow each other.

    Attributes:
        start, stop (`int`): first and last token, exclusive.
        is_scored (`bool`): True if a cache is compared with the dense one here.
    """

    start: int
    stop: int
    is_scored: bool = True


class HeldOutPrompt:
    """
    A prompt whose prefix fills caches and whose last tokens are scored. Its arguments are those of `choose_cache`.

    Attributes:
        turns (`list[Turn]`): the held-out tokens, in one turn.
        prefix_length, held_out (`int`): number of tokens of both parts.
        mask (`torch.Tensor` of shape `[B, prompt length]`, *optional*): 0 for padding; `None` if there is none.
        padding (`torch.Tensor` of shape `[B]`, *optional*): padding of every sequence.
        layers (`list`): after `prefill`, the dense layers of the prefix.
        logits (`list`): after `prefill`, the dense cache's logits `[B, tokens, vocabulary]` of scored turns, `None` of
            others.
    """

    layers: Sequence[object]
    logits: list[torch.Tensor | None]

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        held_out: int | None = None,
    ) -> None:
        self.model = model
        inner = unwrap_model(model)
        self.config: PreTrainedConfig = inner.config
        if model.training:
            raise ValueError("`model` is in training mode, where dropout differs each time: call `model.eval()` first")
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError("`input_ids` has to be a tensor of token ids of shape `[batch_size, prompt length]`")
        self.input_ids = input_ids.to(inner.device)
        self.length = input_ids.shape[1]
        self.held_out = _choose_held_out(held_out, self.length)
        self.prefix_length = self.length - self.held_out
        self.turns = [Turn(self.prefix_length, self.length)]
        self.mask = None
        if attention_mask is not None:
            check_left_padding(attention_mask, input_ids)
            # Most batches have no padding, and attention is faster without a mask
            self.mask = None if bool(attention_mask.all()) else attention_mask.to(inner.device).long()
        self.padding = None if self.mask is None else (self.mask == 0).sum(dim=1)

    def feed(self, cache: Cache, stop: int, *, needs_logits: bool = True) -> torch.Tensor:
        """Feed a cache the tokens before `stop` that it does not hold; return logits `[B, tokens, vocabulary]`."""
        forward = unwrap_model(self.model).forward
        options = reading_options(forward, cache, self.input_ids, self.mask, stop, needs_logits=needs_logits)
        output = self.model(**options)
        if cache.get_seq_length() != stop:
            raise ValueError(
                f"`model` left {cache.get_seq_length()} tokens in the cache after {stop}: it does not go through "
                "`past_key_values` alone, so nothing can be measured"
            )
        return output.logits

    def prefill(self) -> None:
        """Feed the prompt to a dense cache, the prefix first, and keep the layers of the prefix."""
        dense = DynamicCache(config=self.config)
        record_queries(dense, of_windows=True)
        self.feed(dense, self.prefix_length, needs_logits=False)
        # Bounded layers drop tokens, and may write in place: they are copied. The others are cropped after the last
        # turn, so that the prompt is in memory once
        self.layers = [
            layer if isinstance(layer, QueryRecordingLayer) else copy.deepcopy(layer) for layer in dense.layers
        ]
        queries = [layer.queries if isinstance(layer, QueryRecordingLayer) else None for layer in dense.layers]
        self.logits = []
        for turn in self.turns:
            logits = self.feed(dense, turn.stop, needs_logits=turn.is_scored)
            self.logits.append(logits if turn.is_scored else None)
        for layer, own_queries in zip(self.layers, queries, strict=True):
            if isinstance(layer, QueryRecordingLayer) and layer.is_initialized:
                layer.crop(-self.held_out)
                layer.queries = own_queries

    def predict_bytes(self, cache: PackedCache) -> int:
        """
        Predict the bytes, including shared ones, for a prompt in whole groups: the number of tokens that are exact
        because they fill no group does not depend on the preset.
        """
        calls: list[list[RecordedCall]] = []
        for layer in self.layers:
            states = _states_of(layer)
            on_meta = [RecordedCall("update", (states[0].to("meta"), states[1].to("meta")), 2)] if states else []
            calls.append(on_meta)
        empty = copy.deepcopy(cache)
        fill_without_data(empty, calls, len(self.input_ids), -(-self.length // _WHOLE_GROUPS) * _WHOLE_GROUPS)
        memory = empty.memory()
        return memory.total_bytes + sum(memory.shared.values())

    def fill(self, cache: PackedCache) -> None:
        """Fill an empty cache with the prefix; layers that are not compressed become copies of the dense ones."""
        within_prefix = None if self.padding is None else self.padding.clamp(max=self.prefix_length)
        for index, dense in enumerate(self.layers):
            layer = cache.layers[index]
            states = _states_of(dense)
            if type(layer) is DynamicSlidingWindowLayer and isinstance(dense, QueryRecordingLayer):
                if states:
                    layer.update(*states)
            elif not isinstance(layer, CompressedLayer):
                cache.layers[index] = copy.deepcopy(dense)  # type: ignore[call-overload]
            elif states and isinstance(dense, QueryRecordingLayer):
                if layer.policy.num_recorded_queries and dense.queries is not None:
                    # The codec is fitted to the queries of the prompt's attention too
                    layer.update(*states)
                    layer.set_padding(within_prefix)
                    layer.on_exact_attention(AttentionCall(dense.queries, is_causal=True))
                else:
                    layer.load_prompt(*states, within_prefix)
                # Padding of a short sequence may extend into the held-out tokens
                layer.set_padding(self.padding)

    def measure(self, spec: str, cache: PackedCache) -> float:
        """Fill an empty cache, and return its mean KL; a `ValueError` if the prompt is too short to compress."""
        self.fill(cache)
        if not cache.stats()["tokens_compressed"]:
            least = cache.cache_config.shortest_prompt
            raise ValueError(
                f"`input_ids` is too short to measure `{spec}`: of the {self.prefix_length} tokens before the "
                f"{self.held_out} held out it compresses none, as a sequence needs at least {least} there. Give a "
                "longer prompt, or a smaller `held_out`"
            )
        return self.mean_kl(cache)

    def mean_kl(self, cache: PackedCache) -> float:
        """Return the mean KL(dense || cache) over the scored tokens, without padding, of a filled cache."""
        total = 0.0
        num_real = 0
        for turn, exact_logits in zip(self.turns, self.logits, strict=True):
            if exact_logits is None:
                self.feed(cache, turn.stop, needs_logits=False)
                continue
            for start in range(turn.start, turn.stop, _CHUNK):
                stop = min(start + _CHUNK, turn.stop)
                logits = self.feed(cache, stop)
                # One sequence at a time, as a batch of logits in float64 may be large
                for index in range(len(logits)):
                    real = slice(None) if self.mask is None else self.mask[index, start:stop] != 0
                    own = exact_logits[index, start - turn.start : stop - turn.start]
                    exact = F.log_softmax(own[real].double(), dim=-1)
                    log_probs = F.log_softmax(logits[index][real].double(), dim=-1)
                    total += F.kl_div(log_probs, exact, reduction="sum", log_target=True).item()
                    num_real += len(exact)
        return total / num_real


class HeldOutChat(HeldOutPrompt):
    """
    A chat whose first turn fills caches and whose replies are scored. Its arguments are those of `choose_cache`.

    Attributes:
        turns (`list[Turn]`): all turns after the first: a reply, one that is read, and so on.
    """

    def __init__(self, model: PreTrainedModel, chat: Chat, tokenizer: PreTrainedTokenizerBase | None) -> None:
        parts = split_chat(chat, tokenizer)
        input_ids = torch.cat(parts, dim=1)
        super().__init__(model, input_ids, held_out=input_ids.shape[1] - parts[0].shape[1])
        stops = list(accumulate(part.shape[1] for part in parts))
        # Every other turn is a reply
        self.turns = [Turn(*pair, number % 2 == 0) for number, pair in enumerate(pairwise(stops))]

    def measure(self, spec: str, cache: PackedCache) -> float:
        """Fill an empty cache, and return its mean KL; a `ValueError` if the chat is too short to compress."""
        self.fill(cache)
        kl = self.mean_kl(cache)
        # The first turn alone may be too short
        if not cache.stats()["tokens_compressed"]:
            raise ValueError(
                f"`input_ids` is too short for `{spec}`: of the chat's {self.length} tokens it compresses none, "
                f"as a sequence needs at least {cache.cache_config.shortest_prompt}"
            )
        return kl


def _hold_out(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Chat,
    tokenizer: PreTrainedTokenizerBase | None,
    attention_mask: torch.Tensor | None,
    held_out: int | None,
) -> HeldOutPrompt:
    """Divide a prompt or a chat; the arguments are those of `choose_cache`."""
    if not isinstance(input_ids, Sequence):
        return HeldOutPrompt(model, input_ids, attention_mask, held_out)
    if attention_mask is not None or held_out is not None:
        raise ValueError("`attention_mask` and `held_out` are options of a prompt; of a chat replies are scored")
    return HeldOutChat(model, input_ids, tokenizer)


def _states_of(layer: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return keys and values of a layer that holds all tokens, if it holds any."""
    if not isinstance(layer, QueryRecordingLayer) or layer.keys is None or layer.values is None:
        return None
    return layer.keys, layer.values


def _choose_held_out(held_out: int | None, length: int) -> int:
    """Return the number of held-out tokens of a prompt."""
    if held_out is None:
        held_out = max(_MIN_HELD_OUT, min(length // 4, _MAX_HELD_OUT))
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


# Measured presets for which no smaller one is nearer to a dense cache, and one with 8 bits
DEFAULT_CANDIDATES = (
    "transform-16",
    "transform-22",
    "transform",
    "transform-30",
    "gear-k4v3:key_nbits=8,value_nbits=8",
)
# Additional ones for calibrated models
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
    input_ids: torch.Tensor | Chat,
    *,
    max_kl: float = 0.05,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: torch.Tensor | None = None,
    candidates: Sequence[str] | None = None,
    held_out: int | None = None,
) -> PackedCache:
    """
    Return an empty cache of the cheapest candidate whose divergence from a dense cache, measured on the prompt's last
    tokens, is at most `max_kl`. A prompt that is too short for a measurement is an error.

    A chat is measured in the order in which it came: the model reads a turn, and its replies are scored.

    The cost is one dense forward of the prompt, in two parts, and for each candidate that is tried a compression of
    the prompt and a forward of the held-out tokens. A dense cache of the prompt has to fit in memory meanwhile.

    The cache's `stats()` have the choice as `chosen_preset`, `chosen_kl`, `max_kl` and `kl_by_preset` (the candidates
    that were tried, the cheapest first). It is kept by `reset`, copies, `fork`, and `save` and `load`.

    Args:
        model (`PreTrainedModel`): the model, in eval mode.
        input_ids (`torch.Tensor` of shape `[batch_size, prompt length]`, or `Sequence`): the prompt, or a chat:
            messages with a `role` and `content`, or token ids `[1, tokens]` that are read and replied by turns. One
            choice can serve many similar prompts.
        max_kl (`float`, *optional*, defaults to 0.05): largest mean of KL(dense || cache), in nats, over the held-out
            tokens of all sequences, without padding.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): tokenizer of a chat of messages, whose template it has.
        attention_mask (`torch.Tensor` of shape `[batch_size, prompt length]`, *optional*): 0 for padding, which has to
            be on the left, and 1 for tokens. There is no padding by default.
        candidates (`Sequence[str]`, *optional*): presets of `TransformCodingCache` or `GEARCache`, with options as
            `name:key=value,key=value`, in any order. Defaults to the presets of transform coding (calibrated
            ones too, if the model has a calibration), and one of 8 bits.
        held_out (`int`, *optional*): tokens at the prompt's end that are scored. Defaults to a quarter of the prompt,
            at least 16 and at most 128.

    Returns:
        `TransformCodingCache` or `GEARCache`: empty, for `generate` or a forward of the whole prompt.

    Raises:
        ValueError: if no candidate meets the bound, naming the KL of each; if the prompt is too short for a candidate
            to compress anything of it; or if an argument is not accepted.

    Example:

    ```python
    >>> from kvcache_plugins import choose_cache
    >>> cache = choose_cache(model, inputs.input_ids, max_kl=0.02)
    >>> cache.stats()["chosen_preset"]
    >>> model.generate(**inputs, past_key_values=cache)
    >>> cache = choose_cache(model, messages, tokenizer=tokenizer)
    ```
    """
    check_number("max_kl", max_kl, above=0.0)
    prompt = _hold_out(model, input_ids, tokenizer, attention_mask, held_out)
    caches = _create_candidates(prompt, candidates)
    prompt.prefill()
    kl_by_preset: dict[str, float] = {}
    for spec in sorted(caches, key=lambda spec: prompt.predict_bytes(caches[spec])):
        kl_by_preset[spec] = prompt.measure(spec, copy.deepcopy(caches[spec]))
        # False for NaN
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


@torch.no_grad()
def measure_kl(
    model: PreTrainedModel,
    input_ids: torch.Tensor | Chat,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    attention_mask: torch.Tensor | None = None,
    candidates: Sequence[str] | None = None,
    held_out: int | None = None,
) -> dict[str, float]:
    """
    Return the KL of every candidate on a prompt or chat, as [`choose_cache`] measures it with the same arguments; for
    [`recommend`].
    """
    prompt = _hold_out(model, input_ids, tokenizer, attention_mask, held_out)
    caches = _create_candidates(prompt, candidates)
    prompt.prefill()
    return {spec: prompt.measure(spec, cache) for spec, cache in caches.items()}


def default_candidates(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the default candidates for a model, which may be wrapped."""
    is_calibrated = find_calibration(unwrap_model(model)) is not None
    return DEFAULT_CANDIDATES + (CALIBRATED_CANDIDATES if is_calibrated else ())


def _create_candidates(prompt: HeldOutPrompt, candidates: Sequence[str] | None) -> dict[str, PackedCache]:
    if isinstance(candidates, str) or (candidates is not None and not candidates):
        raise ValueError(f"`candidates` has to be a sequence of names of caches but got {candidates!r}")
    caches = {}
    options: dict[str, object] = {}
    if prompt.mask is not None and prompt.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
        # Other attention implementations may not show their mask to the cache
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
