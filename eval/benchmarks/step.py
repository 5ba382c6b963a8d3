"""Time of a whole decode step of a model, for several caches that take turns in one process.

kvcache-plugins bench step --context 4096 --cache dynamic --cache gear --text-file FILE

The context is the text's, read by the model through each cache; or, with `read`, the states of its first tokens,
repeated, where a prefill would take far longer than the steps.
"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.inputs import DtypeOption, ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.caches import cache_stats
from kvcache_plugins.eval.harness.filled_caches import fill_cache, read_states
from kvcache_plugins.eval.harness.timing import spread, time_call
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory


def time_turns(
    network: PreTrainedModel,
    caches: Mapping[str, Cache],
    token_ids: torch.Tensor,
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
    is_time_up: Callable[[], bool] = lambda: False,
) -> dict[str, list[float]]:
    """
    Seconds of every decode step of each cache; the caches take turns.

    Args:
        network (`PreTrainedModel`): the model.
        caches (`Mapping[str, Cache]`): caches that hold the context already.
        token_ids (`torch.Tensor` of shape `[batch_size, steps]`): what is fed, a token a step.
        guard (`Callable`, *optional*): entered with a cache's name around each of its steps. A cache whose step it
            ends early takes no further turns.
        is_time_up (`Callable[[], bool]`, *optional*): asked before each round whether it is to be the end.
    """
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    racing = list(caches)
    for position in range(token_ids.shape[1]):
        if is_time_up():
            break
        token = token_ids[:, position : position + 1]
        for name in racing:
            with guard(name):
                step = partial(network, token, **as_argument(caches[name]))
                seconds[name].append(time_call(step, network.device))
        racing = [name for name in racing if len(seconds[name]) > position]
    return seconds


def step_rows(seconds: Mapping[str, list[float]], caches: Mapping[str, Cache], context: int) -> list[dict[str, Any]]:
    """A row for each cache that took at least three turns; speeds are against the first of them."""
    measured = {name: times for name, times in seconds.items() if len(times) > 2}
    first = statistics.median(next(iter(measured.values()), [1.0]))
    return [
        {
            "context": context,
            "cache": name,
            **spread(times),
            # What a token costs with its share of compressing a chunk; a median leaves that out
            "mean_s": statistics.fmean(times),
            "speed_against_first": first / statistics.median(times),
            "bytes": measure_memory(caches[name]).total_bytes,
            "stats": cache_stats(caches[name]),
        }
        for name, times in measured.items()
    ]


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    lower, median, upper = (1e3 * row[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
    return (
        f"{row['context']:6d} tokens, {row['cache']:<16} {median:8.2f} ms a token ({lower:.2f} to {upper:.2f}), "
        f"{row['speed_against_first']:5.2f} times as fast as the first"
    )


@torch.inference_mode()
def benchmark_steps(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable; first: the measure.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --context, or --read, + --steps tokens.")],
    model: ModelOption = "smollm2",
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [4096],
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    dtype: DtypeOption = None,
    read: Annotated[int | None, typer.Option(help="Tokens whose states are repeated up to --context.", min=64)] = None,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Time whole decode steps of a model. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench step --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench step --cache dynamic --cache quanto-4bit --context 1024 --text-file book.txt --out s.json
        kvcache-plugins bench step --cache dynamic --cache gear --context 65536 --read 4096 --text-file book.txt
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_caches(cache)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model, dtype)
    token_ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    num_read = max(context) if read is None else read
    if token_ids.shape[1] < num_read + steps:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {num_read + steps} are needed")
    states = None if read is None else read_states(network, token_ids[:, :read])
    rows: list[dict[str, Any]] = []
    for length in context:
        caches: dict[str, Cache] = {}
        for spec in cache:
            name, options = parse_cache_spec(spec)
            caches[spec] = create_cache(name, network, **options)
            if states is None:
                network(token_ids[:, :length], **as_argument(caches[spec]), logits_to_keep=1)
            else:
                fill_cache(caches[spec], states, length)
            typer.echo(f"{length} tokens {'read through' if read is None else 'filled into'} {spec}", err=True)
        start = length if read is None else read
        rows += step_rows(time_turns(network, caches, token_ids[:, start : start + steps]), caches, length)
        for row in rows[-len(caches) :]:
            typer.echo(describe(row))
    precision = str(network.dtype).removeprefix("torch.")
    settings = {"model": model, "steps": steps, "text_file": text_file.name, "dtype": precision}
    if read is not None:
        settings["read"] = read
    return {"benchmark": "step", **provenance(network.device), "settings": settings, "rows": rows}
