"""lm-eval's model `kvcache`: tasks through any registered cache, see `docs/guides/evaluation.md`.

Importing this module registers the model. lm-eval's releases with entry points for models find it themselves.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, TypeVar

import lm_eval.models  # noqa: F401 - lm-eval imports its own models only while none at all is registered
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import MODEL_REGISTRY, register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.models.cache_argument import CACHE_NAMES, as_argument
from kvcache_plugins.models.reference_model import resolve_model
from kvcache_plugins.option_checks import check_bool, check_choice, check_integer
from kvcache_plugins.registry import OptionValue, check_cache, create_cache, parse_cache_spec, parse_option

from .continuations import DECODE, CacheRecord, ContinuationScorer, Feeding
from .harness import was_exercised


logger = logging.getLogger(__name__)

MODES = ("auto", "prefix", "chunk", "decode")
NAMES = ("kvcache", "hf-kvcache")
# Arguments of `HFLM` that change scores by rounding alone, if at all
_OF_RUNS = {"batch_size", "max_batch_size", "device"}

Answer = TypeVar("Answer")
# Request of lm-eval: its strings (or `None`), tokens of the context, and tokens of the continuation
Request = tuple[tuple[str, str] | None, list[int], list[int]]
# A context, and the numbers of the requests that have it
Group = tuple[tuple[int, ...], list[int]]


class KVCacheLM(HFLM):
    """
    A Hugging Face model whose keys and values go through a cache of the registry.

    Args:
        pretrained (`str` or `PreTrainedModel`): `smollm2`, `gemma3-270m`, a folder, a hub name, or a model that is
            loaded already.
        cache (`str`, *optional*, defaults to `"dynamic"`): a name of `list_caches()`, with options if need be:
            `gear-2bit:rank=8`.
        cache_mode (`str`, *optional*, defaults to `"auto"`): how scored tokens go through the cache. `prefix`: the
            context in one forward, then each continuation in one. `chunk`: both, `cache_chunk` tokens a forward.
            `decode`: the context in one forward, then continuations token by token. `auto`: `decode` for caches that
            are exact for several new tokens at once (InfiniGen); for others `prefix`, or `chunk` for rolling
            perplexity and without a context.
        cache_chunk (`int`, *optional*, defaults to 64): tokens a forward of `chunk`.
        cache_check (`bool`, *optional*, defaults to `True`): raise an error if no context has exercised the cache: all
            were shorter than its exact buffer, so that scores are those of exact states. Otherwise warn.
        kwargs:
            `cache_` and an option's name sets that option of the cache: `cache_rank=8`. Everything else is of `HFLM`;
            `batch_size="auto"` is the most contexts that fit on a GPU, and 1 on a CPU.

    Raises:
        ValueError: for an unknown cache, option or mode, naming what is accepted, before the model is loaded; for
            `cache_implementation` among a task's generation arguments; for a file of `use_cache` of another setting;
            if the cache was never exercised, with the reason.

    Example:

    ```python
    >>> import lm_eval
    >>> from kvcache_plugins.eval.lm_eval_model import KVCacheLM
    >>> lm = KVCacheLM(model, tokenizer=tokenizer, cache="gear-2bit")
    >>> results = lm_eval.simple_evaluate(model=lm, tasks=["copa"])
    ```
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        cache: str = "dynamic",
        cache_mode: str = "auto",
        cache_chunk: int = 64,
        cache_check: bool = True,
        device: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.cache_name, self.cache_options = take_cache(cache, kwargs)
        check_choice("cache_mode", cache_mode, MODES)
        check_integer("cache_chunk", cache_chunk, 1)
        check_bool("cache_check", cache_check)
        if kwargs.get("backend", "default") == "seq2seq":
            raise ValueError("`backend` has to be `causal`: caches of encoder-decoder models are not served")
        self.cache_mode, self.cache_chunk, self.cache_check = cache_mode, cache_chunk, cache_check
        self._arguments = {
            key: str(getattr(value, "name_or_path", value))
            for key, value in kwargs.items()
            if key not in _OF_RUNS and value is not None
        }
        if isinstance(pretrained, str):
            # `hf` would take "cuda" on a machine without a GPU too
            kwargs["device"] = device or ("cuda" if torch.cuda.is_available() else "cpu")
            # lm-eval looks for the model's type before it loads the tokenizer
            pretrained = resolve_model(pretrained)
        try:
            super().__init__(pretrained, **kwargs)
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            raise ValueError(f"`model_args` has an option that no model of lm-eval takes: {error}") from error
        self._rank, self._world_size = find_rank(self)
        if self.batch_size == "auto" and self.device.type == "cpu":
            # lm-eval begins with 64 of the longest contexts, which takes hours on a CPU
            logger.warning("`batch_size` is 1: `auto` finds what fits on a GPU. On a CPU give a number for more.")
            self.batch_size_per_gpu = 1
        # Record of all calls and processes, after the last call
        self._record = CacheRecord()
        # A cache that this model cannot have raises here, before lm-eval builds requests
        self._decodes_alone = getattr(self._create_cache(), "is_exact_for_many", False)
        self._scorer = ContinuationScorer(
            self._inner_model, self._create_cache, autocast=self._autocast, softmax_dtype=self.softmax_dtype
        )

    @property
    def _inner_model(self) -> PreTrainedModel:
        """The model of Transformers, without the wrappers of adapters."""
        model = self.model
        if isinstance(model, PreTrainedModel):
            return model
        if getattr(model, "active_peft_config", None) is not None and model.active_peft_config.is_prompt_learning:
            raise ValueError("`peft`: adapters that put tokens before the prompt are not served")
        return model.get_base_model()

    def _create_cache(self) -> Cache:
        return create_cache(self.cache_name, self._inner_model, **self.cache_options)

    def _autocast(self) -> AbstractContextManager[object]:
        is_mixed = self.mixed_precision_dtype is not None
        return torch.autocast(self.device.type, dtype=self.mixed_precision_dtype, enabled=is_mixed)

    # Methods that lm-eval calls. A cache that was not exercised raises a `ValueError`

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return self._checked(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._checked(super().loglikelihood_rolling, requests, disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._checked(super().generate_until, requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request, and True if its continuation is greedy, as `HFLM` does."""
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        groups = group_by_context(cut)
        # Windows of rolling perplexity have no strings
        is_rolling = any(strings is None for strings, _, _ in requests)
        fails_early = self.cache_check and not is_rolling and self.world_size == 1
        most_tokens = max((len(context) + len(continuation) for context, continuation in cut), default=0)
        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        ) as progress:
            for batch in self._batches(groups, override_bs, most_tokens):
                contexts = [context for context, _ in batch]
                continuations = [[cut[number][1] for number in numbers] for _, numbers in batch]
                scores = self._scorer.score(contexts, continuations, self._feeding(contexts, is_rolling))
                is_longest = len(contexts[0]) + max(map(len, continuations[0])) == most_tokens
                if fails_early and batch[0] is groups[0] and is_longest:
                    # No later context is longer, even with what is scored behind it: the error can come now
                    self._require_exercise(self._scorer.record)
                for (_, numbers), of_context in zip(batch, scores, strict=True):
                    for number, score in zip(numbers, of_context, strict=True):
                        answers[number] = score.log_likelihood, score.is_greedy
                        strings = requests[number][0]
                        if strings is not None:
                            self.cache_hook.add_partial("loglikelihood", strings, answers[number])
                    progress.update(len(numbers))
        return [answers[number] for number in range(len(requests))]

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one forward through a fresh cache; `batch_size=auto` tries batches by it."""
        with torch.no_grad(), self._autocast():
            return self.model(inps, **as_argument(self._create_cache()), use_cache=True).logits

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        for name in ("cache_implementation", *CACHE_NAMES):
            if name in generation_kwargs:
                raise ValueError(
                    f"`{name}` in `gen_kwargs`: this model's cache is chosen by the model argument `cache`"
                )
        cache = self._create_cache()
        options = {**as_argument(cache), **generation_kwargs}
        output: torch.Tensor = super()._model_generate(context, max_length, stop, **options)
        self._scorer.record.note(cache, num_contexts=context.shape[0], exercised=was_exercised(cache))
        return output

    def set_cache_hook(self, cache_hook: CacheHook) -> None:
        """Use lm-eval's store of responses (`use_cache`); a `ValueError` if it was filled with another setting."""
        store = cache_hook.dbdict
        if store is not None:
            setting = json.dumps(self._describe_setting(), sort_keys=True, default=str)
            key = "kvcache_plugins"
            if len(store) and store.get(key) != setting:
                raise ValueError(
                    "`use_cache` is a file of another model or cache setting: its responses would be taken for those "
                    f"of `{self.cache_name}`. Choose another file for each setting."
                )
            store[key] = setting
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """Return lm-eval's description of the model, with the cache's setting, counters and memory."""
        record = self._record
        cache = {
            **self._describe_setting(),
            "processes": self.world_size,
            "counters": dict(record.counters),
            "memory_of_longest": None if record.largest is None else memory_fields(record.largest),
            "stats_of_longest": dict(record.stats),
        }
        return {**super().get_model_info(), "cache": cache}

    def _describe_setting(self) -> dict[str, Any]:
        """Return everything that a score depends on beside the request."""
        return {
            "model": self.pretrained if isinstance(self.pretrained, str) else self.pretrained.name_or_path,
            "dtype": str(self._inner_model.dtype).removeprefix("torch."),
            "cache": self.cache_name,
            "options": dict(self.cache_options),
            "mode": self.cache_mode,
            "chunk": self.cache_chunk,
            "arguments": dict(self._arguments),
        }

    # Batches of requests

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Cut the beginning of a context that is too long for the model, as `HFLM` does."""
        if not context or not continuation:
            raise ValueError("A request needs at least one token of context and one of continuation")
        if len(continuation) > self.max_length:
            raise ValueError(f"`max_length` is {self.max_length} tokens, but a continuation has {len(continuation)}")
        excess = len(context) + len(continuation) - (self.max_length + 1)
        if excess > 0:
            logger.warning("A context of %d tokens loses its first %d: `max_length`", len(context), excess)
        return context[max(excess, 0) :], continuation

    def _batches(self, groups: list[Group], size: int | None, most_tokens: int) -> list[list[Group]]:
        """Return batches of groups whose contexts are prefilled together; no request has more than `most_tokens`."""
        if not groups:
            return []
        if size is None:
            longest = (None, [0] * (most_tokens - 1), [0])
            size = self._detect_batch_size([longest]) if self.batch_size == "auto" else int(self.batch_size)
        # Contexts of one token fill nothing, and come last, in batches of their own
        first = next((at for at, (context, _) in enumerate(groups) if len(context) == 1), len(groups))
        parts = groups[:first], groups[first:]
        return [part[start : start + size] for part in parts for start in range(0, len(part), size)]

    def _feeding(self, contexts: Sequence[Sequence[int]], is_rolling: bool) -> Feeding:
        mode = self.cache_mode
        if mode == "auto":
            # The last window of rolling perplexity has a context, but is scored like the others
            has_context = any(len(context) > 1 for context in contexts) and not is_rolling
            mode = "decode" if self._decodes_alone else "prefix" if has_context else "chunk"
        chunk = self.cache_chunk
        return {"prefix": Feeding(), "chunk": Feeding(chunk, chunk), "decode": DECODE}[mode]

    # Checks that the cache was in the loop

    def _checked(
        self, answer: Callable[[list[Instance], bool], list[Answer]], requests: list[Instance], disable_tqdm: bool
    ) -> list[Answer]:
        self._scorer.record = CacheRecord()
        answers = answer(requests, disable_tqdm)
        if self.world_size == 1:
            self._check_record()
        return answers

    def barrier(self) -> None:
        """
        Wait for all processes, and check the counters of all: otherwise one would raise while others wait for it.
        lm-eval calls this after every kind of requests, also in a process that has all answers in a store.
        """
        if self.world_size > 1:
            self._check_record()
        super().barrier()

    def _check_record(self) -> None:
        """Merge the record of the last call, in all processes, into that of all calls, and check it."""
        records = [self._scorer.record] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(records, self._scorer.record)
        self._scorer.record = CacheRecord()
        record = merge_records(records)
        self._record = merge_records([self._record, record])
        contexts, exercised = record.counters["contexts"], record.counters["contexts_exercised"]
        if contexts and not exercised:
            self._require_exercise(record)
        elif exercised < contexts:
            text = "%d of %d contexts were too short for the cache `%s` to hold anything but exact states"
            logger.warning(text, contexts - exercised, contexts, self.cache_name)

    def _require_exercise(self, record: CacheRecord) -> None:
        """Raise a `ValueError`, or warn without `cache_check`, if no context of a record has exercised the cache."""
        if record.counters["contexts_exercised"]:
            return
        problem = (
            f"The cache `{self.cache_name}` was not exercised: its contexts (the longest has {record.largest_length} "
            "tokens, with what was scored behind it) are shorter than its exact buffer: scores say nothing about it"
        )
        if self.cache_check:
            raise ValueError(
                f"{problem}. Use longer contexts (more few-shot examples), options with a shorter buffer, another "
                "`cache_mode`, or `cache_check=false` to go on all the same."
            )
        logger.warning("%s.", problem)


def group_by_context(requests: Sequence[tuple[list[int], list[int]]]) -> list[Group]:
    """
    Group requests that share a context, to be prefilled once; contexts of one token are not shared. The longest come
    first, so that too little memory, or contexts that exercise no cache, are errors at the start.
    """
    groups: dict[tuple[tuple[int, ...], int | None], list[int]] = {}
    for number, (context, _) in enumerate(requests):
        groups.setdefault((tuple(context), number if len(context) == 1 else None), []).append(number)

    def order(group: Group) -> tuple[int, int, tuple[int, ...]]:
        context, numbers = group
        return -len(context), -max(len(requests[number][1]) for number in numbers), context

    return sorted(((context, numbers) for (context, _), numbers in groups.items()), key=order)


def take_cache(spec: str, kwargs: dict[str, Any]) -> tuple[str, dict[str, OptionValue]]:
    """Take the cache's options, which begin with `cache_`, out of model arguments; return its name and options."""
    name, options = parse_cache_spec(spec)
    # `cache_dir` is of `from_pretrained`
    for key in [key for key in kwargs if key.startswith("cache_") and key != "cache_dir"]:
        value = kwargs.pop(key)
        option = key.removeprefix("cache_")
        options[option] = parse_option(f"{option}={value}")[1] if isinstance(value, str) else value
    check_cache(name, **options)
    return name, options


def find_rank(model: HFLM) -> tuple[int, int]:
    """Return rank and number of processes; lm-eval's own would have each process on CPUs answer all requests."""
    accelerator = getattr(model, "accelerator", None)
    if accelerator is None:
        return model.rank, model.world_size
    return accelerator.process_index, accelerator.num_processes


def merge_records(records: Sequence[CacheRecord]) -> CacheRecord:
    """Merge records of processes, or of calls: sum counters, and keep memory of the longest cache."""
    counters: Counter[str] = sum((record.counters for record in records), Counter())
    return replace(max(records, key=lambda record: record.largest_length), counters=counters)


# Notebooks import this file again after an edit
if not any(name in MODEL_REGISTRY for name in NAMES):
    register_model(*NAMES)(KVCacheLM)
