"""Every check and benchmark that wants a GPU, in one run of less than ten minutes.

    python -m kvcache_plugins.eval.gpu --out FOLDER

First the kernels' tests run on the GPU; a failure ends the run, and nothing is timed. Then attention alone (the shapes
of an 8B Llama at batch 16 and 32k tokens, and smaller ones), then the largest batch that fits a fixed budget. Each
step writes its own JSON file as soon as it is done, so that a run that is cut short leaves what it has.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from kvcache_plugins.memory import measure_memory
from kvcache_plugins.registry import create_cache

from . import benchmark_kernels
from .report import provenance, write_json


_TESTS = ("tests/triton_kernels/test_attention.py", "tests/triton_kernels/test_compression.py")
# Name of the result, items, tokens
_ATTENTION = (("small", 1, 4096), ("medium", 4, 16384), ("large", 16, 32768))
_BUDGET = 40 * 2**30


def _check_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *_TESTS], check=True, env=environment)


@torch.inference_mode()
def _bytes_per_item(cache_name: str, context: int, num_layers: int) -> float:
    """Bytes that one sequence holds in a model of `num_layers` layers with 8 key/value heads of 128, measured."""
    layer_cache = create_cache(cache_name)
    states = torch.randn(1, 8, context, 128, device="cuda", dtype=torch.bfloat16)
    layer_cache.update(states, states, 0)
    return measure_memory(layer_cache).total_bytes * num_layers


@torch.inference_mode()
def _measure_batches(out: Path, context: int = 4096, num_layers: int = 32) -> None:
    """The largest batch whose cache fits the budget, by bytes held, and the allocator's peak for one item."""
    rows = []
    for name in ("dynamic", "gear-4bit", "gear-2bit", "kivi-2bit"):
        torch.cuda.reset_peak_memory_stats()
        per_item = _bytes_per_item(name, context, num_layers)
        peak = torch.cuda.max_memory_allocated()
        rows.append(
            {"cache": name, "bytes_per_item": per_item, "largest_batch": int(_BUDGET // per_item), "peak": peak}
        )
        typer.echo(f"{name:<12} {per_item / 2**20:8.1f} MiB a sequence: {int(_BUDGET // per_item)} in 40 GiB")
    settings = {"context": context, "num_layers": num_layers, "budget": _BUDGET}
    write_json(out, {"benchmark": "batch", **provenance(torch.device("cuda")), "settings": settings, "rows": rows})


def main(out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("eval/results")) -> None:
    """Checks, then times, everything that wants a GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("there is no CUDA device here")
    start = time.monotonic()
    _check_kernels()
    for name, batch_size, context in _ATTENTION:
        typer.echo(f"[{time.monotonic() - start:.0f} s] attention, {batch_size} x {context}")
        benchmark_kernels.main(
            context=context,
            batch_size=batch_size,
            dtype="bfloat16",
            device="cuda",
            num_threads=None,
            num_heads=8,
            groups=4,
            head_dim=128,
            rounds=50,
            out=out / f"gpu_attention_{name}.json",
        )
    typer.echo(f"[{time.monotonic() - start:.0f} s] largest batch")
    _measure_batches(out / "gpu_largest_batch.json")
    typer.echo(f"[{time.monotonic() - start:.0f} s] done")


if __name__ == "__main__":
    typer.run(main)
