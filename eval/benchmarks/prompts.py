"""Prompts through caches: read at once and in chunks, what coding them takes, and several new tokens behind them.

In each case the caches take turns. Before new tokens a cache is copied, which is not timed, so that all rounds begin
with the same.

    kvcache-plugins bench prompts --cache dynamic --cache gear --text-file FILE --out FILE.json
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

from kvcache_plugins.console.inputs import DtypeOption, ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.timing import spread, time_call
from kvcache_plugins.layers.prompt_layer import PromptLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec


@contextmanager
def coding_seconds(cache: Cache) -> Iterator[list[float]]:
    """Seconds of every call by which a layer stores a prompt, while this lasts."""
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


class Turns:
    """
    What caches take for the same tokens, by turns.

    Args:
        network (`PreTrainedModel`): the model.
        token_ids (`torch.Tensor` of shape `[1, tokens]`): what is read.
        chunk (`int`): how many at a time.
        rounds (`int`): turns of each cache.
    """

    def __init__(self, network: PreTrainedModel, token_ids: torch.Tensor, chunk: int, rounds: int):
        self.network, self.token_ids, self.chunk, self.rounds = network, token_ids, chunk, rounds
        self.seconds: dict[str, list[float]] = {}
        self.coding: dict[str, list[float]] = {}
        self.logits: dict[str, torch.Tensor] = {}
        self.caches: dict[str, Cache] = {}

    def take(self, makers: Mapping[str, Callable[[], Cache]]) -> None:
        """Times the caches that are made."""
        for _ in range(self.rounds):
            for name, make in makers.items():
                self.caches[name] = cache = make()
                with coding_seconds(cache) as coding:
                    seconds = time_call(partial(self._read, name, cache), self.network.device)
                self.seconds.setdefault(name, []).append(seconds)
                self.coding.setdefault(name, []).append(sum(coding) / seconds)

    def _read(self, name: str, cache: Cache) -> None:
        self.logits[name] = read(self.network, cache, self.token_ids, self.chunk)

    def rows(self, what: str, context: int) -> list[dict[str, Any]]:
        """A row for each cache; times and logits are against the first."""
        names = list(self.seconds)
        reference, first = self.logits[names[0]], statistics.median(self.seconds[names[0]])
        return [
            {
                "what": what,
                "context": context,
                "new_tokens": self.token_ids.shape[1],
                "chunk": min(self.chunk, self.token_ids.shape[1]),
                "cache": name,
                **spread(self.seconds[name]),
                "time_against_first": statistics.median(self.seconds[name]) / first,
                "coding_share": statistics.median(self.coding[name]),
                "relative_error": float((self.logits[name] - reference).norm() / reference.norm()),
            }
            for name in names
        ]


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    lower, median, upper = (row[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
    return (
        f"{row['what']}: {row['new_tokens']} tokens behind {row['context']}, {row['chunk']} at a time, "
        f"{row['cache']:<12} {median:7.3f} s ({lower:.3f} to {upper:.3f}), {row['time_against_first']:.2f} times the "
        f"first's, {row['coding_share']:.1%} of it coding"
    )


@torch.inference_mode()
def benchmark_prompts(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable; first: the measure.")],
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
) -> dict[str, Any]:
    """Time prompts, chunks of them, and tokens behind them. What coding them takes is timed too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache gear --context 8192 --chunk 512 --text-file book.txt
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_caches(cache)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model, dtype)
    token_ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    needed = context + max(new_tokens, default=0)
    if token_ids.shape[1] < needed:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {needed} are needed")

    def maker(spec: str) -> Callable[[], Cache]:
        name, options = parse_cache_spec(spec)
        return lambda: create_cache(name, network, **options)

    makers = {spec: maker(spec) for spec in cache}
    for make in makers.values():
        # What compiles on first use
        read(network, make(), token_ids[:, : min(context, 256)], 256)
    rows: list[dict[str, Any]] = []
    whole = Turns(network, token_ids[:, :context], context, rounds)
    for size in (context, *chunk):
        turns = whole if size == context else Turns(network, token_ids[:, :context], size, rounds)
        turns.take(makers)
        rows += turns.rows("prompt" if turns is whole else "chunks", 0)
    for count in new_tokens:
        turns = Turns(network, token_ids[:, context : context + count], count, rounds)
        turns.take({spec: partial(copy.deepcopy, filled) for spec, filled in whole.caches.items()})
        rows += turns.rows("behind", context)
    for row in rows:
        typer.echo(describe(row))
    precision = str(network.dtype).removeprefix("torch.")
    settings = {"model": model, "rounds": rounds, "text_file": text_file.name, "dtype": precision}
    return {"benchmark": "prompts", **provenance(network.device), "settings": settings, "rows": rows}
