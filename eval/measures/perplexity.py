"""Perplexity against position: a long text goes through a cache a few tokens at a time, and every token is scored.

Nothing is prefilled: each token is scored by what the cache holds of those before it, as in decoding. The scores are
averaged over stretches of 256 tokens, as the papers plot them: errors that pile up show as a gap that widens.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.inputs import DeviceOption, DtypeOption, ModelOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval.benchmark import benchmark
from kvcache_plugins.eval.harness import (
    CacheFactory,
    cache_factories,
    cache_stats,
    check_is_empty,
    check_length,
    encode_text,
    spread_windows,
    stretch_stops,
    with_reference,
)
from kvcache_plugins.eval.rows import Content, Found
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """
    A cache on all windows.

    Args:
        nll (`tuple[tuple[float, ...], ...]`): Negative log-likelihood in nats of each window's stretches, summed.
        stretch (`int`): Tokens of a stretch; the last of a window may have fewer.
        num_scored (`int`): Scored tokens of a window.
        memory (`MemoryReport`): What the last window's cache held at its end.
        stats (`dict`): Its counters.
    """

    nll: tuple[tuple[float, ...], ...]
    stretch: int
    num_scored: int
    memory: MemoryReport
    stats: dict[str, StatValue]

    @property
    def ppl(self) -> float:
        """Over all scored tokens."""
        return math.exp(sum(map(sum, self.nll)) / (self.num_scored * len(self.nll)))

    @property
    def ppl_by_stretch(self) -> tuple[float, ...]:
        """Over each stretch of all windows."""
        stops = [0, *stretch_stops(self.stretch, self.num_scored)]
        lengths = [stop - start for start, stop in zip(stops, stops[1:], strict=False)]
        sums = map(sum, zip(*self.nll, strict=True))
        return tuple(math.exp(total / (length * len(self.nll))) for total, length in zip(sums, lengths, strict=True))


@torch.no_grad()
def score_text(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache, chunk: int) -> torch.Tensor:
    """
    Feeds `[num_tokens]` but its last, `chunk` tokens a forward, to the model through an empty cache.

    Returns:
        `torch.Tensor` of shape `[num_tokens - 1]`: negative log-likelihood in nats of all but the first, float64.
    """
    check_is_empty(cache)
    fed, targets = token_ids[:-1].to(model.device), token_ids[1:].to(model.device)
    parts = []
    for part, wanted in zip(fed.split(chunk), targets.split(chunk), strict=True):
        logits = model(input_ids=part[None], **as_argument(cache), use_cache=True).logits[0]
        parts.append(F.cross_entropy(logits.double(), wanted, reduction="none").cpu())
    check_length(cache, fed.numel())
    return torch.cat(parts)


def measure_perplexity(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    factories: Mapping[str, CacheFactory],
    *,
    chunk: int = 1,
    stretch: int = 256,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Perplexity]:
    """
    Scores windows of text through caches.

    Args:
        model (`PreTrainedModel`): The model, in eval mode.
        windows (`Sequence[torch.Tensor]`): Token ids of one length each.
        factories (`Mapping[str, Callable]`): Returns a fresh cache for every window, by the name of the result's row.
        chunk (`int`, *optional*, defaults to 1): Tokens a forward.
        stretch (`int`, *optional*, defaults to 256): Tokens over which scores are averaged.
        on_progress (`Callable[[str], None]`, *optional*): Called before each window of each cache.
    """
    for name, value in (("chunk", chunk), ("stretch", stretch)):
        if value < 1:
            raise ValueError(f"`{name}` has to be at least 1 but is {value}")
    results = {}
    for name, factory in factories.items():
        nll = []
        for number, window in enumerate(windows, start=1):
            if on_progress is not None:
                on_progress(f"{name}, window {number} of {len(windows)}")
            cache = factory()
            scores = score_text(model, window, cache, chunk)
            nll.append(tuple(float(part.sum()) for part in scores.split(stretch)))
        results[name] = Perplexity(
            nll=tuple(nll),
            stretch=stretch,
            num_scored=windows[0].numel() - 1,
            memory=measure_memory(cache),
            stats=cache_stats(cache),
        )
    return results


def perplexity_fields(cache: str, result: Perplexity) -> dict[str, object]:
    """Makes a row of a result."""
    return {
        "cache": cache,
        "ppl": result.ppl,
        "ppl_by_stretch": result.ppl_by_stretch,
        "stretch": result.stretch,
        "num_scored": result.num_scored,
        "nll": result.nll,
        "memory_at_end": memory_fields(result.memory),
        "stats": result.stats,
    }


@benchmark("perplexity")
def evaluate_perplexity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable; `dynamic` comes first.")],
    model: ModelOption = "smollm2",
    length: Annotated[int, typer.Option(help="Tokens scored in each window.", min=2)] = 2048,
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 1,
    chunk: Annotated[int, typer.Option(help="Tokens a forward; 1 is decode.", min=1)] = 1,
    stretch: Annotated[int, typer.Option(help="Tokens over which scores are averaged.", min=1)] = 256,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
) -> Iterator[Found]:
    """Perplexity against position. Texts are decoded through each cache from the first token on.

    \b
    Examples:
        kvcache-plugins eval perplexity --text-file book.txt --cache gear --cache kivi-4bit --chunk 64
    """
    text = read_text(text_file, "text_file")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    # One token comes before the first that is scored
    cut = spread_windows(token_ids, windows, 1 + len(start_ids), length - 1 - len(start_ids), start_ids)
    factories = cache_factories(with_reference(cache), loaded)
    yield Content(device=loaded.device)
    with track_progress(len(cut) * len(factories)) as announce:
        results = measure_perplexity(loaded, cut, factories, chunk=chunk, stretch=stretch, on_progress=announce)
    for name, result in results.items():
        yield perplexity_fields(name, result)
