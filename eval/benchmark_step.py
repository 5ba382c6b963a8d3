"""Time of a whole decode step of a model, for several caches that take turns in one process.

python -m kvcache_plugins.eval.benchmark_step --context 4096 --cache dynamic --cache gear-2bit --text-file FILE
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.memory import measure_memory
from kvcache_plugins.registry import create_cache, parse_cache_spec

from .command_line import load_for_evaluation
from .report import provenance, write_json
from .timing import spread, time_call


@torch.inference_mode()
def main(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable; first: the measure.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --steps tokens.")],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.")] = [4096],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.")] = 40,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Times decode steps side by side."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    network, tokenizer = load_for_evaluation(model)
    token_ids = tokenizer(text_file.read_text(encoding="utf-8"), return_tensors="pt").input_ids.to(network.device)
    if token_ids.shape[1] < max(context) + steps:
        raise typer.BadParameter(f"the text has {token_ids.shape[1]} tokens, but {max(context) + steps} are needed")
    rows: list[dict[str, Any]] = []
    for length in context:
        caches: dict[str, Any] = {}
        for spec in cache:
            name, options = parse_cache_spec(spec)
            caches[spec] = create_cache(name, network, **options)
            network(token_ids[:, :length], past_key_values=caches[spec], logits_to_keep=1)
            typer.echo(f"{length} tokens read through {spec}", err=True)
        seconds: dict[str, list[float]] = {spec: [] for spec in cache}
        for position in range(length, length + steps):
            for spec, instance in caches.items():
                token = token_ids[:, position : position + 1]
                seconds[spec].append(time_call(partial(network, token, past_key_values=instance), network.device))
        first = statistics.median(seconds[cache[0]])
        for spec, instance in caches.items():
            times = spread(seconds[spec])
            lower, median, upper = (times[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
            stats = instance.stats() if callable(getattr(instance, "stats", None)) else {}
            rows.append(
                {
                    "context": length,
                    "cache": spec,
                    **times,
                    "speed_against_first": first / median,
                    "bytes": measure_memory(instance).total_bytes,
                    "stats": stats,
                }
            )
            typer.echo(
                f"{length:6d} tokens, {spec:<16} {median * 1e3:8.1f} ms a token ({lower * 1e3:.1f} to "
                f"{upper * 1e3:.1f}), {first / median:5.2f} times as fast as {cache[0]}"
            )
    if out is not None:
        dtype = str(network.dtype).removeprefix("torch.")
        settings = {"model": model, "steps": steps, "text_file": text_file.name, "dtype": dtype}
        write_json(out, {"benchmark": "step", **provenance(network.device), "settings": settings, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
