"""The parts of `gpu`. Each checks what it times against plain PyTorch, and notes in its result what went wrong."""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import typer
from transformers import Cache, PreTrainedModel, StaticCache

from kvcache_plugins.eval.benchmarks.contest import BACKENDS, Contest
from kvcache_plugins.eval.benchmarks.kernels import describe
from kvcache_plugins.eval.benchmarks.step import describe as describe_step
from kvcache_plugins.eval.benchmarks.step import step_rows, time_turns
from kvcache_plugins.eval.harness.timing import time_call
from kvcache_plugins.gear.kernel_check import require_close_layers
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .captured import time_captured
from .coding import time_coding
from .infinigen import check_exact, time_offloading
from .largest_batch import WAYS, Budget, measure_largest_batch
from .models import DTYPE, build_llama
from .partial_report import PartialReport, TimeBox, TimeIsUpError
from .plan import Plan
from .presets import check_presets


# Processes that share the tests: kernels are compiled for nearly every one, which is work for CPUs
_TEST_PROCESSES = "8"


def run_tests(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """The kernels' tests: how many passed, and which did not."""
    report = PartialReport(out / "gpu_checks.json", "checks", device, {"tests": " ".join(plan.tests)})
    command = [sys.executable, "-m", "pytest", *plan.tests, "-q", "-p", "no:cacheprovider"]
    if device.type == "cuda" and find_spec("xdist") is not None:
        command += ["--numprocesses", _TEST_PROCESSES, "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder, report.attempt("tests"):
        results = Path(folder) / "results.xml"
        try:
            subprocess.run([*command, f"--junitxml={results}"], check=False, timeout=max(box.left, 1))
        except subprocess.TimeoutExpired as error:
            raise TimeIsUpError from error
        report.add(_count_outcomes(results, report))


def _count_outcomes(results: Path, report: PartialReport) -> dict[str, int]:
    """Tests by outcome, from pytest's file. Failed ones are noted in the report."""
    outcomes = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(results).iter("testcase"):
        children = {child.tag: child for child in case}
        failure = next((children[tag] for tag in ("failure", "error") if tag in children), None)
        if failure is not None:
            report.fail(f"{case.get('classname')}::{case.get('name')}", (failure.get("message") or "")[:300])
        outcomes["failed" if failure is not None else "skipped" if "skipped" in children else "passed"] += 1
    return outcomes


def run_presets(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Every preset's attention, a prompt and decoded tokens compressed: right, or a failure."""
    settings = {"weights": "random", **plan.preset_model, "dtype": str(DTYPE).removeprefix("torch.")}
    check_presets(plan, PartialReport(out / "gpu_presets.json", "presets", device, settings), device, box)


@torch.inference_mode()
def time_attention(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Decode attention alone, a file a shape. What is not right is not timed; the others are."""
    longest = 0.0
    for name, shape in plan.shapes.items():
        title = f"attention, {shape.batch_size} x {shape.context} tokens"
        typer.echo(title)
        report = PartialReport(out / f"gpu_attention_{name}.json", "kernels", device, {})
        with report.attempt(title):
            box.require(longest)
            contest = Contest(shape, DTYPE, device)
            report.settings.update(contest.settings(plan.rounds))
            for backend in BACKENDS if device.type == "cuda" else ():
                with report.attempt(backend):
                    contest.add_backend(backend)
            for cache_name in plan.attention_caches:
                with report.attempt(cache_name):
                    # Most of it goes into compiling the configurations to choose from, the first time
                    box.require(1.5 * longest)
                    longest = max(longest, time_call(partial(contest.add, cache_name), device))
            for row in contest.run(plan.rounds):
                report.add(row)
                typer.echo(describe(row))


def _make_cache(name: str, model: PreTrainedModel, max_length: int) -> Cache:
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=max_length)
    return create_cache(name, model)


@torch.inference_mode()
def time_steps(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Whole decode steps of a model at batch 1, caches taking turns."""
    settings = {"weights": "random", **plan.model, "steps": plan.steps, "dtype": str(DTYPE).removeprefix("torch.")}
    report = PartialReport(out / "gpu_step.json", "step", device, settings)
    model = build_llama(plan.model, device)
    # One decoded token goes before those that are timed
    tokens = torch.randint(model.config.vocab_size, (1, plan.context + 1 + plan.steps), device=device)
    caches: dict[str, Cache] = {}
    prefill_seconds: dict[str, float] = {}
    longest = 0.0
    for name in plan.step_caches:
        typer.echo(f"step: {name} reads {plan.context} tokens")
        with report.attempt(name):
            box.require(2 * longest)
            start = time.monotonic()
            cache, prefill_seconds[name] = _fill(
                model, partial(_make_cache, name, model, tokens.shape[1]), tokens, plan
            )
            require_close_layers(name, cache, model.config.num_attention_heads)
            caches[name] = cache
            longest = max(longest, time.monotonic() - start)
    seconds = time_turns(model, caches, tokens[:, plan.context + 1 :], report.attempt, lambda: box.is_up)
    for row in step_rows(seconds, caches, plan.context):
        report.add({**row, "tokens_per_s": 1 / row["median_s"], "prefill_s": prefill_seconds[row["cache"]]})
        typer.echo(describe_step(row))
    for name, times in seconds.items():
        if len(times) < plan.steps:
            report.fail(f"{name}, steps after {len(times)}", "skipped: time, or what stands above")


def _fill(
    model: PreTrainedModel, create: Callable[[], Cache], tokens: torch.Tensor, plan: Plan
) -> tuple[Cache, float]:
    """A cache that holds the context and one decoded token, and the seconds of reading the context a second time."""
    context, token = tokens[:, : plan.context], tokens[:, plan.context : plan.context + 1]
    # The first time is for what is compiled
    model(context, **as_argument(create()), logits_to_keep=1)
    cache = create()
    seconds = time_call(partial(model, context, **as_argument(cache), logits_to_keep=1), model.device)
    model(token, **as_argument(cache))
    return cache, seconds


@torch.inference_mode()
def search_largest_batches(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """The largest batch in a fixed budget, for each way in which context comes into a cache."""
    model, budget = build_llama(plan.model, device), Budget(plan.budget, device)
    settings = {
        "weights": "random",
        **plan.model,
        "model_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "context": plan.batch_context,
        "steps": plan.steps,
        "dtype": str(DTYPE).removeprefix("torch."),
        "budget_bytes": plan.budget,
        "enforced_by": budget.enforced_by,
    }
    report = PartialReport(out / "gpu_largest_batch.json", "batch", device, settings)
    right = []
    for name in plan.batch_caches:
        with report.attempt(name):
            _require_close_batch(name, model, create_cache(name, model), plan.batch_context)
            right.append(name)
    searches = [(way, name) for way in WAYS for name in right]
    with budget:
        for index, (way, name) in enumerate(searches):
            typer.echo(f"largest batch: {name}, context {way}")
            with report.attempt(f"{name}, {way}"):
                # What is left is shared with the searches that follow
                share = TimeBox(box.left / (len(searches) - index))
                row = measure_largest_batch(
                    model, partial(create_cache, name, model), way, plan.batch_context, plan.steps, budget, share
                )
                if row is None:
                    raise torch.OutOfMemoryError("not even one sequence fits into the budget")
                first = next((each for each in report.rows if each["way"] == way), row)
                ratio = row["tokens_per_s"] / first["tokens_per_s"]
                report.add({"cache": name, "way": way, **row, "throughput_against_first": ratio})
                typer.echo(
                    f"  {row['largest_batch']} sequences, {row['tokens_per_s']:.1f} tokens/s, "
                    f"peak {row['peak_bytes'] / 2**30:.2f} GiB, search {row['search']}"
                )


def _require_close_batch(name: str, model: PreTrainedModel, cache: Cache, context: int) -> None:
    """Raises a `MismatchError` if attention over a batch of two, with a decoded token in the buffer, is wrong."""
    tokens = torch.randint(model.config.vocab_size, (2, context + 1), device=model.device)
    model(tokens[:, :-1], **as_argument(cache), logits_to_keep=1)
    model(tokens[:, -1:], **as_argument(cache))
    require_close_layers(name, cache, model.config.num_attention_heads)


@torch.inference_mode()
def measure_offloading(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """InfiniGen beside what it stands in for: exact where everything is fetched, then timed."""
    settings = {
        "weights": "random",
        **plan.offload_model,
        "steps": plan.offload_steps,
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    report = PartialReport(out / "gpu_infinigen.json", "offloading", device, settings)
    with report.attempt("exactness"):
        report.settings["exactness"] = check_exact(device, *plan.exact_tokens)
    time_offloading(plan, report, build_llama(plan.offload_model, device), box)


PARTS: dict[str, Callable[[Plan, Path, torch.device, TimeBox], None]] = {
    "checks": run_tests,
    "presets": run_presets,
    "coding": time_coding,
    "attention": time_attention,
    "step": time_steps,
    "captured": time_captured,
    "infinigen": measure_offloading,
    "batch": search_largest_batches,
}
