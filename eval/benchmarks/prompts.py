"""Prompts through caches: read at once and in chunks, what coding them takes, several new tokens behind them, and ways
to continue one of them many times.

In each case caches take turns. Before new tokens a cache is copied, which is not timed, so that all rounds begin with
the same.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from transformers import Cache, PreTrainedModel

from kvcache_plugins import GEARCache
from kvcache_plugins.console.inputs import (
    CachesOption,
    DtypeOption,
    ModelOption,
    NumThreadsOption,
    load_for_evaluation,
    read_text,
)
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings, say
from kvcache_plugins.eval.harness import REFERENCE, cache_factories, make_cache, read_tokens, spread, time_call
from kvcache_plugins.eval.rows import Found
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import measure_memory


# Of ways that hold the same numbers, the largest difference of logits over the largest logit
_TOLERANCE = 1e-3
# A median is taken of these
_FILE_ROUNDS = 3


@contextmanager
def coding_seconds(cache: Cache) -> Iterator[list[float]]:
    """Times every call by which a layer stores a prompt, while this lasts."""
    seconds: list[float] = []
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, PromptLayer)]

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
    Times what caches take for the same tokens, by turns.

    Args:
        network (`PreTrainedModel`): The model.
        makers (`Mapping[str, Callable]`): Makes the cache of each turn.
        token_ids (`torch.Tensor` of shape `[1, tokens]`): What is read.
        chunk (`int`): How many at a time.
        rounds (`int`): Turns of each cache.

    Returns:
        A row for each cache, times and logits against the first, and the last caches, with the tokens in them.
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
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --new-tokens tokens.")],
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 4096,
    new_tokens: Annotated[list[int], typer.Option(help="Tokens that follow it; repeatable.", min=1)] = [
        17,
        128,
        512,
        2048,
    ],
    chunk: Annotated[list[int], typer.Option(help="Chunks that it is read in; repeatable.", min=1)] = [512],
    rounds: Annotated[int, typer.Option(help="Rounds that a median is over.", min=1)] = 3,
    dtype: DtypeOption = None,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Time prompts, chunks of them, and tokens behind them. Times are against those of the first cache.

    What coding them takes is timed too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache gear --context 8192 --chunk 512 --text-file book.txt
    """
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model, dtype)
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


# One long prefix, many continuations: each needs a cache with the prefix in it


@dataclass(kw_only=True, slots=True)
class Way:
    """
    A way to have caches of one prefix, and what was measured of it.

    Args:
        name (`str`), cache (`str`): The way, and the cache that it is a way for.
        make (`Callable[[], Cache]`): Returns a cache that holds the prefix.
        rounds (`int`): How many are made.
        once_s (`dict[str, float]`): Seconds of what was done before, once for all continuations, by what it was.
        save_s (`float`, *optional*), file_bytes (`int`, *optional*): Seconds that writing the file took which it
            reads, in an earlier process if need be, and its size.
    """

    name: str
    cache: str
    make: Callable[[], Cache]
    rounds: int
    once_s: dict[str, float] = field(default_factory=dict)
    save_s: float | None = None
    file_bytes: int | None = None
    # Seconds until each cache was there, and of its continuation; the caches and logits `[tokens, vocabulary]`
    ready_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def row(self, num_continuations: int, prefix: int, dense_logits: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Makes the row of the result; what was not made for every continuation is extrapolated."""
        each, made = spread(self.ready_s), len(self.ready_s)
        is_part = made < num_continuations
        held = measure_memory(self.caches).total_bytes
        return {
            "way": self.name,
            "cache": self.cache,
            "prefix": prefix,
            "num_continuations": num_continuations,
            "num_measured": made,
            "is_extrapolated": is_part,
            "held_bytes": round(held * num_continuations / made) if is_part else held,
            "once_s": self.once_s,
            **each,
            "all_ready_s": sum(self.once_s.values())
            + (num_continuations * each["median_s"] if is_part else sum(self.ready_s)),
            "tokens_s": spread(self.tokens_s),
            "kl": statistics.fmean(map(_mean_kl, dense_logits, self.logits)),
            "save_s": self.save_s,
            "file_bytes": self.file_bytes,
        }


def prefix_ways(
    network: PreTrainedModel, prefix_ids: torch.Tensor, caches: Sequence[str], count: int, rounds: int, folder: Path
) -> Iterator[Way]:
    """Makes the ways to have `count` caches of a prefix `[1, tokens]`, two for each cache."""
    device = network.device

    def fill(spec: str) -> Cache:
        filled = make_cache(spec, network)
        network(prefix_ids, **as_argument(filled), logits_to_keep=1)
        return filled

    for number, spec in enumerate((REFERENCE, *dict.fromkeys(caches))):
        say(f"the prefix is read through {spec}")
        seconds, filled = _timed(partial(fill, spec), device)
        once = {"prefill": seconds}
        if number == 0:
            yield Way(name="prefill again", cache=spec, make=partial(fill, spec), rounds=rounds)
            make = partial(copy.deepcopy, filled)
            yield Way(name="deepcopy", cache=spec, make=make, rounds=count, once_s=once)
            continue
        yield Way(name="fork", cache=spec, make=partial(_fork, filled), rounds=count, once_s=once)
        # What is loaded may go on standing in its file
        path = folder / f"{number}.safetensors"
        saves = [_timed(partial(filled.save, path, network), device) for _ in range(_FILE_ROUNDS)]
        loads = [_timed(partial(GEARCache.load, path, network), device) for _ in range(_FILE_ROUNDS)]
        yield Way(
            name="load and fork",
            cache=spec,
            make=partial(_fork, loads[0][1]),
            rounds=count,
            once_s={"load": statistics.median(seconds for seconds, _ in loads)},
            save_s=statistics.median(seconds for seconds, _ in saves),
            file_bytes=path.stat().st_size,
        )


def _fork(cache: Any) -> Cache:
    forks: list[Cache] = cache.fork(1)
    return forks[0]


def take_ways(network: PreTrainedModel, ways: Sequence[Way], continuations: torch.Tensor) -> None:
    """
    Makes the caches of all ways, the ways by turns, and feeds each its continuation in one forward.

    Args:
        network (`PreTrainedModel`): The model.
        ways (`Sequence[Way]`): Where the measurements are added. Those of one cache have to give the same logits.
        continuations (`torch.Tensor` of shape `[continuations, new_tokens]`): Token ids.

    Raises:
        RuntimeError: If ways of one cache differ: times of others would mean nothing.
    """
    for number, tokens in enumerate(continuations):
        for way in ways:
            if number >= way.rounds:
                continue
            seconds, cache = _timed(way.make, network.device)
            way.ready_s.append(seconds)
            seconds, output = _timed(partial(network, tokens[None], **as_argument(cache)), network.device)
            way.tokens_s.append(seconds)
            way.caches.append(cache)
            way.logits.append(output.logits[0])
    for first, second in zip(ways[::2], ways[1::2], strict=True):
        for expected, found in zip(first.logits, second.logits, strict=False):
            difference = float((expected - found).abs().max() / expected.abs().max())
            # No comparison with NaN holds
            if not difference <= _TOLERANCE:
                raise RuntimeError(
                    f"`{first.name}` and `{second.name}` of `{first.cache}` differ by {difference:.1e} of the largest "
                    "logit: one of them is wrong"
                )


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Times a call; returns also what it returns."""
    returned: list[Any] = []
    seconds = time_call(lambda: returned.append(function()), device)
    return seconds, returned[0]


def _mean_kl(dense_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Computes the mean KL(dense || cache) over the tokens of a continuation, `[new_tokens, vocabulary]`."""
    dense, other = (F.log_softmax(each.double(), dim=-1) for each in (dense_logits, logits))
    return F.kl_div(other, dense, reduction="batchmean", log_target=True).item()


@benchmark("prefix", "{continuations} continuations of {prefix} tokens, {model}")
@torch.inference_mode()
def benchmark_prefix(
    text_file: Annotated[Path, typer.Option(help="A text of --prefix + --continuations * --new-tokens tokens.")],
    cache: Annotated[list[str], typer.Option(help="A GEAR cache: NAME or NAME:key=value,... ; repeatable.")] = [
        "gear-k4v3"
    ],
    model: ModelOption = "smollm2",
    prefix: Annotated[int, typer.Option(help="Tokens that all continuations begin with.", min=1)] = 8000,
    continuations: Annotated[int, typer.Option(help="How many.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each, fed in one forward.", min=1)] = 8,
    prefill_rounds: Annotated[int, typer.Option(help="How often the prefix is prefilled again.", min=1)] = 3,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Compare ways to continue one prefix many times.

    Reading it again, deepcopy, forks, and forks of a saved cache. Every cache stays to the end, when the bytes of all
    are measured: what forks share counts once, and the dense copies are all held too (16 of 8000 tokens of SmolLM2
    take 6 GB in float32). Of prefilling again only some rounds are measured; what all would take is then marked.

    \b
    Examples:
        kvcache-plugins bench prefix --text-file book.txt --out prefix.json
        kvcache-plugins bench prefix --text-file book.txt --prefix 1000 --continuations 4 --cache gear-2bit
    """
    if prefill_rounds > continuations:
        raise ValueError(
            f"`prefill_rounds` has to be at most `continuations`, {continuations}, but got {prefill_rounds}"
        )
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model)
    token_ids = read_tokens(tokenizer, text, prefix + continuations * new_tokens, network.device)
    for spec, factory in cache_factories(cache, network).items():
        if not isinstance(made := factory(), GEARCache):
            raise ValueError(
                f"`cache` has to be a GEAR cache, which can be forked, but `{spec}` is a {type(made).__name__}"
            )
    yield from loaded_settings(network)
    fed = token_ids[0, prefix:].view(continuations, new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        ways = list(prefix_ways(network, token_ids[:, :prefix], cache, continuations, prefill_rounds, Path(folder)))
        # What is compiled or allocated the first time is no way's own
        for way in ways[1:]:
            network(fed[:1], **as_argument(way.make()))
        take_ways(network, ways, fed)
    for way in ways:
        yield way.row(continuations, prefix, ways[1].logits)
