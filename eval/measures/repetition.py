"""Repetition in what a model writes through caches: distinct 4-grams, and lengths to the token that ends a text."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import measure_memory


_GRAM = 4


def distinct_share(token_ids: Sequence[int]) -> float:
    """Return the share of 4-grams that are distinct; 1 if there are none."""
    grams = list(zip(*(token_ids[first:] for first in range(_GRAM)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def measure_repetition(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    factories: Mapping[str, harness.CacheFactory],
    num_new: int,
    *,
    seed: int = 42,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """
    Continue `prompts` `[B, tokens]` by up to `num_new` sampled tokens through each cache, from one seed. Yield a row
    for each: `distinct` 4-grams of each text, a share of all; `lengths`, end token included; the number of texts that
    have `ended`; and bytes at the end.
    """
    writer: Any = model
    end = writer.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    mask = torch.ones_like(prompts)
    for name, factory in factories.items():
        on_progress(name)
        cache = factory()
        set_seed(seed)
        found = writer.generate(
            prompts, attention_mask=mask, **as_argument(cache), do_sample=True, max_new_tokens=num_new
        )
        texts = [_until_end(text, ends) for text in found[:, prompts.shape[1] :].tolist()]
        distinct = [distinct_share(text) for text in texts]
        lengths = [len(text) for text in texts]
        yield {
            "cache": name,
            "distinct": distinct,
            "mean_distinct": statistics.fmean(distinct),
            "least_distinct": min(distinct),
            "lengths": lengths,
            "median_length": statistics.median(lengths),
            "ended": sum(text[-1] in ends for text in texts),
            "memory_at_end": memory_fields(measure_memory(cache)),
        }


def _until_end(token_ids: list[int], ends: set[int | None]) -> list[int]:
    """Cut a text behind its first end token, if it has one."""
    stop = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
    return token_ids[: stop + 1]
