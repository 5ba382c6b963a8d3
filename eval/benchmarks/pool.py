"""Time of decode steps whose older tokens lie in memory or on disk, for contexts that no prefill is waited for.

kvcache-plugins bench pool --context 32768 --context 131072 --folder /var/tmp --text-file FILE

The states of a text's first tokens are read by the model once. Repeated up to the context's length they fill every
layer, whose attention then has as many tokens to choose from as after a prompt of that length.

A limit to memory holds for all of it: model, caches and what the system has in memory of a pool's files.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel

from kvcache_plugins.advice.byte_sizes import parse_bytes
from kvcache_plugins.console.inputs import (
    ModelOption,
    NumThreadsOption,
    default_device,
    load_for_evaluation,
    read_text,
)
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.filled_caches import States, fill_cache, read_states
from kvcache_plugins.eval.harness.memory_limit import memory_limit
from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.registry import create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory

from .step import describe, step_rows, time_turns


PLACES = ("memory", "disk")


@torch.inference_mode()
def benchmark_pool(
    text_file: Annotated[Path, typer.Option(help="A text of at least --read + --steps tokens.")],
    folder: Annotated[Path, typer.Option(help="Where pools on disk are.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... with a pool; repeatable.")] = [
        "infinigen",
        "infinigen-gear",
    ],
    place: Annotated[list[str], typer.Option(help="memory or disk; repeatable; they take turns.")] = [
        "memory",
        "disk",
    ],
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [32768],
    model: ModelOption = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    read: Annotated[int, typer.Option(help="Tokens whose states are repeated.", min=64)] = 4096,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 16,
    limit: Annotated[
        str | None, typer.Option("--memory-limit", help='Of the whole process with its files, as "3GB"; by a cgroup.')
    ] = None,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Time decode steps with a pool in memory and on disk.

    The context is filled with the states of a text, repeated: no prefill of that length is run. What a small host
    would do is seen with --place disk and --memory-limit.

    \b
    Examples:
        kvcache-plugins bench pool --text-file book.txt --folder /var/tmp --context 32768 --context 131072
        kvcache-plugins bench pool --text-file book.txt --folder /var/tmp --place disk --memory-limit 3GB
    """
    wrong = [each for each in place if each not in PLACES]
    if wrong:
        raise ValueError(f"`place` has to be one of {list(PLACES)} but got {wrong[0]!r}")
    if not folder.is_dir():
        raise ValueError(f"`folder` has to be a folder that is there, but {folder} is none")
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    limit_bytes = None if limit is None else parse_bytes("memory_limit", limit)
    with memory_limit(limit_bytes):
        rows = _rows(text_file, folder, cache, place, context, model, dtype, read, steps)
    settings = {"model": model, "dtype": dtype, "read": read, "steps": steps, "text_file": text_file.name}
    settings |= {"memory_limit": limit_bytes}
    device = torch.device(default_device())
    return {"benchmark": "pool", **provenance(device), "settings": settings, "rows": rows}


def _rows(
    text_file: Path,
    folder: Path,
    cache: Sequence[str],
    place: Sequence[str],
    context: Sequence[int],
    model: str,
    dtype: str,
    read: int,
    steps: int,
) -> list[dict[str, Any]]:
    network, tokenizer = load_for_evaluation(model, dtype)
    token_ids = tokenizer(read_text(text_file, "text_file"), return_tensors="pt").input_ids.to(network.device)
    if token_ids.shape[1] < read + steps:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {read + steps} are needed")
    states = read_states(network, token_ids[:, :read])
    typer.echo(f"{read} tokens read", err=True)
    rows: list[dict[str, Any]] = []
    for spec in cache:
        for length in context:
            with ExitStack() as stack:
                caches = {
                    each: stack.enter_context(
                        _filled(network, spec, states, length, folder if each == "disk" else None)
                    )
                    for each in place
                }
                typer.echo(f"{spec}: {length} tokens filled in", err=True)
                new_tokens = token_ids[:, read : read + steps]
                for row in step_rows(time_turns(network, caches, new_tokens), caches, length):
                    where = row.pop("cache")
                    mapped = mapped_bytes(folder) if where == "disk" else None
                    rows.append({**row, "cache": spec, "place": where, "mapped_bytes": mapped})
                    rows[-1]["pool_bytes"] = measure_memory(caches[where]).parts["pool"]
                    rows[-1]["load"] = os.getloadavg()[0]
                    typer.echo(describe({**row, "cache": f"{spec}, {where}"}))
    return rows


def _filled(network: PreTrainedModel, spec: str, states: States, length: int, folder: Path | None) -> InfiniGenCache:
    """A cache that holds `length` tokens: those of `states`, again and again."""
    name, options = parse_cache_spec(spec)
    if folder is not None:
        options = {**options, "pool_folder": str(folder)}
    cache = create_cache(name, network, **options)
    if not isinstance(cache, InfiniGenCache):
        raise ValueError(f"`cache` has to keep its tokens in a pool, as `infinigen` does, but got `{spec}`")
    fill_cache(cache, states, length)
    return cache


def mapped_bytes(folder: Path) -> int:
    """Bytes of files below a folder, those without a name too, that count as this process's memory now."""
    total, is_below = 0, False
    for line in _lines_of("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            is_below = str(folder.resolve()) in line
        elif is_below and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def _lines_of(file: str) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        yield from lines
