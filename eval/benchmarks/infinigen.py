"""Decode steps of InfiniGen caches: where their time goes, and whether the older tokens lie in memory or on disk."""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.inputs import (
    CachesOption,
    DtypeOption,
    ModelOption,
    NumThreadsOption,
    load_for_evaluation,
    read_text,
)
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings, say
from kvcache_plugins.eval.harness import States, fill_cache, make_cache, read_states, read_tokens
from kvcache_plugins.eval.rows import Content, Found
from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.scoring import ScoringCodes
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory

from .step import step_rows, time_steps


PLACES = ("memory", "disk")
# What is timed, by name: where it stands, and what it is called there. The first two contain others.
_PARTS: dict[str, tuple[Any, str]] = {
    "hooks": (InfiniGenCache, "on_attention_input"),
    "choice": (InfiniGenLayer, "_start_fetch"),
    "speculation": (InfiniGenLayer, "speculate"),
    "scoring": (ScoringCodes, "scores"),
    "attention": (InfiniGenLayer, "attend_selection"),
}


@contextmanager
def _timed(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def time_parts(step: Callable[[int], object], num_steps: int) -> dict[str, float]:
    """Times each part of steps, by number, and what is none of them, the model itself: seconds a step, on a CPU."""
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for part, (owner, name) in _PARTS.items():
            stack.enter_context(_timed(owner, name, part, seconds))
        start = time.perf_counter()
        for number in range(num_steps):
            step(number)
        total = time.perf_counter() - start
    parts = {
        "expected queries": seconds["hooks"] - seconds["speculation"],
        "scoring": seconds["scoring"],
        "choosing": seconds["choice"] - seconds["scoring"],
        "fetching and attention": seconds["attention"],
    }
    parts["the model"] = total - sum(parts.values())
    return {part: value / num_steps for part, value in parts.items()}


@benchmark("step", "Decode steps of {model}, {dtype}")
@torch.inference_mode()
def benchmark_infinigen(
    text_file: Annotated[Path, typer.Option(help="A text of at least --context, or --read, + 2 * --steps tokens.")],
    cache: CachesOption = ["dynamic", "infinigen", "h2o:heavy_ratio=0.05,recent_ratio=0.05"],
    model: ModelOption = "smollm2",
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [8000],
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    folder: Annotated[
        Path | None, typer.Option(help="Where pools on disk are: steps with a pool in memory and on disk instead.")
    ] = None,
    place: Annotated[list[str], typer.Option(help="With --folder: memory or disk; repeatable.")] = ["memory", "disk"],
    read: Annotated[int | None, typer.Option(help="Tokens whose states are repeated up to --context.", min=64)] = None,
    dtype: DtypeOption = None,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Time the parts of InfiniGen's steps, or its pool on disk. Caches take turns.

    With --folder the caches have to keep their tokens in a pool, as `infinigen` does. What a small host would do is
    seen with --place disk and a limit to memory, `systemd-run --scope -p MemoryMax=3G kvcache-plugins bench ...`.

    \b
    Examples:
        kvcache-plugins bench infinigen --text-file book.txt
        kvcache-plugins bench infinigen --cache dynamic --cache infinigen:share=0.05 --text-file book.txt
        kvcache-plugins bench infinigen --folder /var/tmp --cache infinigen --context 65536 --read 4096 \\
            --text-file book.txt
    """
    for each in place:
        check_choice("place", each, PLACES)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"`folder` has to be a folder that is there, but {folder} is none")
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model, dtype)
    num_read = max(context) if read is None else read
    token_ids = read_tokens(tokenizer, text, num_read + 2 * steps, network.device)
    yield from loaded_settings(network)
    states = None if read is None and folder is None else read_states(network, token_ids[:, :num_read])
    for length in context:
        start = length if states is None else num_read
        fed = token_ids[:, start : start + 2 * steps]
        if folder is not None:
            assert states is not None
            for spec in cache:
                yield from _time_places(network, spec, states, length, place, folder, fed[:, :steps])
            continue
        caches: dict[str, Cache] = {}
        for spec in cache:
            caches[spec] = made = make_cache(spec, network)
            if states is None:
                network(token_ids[:, :length], **as_argument(made), logits_to_keep=1)
            else:
                fill_cache(made, states, length)
            say(f"{length} tokens {'read through' if states is None else 'filled into'} {spec}")
        for row in step_rows(time_steps(network, caches, fed[:, :steps])[0], caches, length):
            used = caches[row["cache"]]
            if isinstance(used, InfiniGenCache):
                step = partial(_step, network, used, fed[:, steps:])
                row["parts_s"] = time_parts(step, steps)
            yield row


def _step(network: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, number: int) -> object:
    return network(token_ids[:, number : number + 1], **as_argument(cache))


def _time_places(
    network: PreTrainedModel,
    spec: str,
    states: States,
    length: int,
    places: list[str],
    folder: Path,
    fed: torch.Tensor,
) -> Iterator[Found]:
    """Times steps with a cache's pool in each place."""
    yield Content(benchmark="pool")
    name, options = parse_cache_spec(spec)
    with ExitStack() as stack:
        caches: dict[str, Any] = {}
        for each in places:
            in_folder = {"pool_folder": str(folder)} if each == "disk" else {}
            cache = create_cache(name, network, **options, **in_folder)
            if not isinstance(cache, InfiniGenCache):
                raise ValueError(f"`cache` has to keep its tokens in a pool, as `infinigen` does, but got `{spec}`")
            caches[each] = stack.enter_context(cache)
            fill_cache(cache, states, length)
        say(f"{length} tokens filled into {spec}")
        for row in step_rows(time_steps(network, caches, fed)[0], caches, length):
            where = row.pop("cache")
            mapped = mapped_bytes(folder) if where == "disk" else None
            pool_bytes = measure_memory(caches[where]).parts["pool"]
            load = os.getloadavg()[0]
            yield {
                **row,
                "cache": spec,
                "place": where,
                "mapped_bytes": mapped,
                "pool_bytes": pool_bytes,
                "load": load,
            }


def mapped_bytes(folder: Path) -> int:
    """Counts bytes of files below a folder, those without a name too, that are this process's memory now."""
    total, is_below = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                is_below = str(folder.resolve()) in line
            elif is_below and first == "Rss:":
                total += int(line.split()[1]) * 1024
    return total
