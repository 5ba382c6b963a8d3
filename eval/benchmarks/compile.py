"""Gain of a decode step by `torch.compile` of the model: static shapes for Transformers' `StaticCache`, growing ones,
with a graph break a layer, for a compressed cache.

kvcache-plugins bench compile --cache gear-2bit --text-file FILE
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, StaticCache

from kvcache_plugins.console.inputs import ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.timing import spread, time_call
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec


# Steps in which everything is compiled and recompiled
_WARM_UP = 6


@torch.inference_mode()
def benchmark_compile(
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --steps + 6 tokens.")],
    cache: Annotated[str, typer.Option(help="NAME or NAME:key=value,...: beside `StaticCache`.")] = "gear-2bit",
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 20,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Time decode steps of a model as it is and compiled. Caches take turns. On a CPU this needs a C++ compiler.

    \b
    Example:
        kvcache-plugins bench compile --text-file book.txt
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_caches([cache])
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model)
    total = context + _WARM_UP + steps
    token_ids = tokenizer(text, return_tensors="pt").input_ids[:, :total]
    if token_ids.shape[1] < total:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {total} are needed")
    token_ids = token_ids.to(network.device)
    name, options = parse_cache_spec(cache)

    def static() -> Cache:
        return StaticCache(config=network.config, max_cache_len=total)

    forward: Callable[..., Any] = network.forward
    runs: dict[str, tuple[Cache, Callable[..., Any]]] = {
        "dynamic": (create_cache("dynamic", network), forward),
        "static": (static(), forward),
        "static, compiled": (static(), torch.compile(forward, dynamic=False)),
        cache: (create_cache(name, network, **options), forward),
        f"{cache}, compiled": (create_cache(name, network, **options), torch.compile(forward, dynamic=True)),
    }
    for run, (instance, _) in runs.items():
        typer.echo(f"{run} reads {context} tokens", err=True)
        network(token_ids[:, :context], **as_argument(instance), logits_to_keep=1)
    seconds: dict[str, list[float]] = {run: [] for run in runs}
    typer.echo(f"{_WARM_UP} steps that compile, then {steps} that count", err=True)
    for position in range(context, total):
        place = torch.tensor([[position]], device=network.device)
        for run, (instance, function) in runs.items():
            step = partial(
                function, token_ids[:, position : position + 1], **as_argument(instance), position_ids=place
            )
            seconds[run].append(time_call(step, network.device))
    rows: list[dict[str, Any]] = []
    dynamic = statistics.median(seconds["dynamic"][_WARM_UP:])
    for run, times in seconds.items():
        row = spread(times[_WARM_UP:])
        speed = dynamic / row["median_s"]
        rows.append({"cache": run, **row, "first_step_s": times[0], "speed_against_dynamic": speed})
        typer.echo(
            f"{run:<24} {1e3 * row['median_s']:8.1f} ms a token ({1e3 * row['lower_quartile_s']:.1f} to "
            f"{1e3 * row['upper_quartile_s']:.1f}), first step {times[0]:.1f} s"
        )
    settings = {"model": model, "context": context, "steps": steps, "text_file": text_file.name}
    return {"benchmark": "compile", **provenance(network.device), "settings": settings, "rows": rows}
