"""Prompts through caches: read at once and in chunks, what coding them takes, and several new tokens behind them.

In each case caches take turns. Before new tokens a cache is copied, which is not timed, so that all rounds begin with
the same.
"""

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console import inputs
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings, say
from kvcache_plugins.eval.harness import cache_factories, read_tokens, spread, time_call
from kvcache_plugins.eval.rows import Found
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument


_NEW_TOKENS = [17, 128, 512, 2048]


@contextmanager
def coding_seconds(cache: Cache) -> Iterator[list[float]]:
    """Times every call by which a layer stores a prompt, while this lasts."""
    seconds: list[float] = []
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, LazyLayer)]

    def timed(settle: Callable[[], None]) -> None:
        start = time.perf_counter()
        settle()
        seconds.append(time.perf_counter() - start)

    for layer in layers:
        layer.settle_prompt = partial(timed, layer.settle_prompt)
    try:
        yield seconds
    finally:
        for layer in layers:
            del layer.settle_prompt


def read(network: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Reads tokens `[1, tokens]` into a cache, `chunk` at a time; returns the last one's logits."""
    logits = torch.empty(0)
    for part in token_ids.split(chunk, dim=1):
        logits = network(part, **as_argument(cache), logits_to_keep=1).logits[0, -1].float()
    return logits


def time_reading(
    network: PreTrainedModel,
    makers: Mapping[str, Callable[[], Cache]],
    token_ids: torch.Tensor,
    chunk: int,
    rounds: int,
) -> tuple[list[dict[str, Any]], dict[str, Cache]]:
    """
    Times what caches take for the same tokens `[1, tokens]`, `chunk` of them at a time, by turns; a maker makes each
    turn's.

    Returns a row for each cache, times and logits against the first, and the last caches, with the tokens in them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    coding: dict[str, list[float]] = {name: [] for name in makers}
    logits: dict[str, torch.Tensor] = {}
    caches: dict[str, Cache] = {}

    def turn(name: str) -> None:
        logits[name] = read(network, caches[name], token_ids, chunk)

    for _ in range(rounds):
        for name, make in makers.items():
            caches[name] = make()
            with coding_seconds(caches[name]) as coded:
                seconds[name].append(time_call(partial(turn, name), network.device))
            coding[name].append(sum(coded) / seconds[name][-1])
    reference, first = next(iter(logits.values())), next(iter(seconds.values()))
    rows = [
        {
            "new_tokens": token_ids.shape[1],
            "chunk": min(chunk, token_ids.shape[1]),
            "cache": name,
            **spread(times),
            "time_against_first": statistics.median(times) / statistics.median(first),
            "coding_share": statistics.median(coding[name]),
            "relative_error": float((logits[name] - reference).norm() / reference.norm()),
        }
        for name, times in seconds.items()
    ]
    return rows, caches


@benchmark("prompts", "Prompts of {model}, {dtype}")
@torch.inference_mode()
def benchmark_prompts(
    cache: inputs.CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --new-tokens tokens.")],
    model: inputs.ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 4096,
    new_tokens: Annotated[list[int], typer.Option(help="Tokens that follow it; repeatable.", min=1)] = _NEW_TOKENS,
    chunk: Annotated[list[int], typer.Option(help="Chunks that it is read in; repeatable.", min=1)] = [512],
    rounds: Annotated[int, typer.Option(help="Rounds that a median is over.", min=1)] = 3,
    dtype: inputs.DtypeOption = None,
    num_threads: inputs.NumThreadsOption = None,
) -> Iterator[Found]:
    """Time prompts, chunks of them, and tokens behind them. Times are against those of the first cache.

    What coding them takes is timed too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache gear --context 8192 --chunk 512 --text-file book.txt
    """
    text = inputs.read_text(text_file, "text_file")
    network, tokenizer = inputs.load_for_evaluation(model, dtype)
    token_ids = read_tokens(tokenizer, text, context + max(new_tokens, default=0), network.device)
    makers = cache_factories(cache, network)
    yield from loaded_settings(network)
    for make in makers.values():
        # What compiles on first use
        read(network, make(), token_ids[:, : min(context, 256)], 256)
    held: dict[str, Cache] = {}
    for size in (context, *chunk):
        say(f"{context} tokens, {size} at a time")
        rows, caches = time_reading(network, makers, token_ids[:, :context], size, rounds)
        held = held or caches
        for row in rows:
            yield {"what": "prompt" if size == context else "chunks", "context": 0, **row}
    for count in new_tokens:
        say(f"{count} tokens behind {context}")
        copies = {spec: partial(copy.deepcopy, filled) for spec, filled in held.items()}
        for row in time_reading(network, copies, token_ids[:, context : context + count], count, rounds)[0]:
            yield {"what": "behind", "context": context, **row}
