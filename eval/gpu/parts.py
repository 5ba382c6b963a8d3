"""Parts of `bench gpu`: checks, attention and steps. What is timed was held against plain PyTorch before."""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel, StaticCache

from kvcache_plugins.eval.benchmarks.kernels import BACKENDS, CACHES, Contest, Shape
from kvcache_plugins.eval.benchmarks.step import step_rows, time_steps
from kvcache_plugins.eval.harness import cache_stats, take_turns, time_call
from kvcache_plugins.gear.kernel_check import MismatchError, require_close_layers
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache, describe_caches

from .report import PartialReport, Run, TimeIsUpError


DTYPE = torch.bfloat16
Fields = Mapping[str, int]


def llama(vocab: int, width: int, inner: int, layers: int, heads: int, key_heads: int, tokens: int) -> Fields:
    """Makes the fields of a `LlamaConfig`."""
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    return {**sizes, **heads_of, "max_position_embeddings": tokens}


LLAMA_8B = llama(128256, 4096, 14336, 32, 32, 8, 131072)
# With its heads, so that what is compiled is needed again
TWO_LAYERS = llama(1000, 1024, 1024, 2, 8, 2, 4096)
TESTS = (
    "tests/triton_kernels/test_attention.py",
    "tests/triton_kernels/test_rows.py",
    "tests/triton_kernels/test_static_steps.py",
    "tests/gear/transform/test_coding_kernels.py",
    "tests/triton_kernels/test_gather.py",
    "tests/infinigen/test_on_gpu.py",
)
# One of each kind of kernel goes before its relatives, all that are registered
_FIRST = (
    *("gear", "gear-2bit", "gear-c16", "kivi-2bit", "gear-t16:quantizer=trellis", "gear-c16:quantizer=trellis"),
    *("gear-k4v3", "gear-4bit", "gear-t16", "gear-l-2bit", "kcvt-4bit", "per-token-2bit"),
)
_REGISTERED = (entry.name for entry in describe_caches() if str(entry.factory).endswith(":GEARCache"))
PRESETS = tuple(dict.fromkeys((*_FIRST, *_REGISTERED)))
# The acceptance's shape first: what time is left goes to the others
SHAPES = {
    "large": Shape(batch_size=16, context=32768),
    "medium": Shape(batch_size=4, context=16384),
    "small": Shape(batch_size=1, context=4096),
}
# Whole steps: the most wanted come first, the first being the measure
STEP_CACHES = (
    *("dynamic", "gear", "gear-2bit", "gear-4bit", "kivi-2bit", "static"),
    *("quanto-4bit", "quanto-2bit", "hqq-4bit", "hqq-2bit"),
)
# More than a chunk, so that every cache compresses one on the way
STEPS = 72
# Processes that share the tests: kernels are compiled for nearly every one, which is work for CPUs
_TEST_PROCESSES = "8"
# Presets in calibrated bases, and the tokens that a calibration is made of
_CALIBRATED, _CALIBRATION_TOKENS = "gear-c", 96
# Tokens of a static cache, and steps until a graph of it is captured
_CAPACITY, _NUM_WARM = 8192, 3


def build_llama(fields: Fields, device: torch.device, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """Builds a Llama of any size with random weights on the device: nothing is downloaded or copied."""
    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def open_report(run: Run, name: str, kind: str, fields: Fields, **settings: Any) -> PartialReport:
    """Opens the result of a part, measured on a model with random weights."""
    return run.report(name, kind, weights="random", **fields, **settings, dtype=str(DTYPE).removeprefix("torch."))


def random_tokens(model: PreTrainedModel, count: int, batch_size: int = 1) -> torch.Tensor:
    """Draws tokens `[batch_size, count]`."""
    return torch.randint(model.config.vocab_size, (batch_size, count), device=model.device)


def run_tests(run: Run, tests: Sequence[str] = TESTS) -> None:
    """Runs the kernels' tests: how many passed, and which did not."""
    report = run.report("checks", "checks", tests=" ".join(tests))
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-p", "no:cacheprovider"]
    if run.device.type == "cuda" and find_spec("xdist") is not None:
        command += ["--numprocesses", _TEST_PROCESSES, "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder, report.attempt("tests"):
        results = Path(folder) / "results.xml"
        try:
            subprocess.run([*command, f"--junitxml={results}"], check=False, timeout=max(run.box.left, 1))
        except subprocess.TimeoutExpired as error:
            raise TimeIsUpError from error
        report.add(count_outcomes(results, report))


def count_outcomes(results: Path, report: PartialReport) -> dict[str, int]:
    """Counts tests by outcome, from pytest's file. Failed ones are noted in the report."""
    outcomes = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(results).iter("testcase"):
        children = {child.tag: child for child in case}
        failure = next((children[tag] for tag in ("failure", "error") if tag in children), None)
        if failure is not None:
            report.fail(f"{case.get('classname')}::{case.get('name')}", (failure.get("message") or "")[:300])
        outcomes["failed" if failure is not None else "skipped" if "skipped" in children else "passed"] += 1
    return outcomes


def run_presets(
    run: Run, presets: Sequence[str] = PRESETS, model: Fields = TWO_LAYERS, tokens: Sequence[int] = (600, 64, 1)
) -> None:
    """
    Checks every preset's attention over what it stores, a row for each that is right.

    A preset reads a prompt, decoded tokens at once that the update after them compresses, and one more. What attention
    makes of that is held against plain PyTorch from the same storage.
    """
    report, network = open_report(run, "presets", "presets", model), build_llama(model, run.device)
    for name in presets:
        with report.attempt(name), run.box.step():
            start, cache = time.monotonic(), create_preset(name, network)
            with torch.inference_mode():
                for count in tokens:
                    network(random_tokens(network, count), **as_argument(cache), logits_to_keep=1)
                error = require_close_layers(name, cache, network.config.num_attention_heads)
            stats = cache_stats(cache)
            if error is None or stats["kernel_fallbacks"] or not stats["fused_calls"]:
                raise MismatchError(f"{name} was not computed by the kernels: {stats}")
            row = {"cache": name, "relative_error": error, "seconds": time.monotonic() - start}
            report.add(row, f"{name}: relative error {error:.1e}")


def create_preset(name: str, model: PreTrainedModel) -> Cache:
    """Creates a preset's cache; those in calibrated bases share a calibration of the model."""
    options: dict[str, Any] = {"calibration": _calibrate(model)} if name.startswith(_CALIBRATED) else {}
    return create_cache(name, model, **options)


@lru_cache(maxsize=1)
def _calibrate(model: PreTrainedModel) -> Any:
    return calibrate_transform(model, [random_tokens(model, _CALIBRATION_TOKENS)[0]], num_draws=1)


@torch.inference_mode()
def time_attention(
    run: Run,
    shapes: Mapping[str, Shape] = SHAPES,
    caches: Sequence[str] = (*CACHES, "gear-t16", "gear-t16:quantizer=trellis"),
    rounds: int = 50,
) -> None:
    """Times decode attention alone, a file a shape. What is not right is not timed; the others are."""
    for name, shape in shapes.items():
        title = f"attention, {shape.batch_size} x {shape.context} tokens"
        typer.echo(title)
        report = run.report(f"attention_{name}", "kernels")
        # Most of a step goes into compiling the configurations to choose from, the first time
        with report.attempt(title):
            run.box.require()
            contest = Contest(shape, DTYPE, run.device)
            report.settings.update(contest.settings(rounds))
            for backend in BACKENDS if run.device.type == "cuda" else ():
                with report.attempt(backend):
                    contest.add_backend(backend)
            for cache_name in caches:
                with report.attempt(cache_name), run.box.step():
                    contest.add(cache_name)
            report.add_timed(contest.run(rounds))


def _make_cache(name: str, model: PreTrainedModel, max_length: int) -> Cache:
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=max_length)
    return create_cache(name, model)


@torch.inference_mode()
def time_whole_steps(
    run: Run, model: Fields = LLAMA_8B, context: int = 4096, steps: int = STEPS, caches: Sequence[str] = STEP_CACHES
) -> None:
    """Times whole decode steps of a model at batch 1, caches taking turns."""
    report, network = open_report(run, "step", "step", model, steps=steps), build_llama(model, run.device)
    # One decoded token goes before those that are timed
    read, token, fed = random_tokens(network, context + 1 + steps).split((context, 1, steps), dim=1)
    filled: dict[str, Cache] = {}
    prefill_seconds: dict[str, float] = {}
    for name in caches:
        typer.echo(f"step: {name} reads {context} tokens")
        with report.attempt(name), run.box.step(2):
            # The first time is for what is compiled
            for _ in range(2):
                cache = _make_cache(name, network, context + 1 + steps)
                prefill = partial(network, read, **as_argument(cache), logits_to_keep=1)
                prefill_seconds[name] = time_call(prefill, network.device)
            network(token, **as_argument(cache))
            require_close_layers(name, cache, network.config.num_attention_heads)
            filled[name] = cache
    seconds, _ = time_steps(network, filled, fed, report.attempt, run.box.left)
    rows = step_rows(seconds, filled, context)
    report.add_timed(
        [{**row, "tokens_per_s": 1 / row["median_s"], "prefill_s": prefill_seconds[row["cache"]]} for row in rows]
    )
    for name, times in seconds.items():
        if len(times) < steps:
            report.fail(f"{name}, steps after {len(times)}", "skipped: time, or what stands above")


@torch.no_grad()
def time_captured(
    run: Run,
    model: Fields = LLAMA_8B,
    context: int = 4096,
    steps: int = STEPS,
    caches: Sequence[str] = ("gear", "gear-t16"),
) -> None:
    """Times whole steps at batch 1, captured as CUDA graphs and not; that tokens are the same is one of the checks."""
    report, network = open_report(run, "captured", "captured", model, steps=steps), build_llama(model, run.device)
    read, token, fed = random_tokens(network, context + 1 + steps).split((context, 1, steps), dim=1)
    options = {"mode": "reduce-overhead"} if run.device.type == "cuda" else {"backend": "eager"}
    compiled: Any = torch.compile(network.__call__, fullgraph=True, **options)  # type: ignore[call-overload]
    filled: dict[str, Cache] = {}

    def step(name: str, number: int) -> None:
        ids = fed[:, number : number + 1] if number >= 0 else token
        (compiled if ", " in name else network)(ids, **as_argument(filled[name]))

    for name in ("dynamic", *(each for cache in caches for each in (cache, f"{cache}, captured"))):
        with report.attempt(name), run.box.step(2):
            preset, _, way = name.partition(", ")
            filled[name] = create_cache(preset, network, **({"max_cache_len": _CAPACITY} if way else {}))
            network(read, **as_argument(filled[name]), logits_to_keep=1)
            # What is compiled and recorded is so before the first turn
            for _ in range(_NUM_WARM):
                step(name, -1)
    functions = {name: partial(step, name) for name in filled}
    clock = partial(time_call, device=run.device)
    seconds = take_turns(functions, clock, steps, seconds=run.box.left, guard=report.attempt)
    report.add_timed(step_rows(seconds, filled, context))
