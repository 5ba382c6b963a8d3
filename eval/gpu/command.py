"""Every check and benchmark that wants a GPU, in one run of less than ten minutes.

    kvcache-plugins bench gpu --out FOLDER

Seven parts, each in a process of its own, so that one that crashes or hangs takes nothing with it:

- `checks`: the kernels' tests, on the GPU;
- `presets`: attention of every GEAR preset over what it has stored of a prompt and of decoded tokens;
- `attention`: decode attention alone, from compressed storage and by PyTorch's own kernels;
- `step`: whole decode steps of a model with the shapes of an 8B Llama and random weights, caches taking turns;
- `captured`: the same steps of GEAR caches as CUDA graphs, beside those without;
- `infinigen`: decode steps over 32768 tokens in host memory, against offloading all of them and having all at hand;
- `batch`: the largest batch that fits into 40 GiB, its throughput and its peak.

What does not agree with plain PyTorch is not timed. Every part writes its JSON
files row by row and has its share of the time; what it leaves goes to those after it. What failed, and what was
skipped for want of time, stands in the files too. The sizes of a run are the defaults of the parts' functions.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.eval.benchmarks.kernels import Shape
from kvcache_plugins.option_checks import check_choice

from .memory_parts import measure_offloading, search_largest_batches
from .parts import llama, run_presets, run_tests, time_attention, time_captured, time_whole_steps
from .report import PartialReport, Run, TimeBox, TimeIsUpError


# In order, with shares of the time limit
PARTS: dict[str, tuple[Callable[..., None], float]] = {
    "checks": (run_tests, 0.16),
    "presets": (run_presets, 0.14),
    "attention": (time_attention, 0.20),
    "step": (time_whole_steps, 0.14),
    "captured": (time_captured, 0.11),
    "infinigen": (measure_offloading, 0.13),
    "batch": (search_largest_batches, 0.12),
}
_SMALL, _WHOLE = llama(128, 64, 64, 1, 4, 2, 1024), llama(128, 128, 128, 1, 2, 1, 1024)
# Sizes that prove the script on any machine
TINY: dict[str, dict[str, Any]] = {
    "checks": {"tests": ("tests/triton_kernels/test_attention.py", "-k", "no_tokens")},
    "presets": {
        "presets": ("gear", "gear-t16:quantizer=trellis", "gear-c16", "gear-2bit"),
        "model": _SMALL,
        "tokens": (70, 64, 1),
    },
    "attention": {
        "shapes": {"large": Shape(batch_size=1, context=128, num_heads=1, groups=2, head_dim=64)},
        "caches": ("gear-2bit", "gear-l-2bit", "gear-t25"),
        "rounds": 3,
    },
    "step": {
        "model": _WHOLE,
        "context": 128,
        "steps": 3,
        "caches": ("dynamic", "gear", "gear-2bit", "static", "no-such-cache"),
    },
    "captured": {
        "model": _WHOLE,
        "context": 128,
        "steps": 3,
        "caches": ("gear",),
    },
    "infinigen": {
        "model": llama(128, 64, 64, 4, 2, 2, 1024),
        "context": 100,
        "steps": 4,
        "caches": ("dynamic", "infinigen:share=0.1", "infinigen-gear:share=0.1", "offloaded"),
    },
    # One dense sequence and a half
    "batch": {
        "model": _WHOLE,
        "budget_bytes": 26_000,
        "context": 64,
        "steps": 3,
        "caches": ("dynamic", "gear-2bit"),
    },
}
# Seconds between the end of a part's time, when it begins nothing new, and the end of its process
_GRACE = 15.0


def run_on_gpu(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("eval/results"),
    limit: Annotated[float, typer.Option(help="Seconds that all of it may take.", min=1)] = 570.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the script; no GPU needed.")] = False,
    part: Annotated[str | None, typer.Option(help="One part only, in this process: checks, presets, ...")] = None,
) -> None:
    """Check and time all that wants a GPU. For the root of the repository, whose tests it runs.

    \b
    Examples:
        kvcache-plugins bench gpu
        kvcache-plugins bench gpu --part attention --out /tmp/results
        TRITON_INTERPRET=1 KVCACHE_PLUGINS_KERNELS=triton kvcache-plugins bench gpu --tiny --out /tmp/results
    """
    if part is not None:
        check_choice("part", part, tuple(PARTS))
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise ValueError("torch finds no CUDA device; `--tiny` tries the script without one")
    if part is not None:
        PARTS[part][0](Run(out, device, TimeBox(limit)), **(TINY[part] if tiny else {}))
        return
    report = PartialReport(out / "gpu_run.json", "run", device, {"limit": limit, "tiny": tiny})
    whole, planned = TimeBox(limit), 0.0
    for name, (_, share) in PARTS.items():
        planned += share * limit
        seconds = whole.left - (limit - planned)
        typer.echo(f"[{limit - whole.left:4.0f} s] {name}, {seconds:.0f} s at most")
        start = time.monotonic()
        with report.attempt(name):
            _run_part(name, out, seconds, tiny, device)
        report.add({"part": name, "seconds": time.monotonic() - start, "limit": seconds})
    typer.echo(
        f"[{limit - whole.left:4.0f} s] done: {len(report.failures)} parts ended early; what failed is in {out} too"
    )


def _run_part(name: str, out: Path, seconds: float, tiny: bool, device: torch.device) -> None:
    """
    Runs a part in a process.

    Raises:
        TimeIsUpError: if it had to be ended.
        CalledProcessError: if it failed as a whole; what it printed has been shown.
    """
    arguments = ["--part", name, "--out", str(out), "--limit", str(max(seconds - _GRACE, 0.0)), *["--tiny"] * tiny]
    # The folder `triton_kernels` of the repository's root is not to be found under that name
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if device.type == "cuda":
        # Tests ask for the interpreter where they find no driver, which may lie where they do not look
        environment["TRITON_INTERPRET"] = "0"
        # Caches that grow leave holes between them otherwise, most of all the dense one
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, "-m", "kvcache_plugins.eval.gpu", *arguments]
    try:
        subprocess.run(command, check=True, timeout=max(seconds, 1.0), env=environment)
    except subprocess.TimeoutExpired as error:
        raise TimeIsUpError from error
