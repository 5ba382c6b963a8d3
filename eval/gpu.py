"""Checks and benchmarks of a GPU, in two calls of less than ten minutes.

    kvcache-plugins bench gpu --call checks --out FOLDER
    kvcache-plugins bench gpu --call times --out FOLDER

The first runs the part `checks` in four minutes, the second all other parts. Both write `gpu_tables.md`, tables of all
results in the folder, which `<!-- table: gpu_tables -->` shows in a page.

There are six parts. Each runs in a process of its own, so that a crash or a hang costs no other part:

- `checks`: on the GPU the kernels' tests, and attention of every compressed preset over what it has stored;
- `attention`: decode attention alone, from compressed storage and by PyTorch's own kernels;
- `step`: whole decode steps of a model with the shapes of an 8B Llama and random weights, caches taking turns;
- `captured`: steps of a quarter of its layers as CUDA graphs, with coded caches and `StaticCache`, also of batches;
- `infinigen`: decode steps over 16384 and 32768 tokens in host memory, in the GPU's memory, and with full offloading;
- `batch`: the largest batch that fits into 40 GiB, its throughput and its peak.

A kernel that does not agree with plain PyTorch is not timed. Every part writes its JSON files row by row and has a
share of the time; unused seconds go to later parts. Files also list failures, and checks skipped for lack of time.

The cost of InfiniGen's transfers shows beside three caches: `offloaded`, Transformers' own, which moves every layer's
keys and values to the GPU at every step; the same InfiniGen cache with its pool in the GPU's memory, which moves
nothing over the bus; and `dynamic`.

A batch fits if its cache is filled and `steps` tokens are decoded without an error of the allocator; they are enough
to compress a chunk of decoded tokens. The model reads one sequence, and `batch_repeat_interleave` repeats it for the
batch, with bytes of its own for every sequence.
"""

import gc
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Cache, PreTrainedModel, StaticCache

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.kernel_check import require_close_layers
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.layer_config import heads_of
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import measure_memory

from .benchmark import Result, TimeIsUpError, say
from .benchmarks.kernels import BACKENDS, CACHES, Contest, Shape
from .benchmarks.step import llama, random_model, time_steps
from .harness import QUARTILES, cache_stats, spread, time_call
from .observers import TransferTimes
from .result_files import read_result
from .rows import Failure, Found, KnownRows
from .tables import RENDERERS, render_result


DTYPE = torch.bfloat16
Fields = Mapping[str, int]


class TimeBox:
    """Limit of seconds from its creation on, after which no step begins."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        # Seconds of the longest step so far
        self.longest = 0.0

    @property
    def left(self) -> float:
        """Seconds left, negative when time is up."""
        return self._end - time.monotonic()

    @contextmanager
    def step(self, margin: float = 1.5) -> Iterator[None]:
        """Begin a step; a `TimeIsUpError` if less time is left than `margin` times the longest step so far."""
        if self.left < margin * self.longest:
            raise TimeIsUpError
        start = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - start)

    def share(self, things: Sequence[Any]) -> Iterator[tuple[Any, "TimeBox"]]:
        """Yield items, each with an equal share of the remaining time."""
        for number, thing in enumerate(things):
            yield thing, TimeBox(self.left / (len(things) - number))


class Run(NamedTuple):
    """Run of a part: folder of its files, device and time."""

    out: Path
    device: torch.device
    box: TimeBox

    def open(self, name: str, kind: str, model: Fields | None = None, **settings: Any) -> Result:
        """Open the result `gpu_{name}.json`, measured on a model with random weights if there is one."""
        if model is not None:
            settings = {"weights": "random", **model, **settings, "dtype": str(DTYPE).removeprefix("torch.")}
            settings["has_cudnn_attention"] = torch.backends.cuda.cudnn_sdp_enabled()
        result = Result(kind, settings, self.out / f"gpu_{name}.json", {"device": self.device})
        result.save()
        return result


LLAMA_8B = llama(128256, 4096, 14336, 32, 32, 8, 131072)
# Compiling all layers takes minutes, and each layer does the same
LLAMA_8B_QUARTER = {**LLAMA_8B, "num_hidden_layers": 8}
TESTS = (
    "tests/triton_kernels/test_attention.py",
    "tests/triton_kernels/test_rows.py",
    "tests/triton_kernels/test_push.py",
    "tests/triton_kernels/test_static_steps.py",
    "tests/triton_kernels/test_group_push.py",
    "tests/triton_kernels/test_static_group_steps.py",
    "tests/triton_kernels/test_infinigen.py",
    "tests/transform_coding/test_coding_kernels.py",
    "tests/triton_kernels/test_gather.py",
    "tests/infinigen/test_on_gpu.py",
    "tests/gear/test_presets_on_gpu.py",
)
# The shape of the acceptance test comes first, others in the time that is left
_SIZES = {"large": (16, 32768), "medium": (4, 16384), "small": (1, 4096)}
SHAPES = {name: Shape(batch_size=size, context=context) for name, (size, context) in _SIZES.items()}
# Whole steps: the first cache is compared with, and important ones come first
STEP_CACHES = (
    *("dynamic", "transform", "transform-16", "gear-2bit", "gear-4bit", "kivi-2bit", "infinigen", "h2o", "static"),
    *("quanto-4bit", "quanto-2bit", "hqq-4bit", "hqq-2bit"),
)
# Steps as CUDA graphs. Shapes are batch sizes and contexts
CAPTURED = ", captured"
_STATIC = ("static", "transform", "transform-16", "gear-2bit", "kivi-2bit")
CAPTURED_CACHES = ("dynamic", "transform", *(f"{name}{CAPTURED}" for name in _STATIC))
# The longest leaves room for the steps
CAPTURED_SHAPES = ((1, 4096), (1, 32768), (8, 8192), (32, 4096), (1, 131008), (8, 32768))
# Tokens that a model reads at a time, in all sequences
_READ_AT_ONCE = 65536
# More than a chunk, so that every cache compresses one on the way
STEPS = 72
# Processes that share the tests: kernels are compiled for nearly every one, which is work for CPUs
_TEST_PROCESSES = "8"
# Steps until a graph is recorded, kernels are compiled, tokens are in a pool
_NUM_WARM = 3


def random_tokens(model: PreTrainedModel, count: int, batch_size: int = 1) -> torch.Tensor:
    """Draw tokens `[batch_size, count]`."""
    return torch.randint(model.config.vocab_size, (batch_size, count), device=model.device)


def add_timed(report: Result, timed: Iterable[Found], more: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Take timings with `more` fields of a cache's row, and print their medians and quartiles; failures too."""
    for found in timed:
        if isinstance(found, Failure | KnownRows):
            report.take(found)
            continue
        name = str(found.get("cache", found.get("name")))
        lower, median, upper = (1e3 * found[key] for key in QUARTILES)
        report.add({**found, **(more or {}).get(name, {})}, f"{name}: {median:.3f} ms ({lower:.3f} to {upper:.3f})")


def run_tests(run: Run, tests: Sequence[str] = TESTS) -> None:
    """Run the kernels' tests; report their numbers by outcome, and failed ones by name."""
    report = run.open("checks", "checks", tests=" ".join(tests))
    # Tests of every step replace the GPU; a `-k` among `tests` counts instead of this one
    command = [sys.executable, "-m", "pytest", "-k", "not every_step", *tests, "-q", "-p", "no:cacheprovider"]
    if run.device.type == "cuda" and find_spec("xdist") is not None:
        command += ["--numprocesses", _TEST_PROCESSES, "--dist", "worksteal"]
    with tempfile.TemporaryDirectory() as folder, report.attempt("tests"):
        results = Path(folder) / "results.xml"
        try:
            subprocess.run([*command, f"--junitxml={results}"], check=False, timeout=max(run.box.left, 1))
        except subprocess.TimeoutExpired as error:
            raise TimeIsUpError from error
        report.add(count_outcomes(results, report))


def count_outcomes(results: Path, report: Result) -> dict[str, int]:
    """Count tests by outcome, from pytest's file. Failed ones are noted in the report."""
    outcomes = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(results).iter("testcase"):
        failure = next((child for child in case if child.tag in ("failure", "error")), None)
        if failure is not None:
            report.fail(f"{case.get('classname')}::{case.get('name')}", (failure.get("message") or "")[:300])
        outcomes["failed" if failure is not None else "passed" if case.find("skipped") is None else "skipped"] += 1
    return outcomes


@torch.inference_mode()
def time_attention(
    run: Run,
    shapes: Mapping[str, Shape] = SHAPES,
    caches: Sequence[str] = (*CACHES, "transform-16"),
    rounds: int = 50,
) -> None:
    """Time decode attention alone, with a file for each shape. Wrong results are not timed."""
    for name, shape in shapes.items():
        title = f"attention, {shape.batch_size} x {shape.context} tokens"
        say(title)
        report = run.open(f"attention_{name}", "kernels")
        # Most of the first step is spent compiling configurations to choose from
        with report.attempt(title):
            with run.box.step():
                contest = Contest(shape, DTYPE, run.device)
            report.settings.update(contest.settings(rounds))
            for backend in BACKENDS if run.device.type == "cuda" else ():
                with report.attempt(backend):
                    contest.add_backend(backend)
            for cache_name in caches:
                with report.attempt(cache_name), run.box.step():
                    contest.add(cache_name)
            add_timed(report, contest.run(rounds))


@torch.no_grad()
def time_whole_steps(
    run: Run,
    name: str = "step",
    model: Fields = LLAMA_8B,
    context: int = 4096,
    steps: int = STEPS,
    caches: Sequence[str] = STEP_CACHES,
    batch_size: int = 1,
) -> None:
    """Time whole decode steps of a model, caches in turns; those named `CAPTURED` as CUDA graphs."""
    report = run.open(name, "step", model, steps=steps, batch_size=batch_size)
    network = random_model(model, DTYPE, run.device)
    options = {"mode": "reduce-overhead"} if run.device.type == "cuda" else {"backend": "eager"}
    compiled: Any = torch.compile(network.__call__, fullgraph=True, **options)  # type: ignore[call-overload]
    read, token, fed = random_tokens(network, context + 1 + steps, batch_size).split((context, 1, steps), dim=1)
    parts = read.split(max(_READ_AT_ONCE // batch_size, 1), dim=1)
    filled: dict[str, Cache] = {}
    prefills: dict[str, dict[str, float]] = {}

    compiled_for = {each: compiled for each in caches if each.endswith(CAPTURED)}
    for each in caches:
        say(f"{name}: {each} reads {batch_size} x {context} tokens")
        with report.attempt(each), run.box.step(2):
            # The first time compiles
            preset, num_tokens = each.removesuffix(CAPTURED), context + _NUM_WARM + steps
            for _ in range(2):
                filled.pop(each, None)
                if preset == "static":
                    filled[each] = StaticCache(config=network.config, max_cache_len=num_tokens)
                else:
                    room = {"max_cache_len": num_tokens} if each in compiled_for else {}
                    filled[each] = create_cache(preset, network, **room)
                read_part = partial(network, **as_argument(filled[each]), logits_to_keep=1)
                prefills[each] = {"prefill_s": sum(time_call(partial(read_part, part), run.device) for part in parts)}
            # Compile and record before the first turn
            for _ in range(_NUM_WARM):
                compiled_for.get(each, network)(token, **as_argument(filled[each]))
            if each not in compiled_for:
                require_close_layers(each, filled[each], heads_of(network.config).num_query)
            continue
        # An error was recorded, and the end of the loop not reached
        filled.pop(each, None)
    limits: dict[str, Any] = {"seconds": run.box.left, "guard": report.attempt}
    add_timed(report, time_steps(network, filled, fed, context, compiled_for, **limits), prefills)


def time_captured(run: Run, shapes: Sequence[tuple[int, int]] = CAPTURED_SHAPES, **arguments: Any) -> None:
    """Time steps as CUDA graphs, with a file for each shape; see `time_whole_steps`."""
    for (batch_size, context), box in run.box.share(shapes):
        name = f"captured_{batch_size}x{context}"
        own = {**arguments, "batch_size": batch_size, "context": context}
        time_whole_steps(Run(run.out, run.device, box), name, **own)
        # PyTorch limits how often a function is compiled again
        torch.compiler.reset()
        gc.collect()


# Memory: InfiniGen beside full offloading, and the largest batch of a budget

RESIDENT = ", all resident"
# Sizes to try, as shares of the batch that would fill the budget with its caches alone
SHARES = (1.0, 0.975, 0.95, 0.925, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.2, 0.0)
LLAMA_2_7B = llama(32000, 4096, 11008, 32, 32, 32, 65536)


@torch.inference_mode()
def measure_offloading(
    run: Run,
    context: int,
    model: Fields = LLAMA_2_7B,
    steps: int = 40,
    # Random weights attend broadly, so that the default rule always fetches its maximum, a fifth of the tokens. It
    # fetches about a twentieth for trained models and long contexts
    caches: Sequence[str] = (
        "dynamic",
        "infinigen",
        "offloaded",
        "infinigen-transform",
        "infinigen:max_fetch_ratio=0.05",
    ),
) -> None:
    """Time InfiniGen beside full offloading and a dense cache. Its exactness is tested in `checks`."""
    report = run.open(f"infinigen_{context}", "offloading", model, steps=steps)
    network = random_model(model, DTYPE, run.device)
    read, fed = random_tokens(network, context + steps).split((context, steps), dim=1)
    # One cache after the other: two long contexts may not fit beside each other
    for spec, box in run.box.share(caches):
        say(f"offloading: {spec} reads {context} tokens")
        with report.attempt(spec), box.step():
            cache = create_cache(spec, network)
            prefill_s = time_call(partial(network, read, **as_argument(cache), logits_to_keep=1), run.device)
            for name in (spec, spec + RESIDENT) if isinstance(cache, InfiniGenCache) else (spec,):
                for layer in cache.layers if name != spec else ():
                    if isinstance(layer, InfiniGenLayer) and layer.pool is not None:
                        layer.pool.map(partial(torch.Tensor.to, device=layer.device))
                for token in fed[:, :_NUM_WARM].split(1, dim=1):
                    network(token, **as_argument(cache))
                before = cache_stats(cache)
                with TransferTimes() as times:
                    timed = list(time_steps(network, {name: cache}, fed, context, seconds=box.left))
                more = _transfers(cache, before, times) if isinstance(cache, InfiniGenCache) else {}
                add_timed(report, timed, {name: {**more, **({"prefill_s": prefill_s} if name == spec else {})}})
            if isinstance(cache, InfiniGenCache):
                cache.detach()
        gc.collect()
        torch.cuda.empty_cache()
    medians = {row["cache"]: row["median_s"] for row in report.rows}
    for row in report.rows:
        # Caches were timed alone, and have no first to compare with
        del row["speed_against_first"], row["relative_error"]
        if row["cache"] + RESIDENT in medians:
            row["time_against_resident"] = row["median_s"] / medians[row["cache"] + RESIDENT]
        if "offloaded" in medians:
            row["speed_against_offloaded"] = medians["offloaded"] / row["median_s"]
    report.save()


def time_offloading(run: Run, contexts: Sequence[int] = (32768, 16384), **arguments: Any) -> None:
    """Time steps of InfiniGen, with a file for each context; see `measure_offloading`."""
    for context, box in run.box.share(contexts):
        measure_offloading(Run(run.out, run.device, box), context, **arguments)


def _transfers(cache: InfiniGenCache, before: Mapping[str, Any], times: TransferTimes) -> dict[str, Any]:
    """
    Return transfers of a step: seconds since the counters `before`, and as `counted` the bytes that a token moves over
    the bus, and those that full offloading of all real tokens in all layers would move.
    """
    stats = cache.stats()
    # A layer takes the same step as all others
    calls = stats["selected_calls"], stats["selected_calls"] - before["selected_calls"]
    num_steps, num_timed = (each / stats["layers_offloaded"] for each in calls)
    transfer, stalled = (seconds / num_timed for seconds in times.seconds().values())
    layer = next(each for each in cache.layers if isinstance(each, InfiniGenLayer))
    # Bytes of dense rows: those that are fetched may be codes
    row_bytes = sum(layer.states_shape(side)[3] for side in ("keys", "values")) * layer.dtype.itemsize
    in_all_layers = stats["tokens_fetchable"] * stats["num_layers"] / stats["layers_offloaded"]
    return {
        "counted": {
            "bytes_per_token": stats["bytes_fetched"] / num_steps,
            "full_offloading_bytes_per_token": in_all_layers * row_bytes / num_steps,
        },
        "transfer_s_per_token": transfer,
        "stalled_s_per_token": stalled,
        "hidden_share": max(1 - stalled / transfer, 0.0) if transfer else 0.0,
    }


class Budget:
    """
    Limit of bytes. On a GPU PyTorch's allocator enforces it inside `enforce()`, for weights, cache and activations. On
    a CPU the cache alone counts, at the end.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self.is_gpu = device.type == "cuda"

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Limit the allocator to the budget."""
        if not self.is_gpu:
            yield
            return
        share = self.num_bytes / torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def start(self) -> int:
        """Free memory of the last trial, and reset its peak; return the bytes that are not in use."""
        gc.collect()
        if not self.is_gpu:
            return self.num_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.num_bytes - torch.cuda.memory_allocated(self.device)

    def peaks(self, of_cache: int) -> dict[str, int]:
        """Return the peaks of used and reserved bytes since `start`; an `OutOfMemoryError` above the budget."""
        used = held = of_cache
        if self.is_gpu:
            used, held = torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        if held > self.num_bytes:
            raise torch.OutOfMemoryError("the cache exceeds the budget")
        return {"peak_bytes": used, "peak_reserved_bytes": held}


def run_batch(
    model: PreTrainedModel, cache: Cache, batch_size: int, context: int, steps: int, budget: Budget
) -> dict[str, Any]:
    """Fill an empty cache, and decode `steps` tokens of each sequence; more than the enforced budget is an error."""
    model(random_tokens(model, context), **as_argument(cache), logits_to_keep=1)
    cache.batch_repeat_interleave(batch_size)
    step = partial(model, random_tokens(model, 1, batch_size), **as_argument(cache))
    seconds = [time_call(step, model.device) for _ in range(steps)]
    held = measure_memory(cache).total_bytes
    return {
        "largest_batch": batch_size,
        **spread(seconds),
        "tokens_per_s": batch_size * steps / sum(seconds),
        "cache_bytes": held,
        "bytes_per_sequence": held / batch_size,
        **budget.peaks(held),
    }


def measure_largest_batch(
    model: PreTrainedModel, create: Callable[[], Cache], context: int, steps: int, budget: Budget, box: TimeBox
) -> dict[str, Any]:
    """Measure the largest batch that fits, among `SHARES` of the batch predicted from one sequence; list `trials`."""
    available = budget.start()
    one = run_batch(model, create(), 1, context, 2, budget)["cache_bytes"]
    trials: list[tuple[int, bool]] = []
    for size in dict.fromkeys(max(int(share * available / one), 1) for share in SHARES):
        with box.step(), suppress(torch.OutOfMemoryError):
            budget.start()
            row = run_batch(model, create(), size, context, steps, budget)
            return {**row, "trials": [*trials, (size, True)]}
        trials.append((size, False))
    raise torch.OutOfMemoryError("not even one sequence fits into the budget")


@torch.inference_mode()
def search_largest_batches(
    run: Run,
    model: Fields = LLAMA_8B,
    budget_bytes: int = 40 * 2**30,
    context: int = 4096,
    steps: int = STEPS,
    caches: Sequence[str] = ("dynamic", "gear-2bit", "transform"),
) -> None:
    """Search the largest batch in a fixed budget, for each cache whose attention is right."""
    network, budget = random_model(model, DTYPE, run.device), Budget(budget_bytes, run.device)
    report = run.open("largest_batch", "batch", model, context=context, steps=steps, budget_bytes=budget_bytes)
    report.settings["model_bytes"] = sum(parameter.nbytes for parameter in network.parameters())
    report.settings["enforced_by"] = "the device's allocator" if budget.is_gpu else "bytes of the cache"
    for name, box in run.box.share(caches):
        say(f"largest batch: {name}")
        with report.attempt(name):
            # A batch of two, with a decoded token in the buffer
            cache, tokens = create_cache(name, network), random_tokens(network, context + 1, 2)
            for part in (tokens[:, :-1], tokens[:, -1:]):
                network(part, **as_argument(cache), logits_to_keep=1)
            require_close_layers(name, cache, heads_of(network.config).num_query)
            del cache
            with budget.enforce():
                row = measure_largest_batch(network, partial(create_cache, name, network), context, steps, budget, box)
            ratio = row["tokens_per_s"] / (report.rows or [row])[0]["tokens_per_s"]
            report.add(
                {"cache": name, **row, "throughput_against_first": ratio},
                f"  {row['largest_batch']} sequences, {row['tokens_per_s']:.1f} tokens/s, "
                f"peak {row['peak_bytes'] / 2**30:.2f} GiB",
            )


# The command

# In order, with shares of the time limit
PARTS: dict[str, tuple[Callable[..., None], float]] = {
    "checks": (run_tests, 0.30),
    "attention": (time_attention, 0.15),
    "step": (time_whole_steps, 0.12),
    "captured": (partial(time_captured, model=LLAMA_8B_QUARTER, caches=CAPTURED_CACHES, steps=40), 0.18),
    "infinigen": (time_offloading, 0.13),
    "batch": (search_largest_batches, 0.12),
}
# Parts of each call, and its seconds
CALLS = {"checks": (("checks",), 240.0), "times": (tuple(PARTS)[1:], 570.0)}
_ALL = tuple(PARTS), 570.0
_FEW: dict[str, Any] = {"model": llama(128, 128, 128, 1, 2, 1, 1024), "context": 128, "steps": 3}
# Small sizes that run the script on any machine; the budget of a batch is one and a half dense sequences
TINY: dict[str, dict[str, Any]] = {
    "checks": {"tests": ("tests/triton_kernels/test_attention.py", "-k", "no_tokens")},
    "attention": {
        "shapes": {"large": Shape(batch_size=1, context=128, num_heads=1, groups=2, head_dim=64)},
        "caches": ("gear-2bit", "gear-l-2bit", "transform"),
        "rounds": 3,
    },
    "step": {**_FEW, "caches": ("dynamic", "transform", "gear-2bit", "static", "no-such-cache")},
    "captured": {
        **{key: _FEW[key] for key in ("model", "steps")},
        "shapes": ((1, 128), (2, 100)),
        "caches": CAPTURED_CACHES[:4],
    },
    "infinigen": {
        "model": llama(128, 64, 64, 4, 2, 2, 1024),
        "contexts": (100,),
        "steps": 4,
        "caches": ("dynamic", "infinigen:max_fetch_ratio=0.1", "infinigen-transform:max_fetch_ratio=0.1", "offloaded"),
    },
    "batch": {**_FEW, "context": 64, "budget_bytes": 26_000, "caches": ("dynamic", "gear-2bit")},
}
# Seconds from the end of a part's time, after which no step begins, to the end of its process
_GRACE = 15.0


def run_parts(
    out: Path, limit: float | None = None, tiny: bool = False, part: str | None = None, call: str | None = None
) -> None:
    """Run all parts, those of a call, or one in this process, within `limit` seconds; write their files to `out`."""
    if part is not None:
        check_choice("part", part, tuple(PARTS))
    if call is not None:
        check_choice("call", call, tuple(CALLS))
    names, seconds_of_call = _ALL if call is None else CALLS[call]
    limit = seconds_of_call if limit is None else limit
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not tiny:
        raise ValueError("torch finds no CUDA device; `--tiny` tries the script without one")
    if part is not None:
        # cuDNN plans again for every length, which would cost `dynamic` 10 ms a call
        torch.backends.cuda.enable_cudnn_sdp(part == "attention")
        PARTS[part][0](Run(out, device, TimeBox(limit)), **(TINY[part] if tiny else {}))
        return
    report = Result("run", {"limit": limit, "tiny": tiny}, out / f"gpu_{call or 'run'}_parts.json", {"device": device})
    whole, planned = TimeBox(limit), 0.0
    all_shares = sum(PARTS[name][1] for name in names)
    for name in names:
        planned += PARTS[name][1] / all_shares * limit
        seconds = whole.left - (limit - planned)
        say(f"[{limit - whole.left:4.0f} s] {name}, {seconds:.0f} s at most")
        start = time.monotonic()
        with report.attempt(name):
            _run_part(name, out, seconds, tiny, device)
        report.add({"part": name, "seconds": time.monotonic() - start, "limit": seconds})
    write_tables(out)
    say(f"[{limit - whole.left:4.0f} s] done: {len(report.failures)} parts ended early; what failed is in {out} too")


def write_tables(folder: Path) -> None:
    """Render every `gpu_*.json` of a folder that has a table into its `gpu_tables.md`."""
    results = {path.stem: read_result(path) for path in sorted(folder.glob("gpu_*.json"))}
    shown = [name for name, content in results.items() if content["benchmark"] in RENDERERS and content["rows"]]
    tables = [f"**{name.removeprefix('gpu_')}**\n\n{render_result(folder, name)}" for name in shown]
    (folder / "gpu_tables.md").write_text("\n".join(tables), encoding="utf-8")


def _run_part(name: str, out: Path, seconds: float, tiny: bool, device: torch.device) -> None:
    """Run a part in a process. Raise a `TimeIsUpError` if it takes too long, a `CalledProcessError` if it fails."""
    arguments = ["--part", name, "--out", str(out), "--limit", str(max(seconds - _GRACE, 0.0)), *["--tiny"] * tiny]
    # Without it the repository's folder `triton_kernels` would be imported by that name
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if device.type == "cuda":
        # Tests choose the interpreter if they find no driver, which may be in another place
        environment["TRITON_INTERPRET"] = "0"
        # Growing caches, most of all the dense one, would fragment memory
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, "-m", "kvcache_plugins.cli", "bench", "gpu", *arguments]
    try:
        subprocess.run(command, check=True, timeout=max(seconds, 1.0), env=environment)
    except subprocess.TimeoutExpired as error:
        raise TimeIsUpError from error
