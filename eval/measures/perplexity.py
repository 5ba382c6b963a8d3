"""Perplexity against position: a long text goes through a cache a few tokens at a time, and every token is scored.

Nothing is prefilled: each token is scored by what the cache holds of those before it, as in decoding. The scores are
averaged over stretches of 256 tokens, as the papers plot them: errors that pile up show as a gap that widens.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

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
    with_reference,
)
from kvcache_plugins.eval.rows import Content, Found
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import measure_memory


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
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """
    Scores windows of one length through fresh caches, `chunk` tokens a forward, averaged over stretches.

    Yields a row for each cache: perplexity over all tokens and over each stretch of all windows, negative
    log-likelihoods `nll` of each window's stretches, bytes and counters of the last cache at its end.
    """
    for option, value in (("chunk", chunk), ("stretch", stretch)):
        if value < 1:
            raise ValueError(f"`{option}` has to be at least 1 but is {value}")
    for name, factory in factories.items():
        scores = []
        for number, window in enumerate(windows, start=1):
            on_progress(f"{name}, window {number} of {len(windows)}")
            cache = factory()
            scores.append(score_text(model, window, cache, chunk))
        stretches = torch.stack(scores).split(stretch, dim=1)
        yield {
            "cache": name,
            "ppl": math.exp(torch.stack(scores).mean()),
            "ppl_by_stretch": tuple(math.exp(part.mean()) for part in stretches),
            "stretch": stretch,
            "num_scored": windows[0].numel() - 1,
            "nll": torch.stack([part.sum(dim=1) for part in stretches], dim=1).tolist(),
            "memory_at_end": memory_fields(measure_memory(cache)),
            "stats": cache_stats(cache),
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
        yield from measure_perplexity(loaded, cut, factories, chunk=chunk, stretch=stretch, on_progress=announce)
