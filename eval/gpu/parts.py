"""The parts of `bench gpu`. Each checks what it times against plain PyTorch, and notes what went wrong."""

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel, StaticCache

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.eval.benchmarks.kernels import BACKENDS, Contest
from kvcache_plugins.eval.benchmarks.step import step_rows, time_steps
from kvcache_plugins.eval.harness import cache_stats, spread, take_turns, time_call, time_on_gpu
from kvcache_plugins.gear.kernel_check import MismatchError, plain_pytorch, require_close_layers, require_same_rows
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .partial_report import PartialReport, TimeBox, TimeIsUpError
from .plan import Plan


DTYPE = torch.bfloat16
# Processes that share the tests: kernels are compiled for nearly every one, which is work for CPUs
_TEST_PROCESSES = "8"
# Presets in calibrated bases, and the tokens that a calibration is made of
_CALIBRATED, _CALIBRATION_TOKENS = "gear-c", 96
# Times that coding is timed, and bytes that are copied before that: more than a GPU's cache holds
_ROUNDS, _AHEAD_BYTES = 20, 2**28
# Tokens of a static cache, and steps until a graph of it is captured
_ROOM, _WARM_STEPS = 8192, 3


def build_llama(fields: Mapping[str, int], device: torch.device, dtype: torch.dtype = DTYPE) -> PreTrainedModel:
    """Builds a Llama of any size with random weights on the device: nothing is downloaded or copied."""
    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()


def open_report(
    out: Path, name: str, kind: str, device: torch.device, fields: Mapping[str, Any], **settings: Any
) -> PartialReport:
    """Opens the result of a part, measured on a model with random weights."""
    dtype = str(DTYPE).removeprefix("torch.")
    return PartialReport(
        out / f"{name}.json", kind, device, {"weights": "random", **fields, **settings, "dtype": dtype}
    )


def milliseconds(row: Mapping[str, Any]) -> str:
    """Says the median of a row, and its quartiles."""
    lower, median, upper = (1e3 * row[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
    return f"{row.get('cache', row.get('name'))}: {median:.3f} ms ({lower:.3f} to {upper:.3f})"


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
    """
    Checks every preset's attention over what it stores, a row for each that is right.

    A preset runs two layers of random states: a prompt, decoded tokens that the update after them compresses, and one
    more. What attention makes of that is held against plain PyTorch from the same storage.
    """
    report = open_report(out, "gpu_presets", "presets", device, plan.preset_model)
    model, longest = build_llama(plan.preset_model, device), 0.0
    for name in plan.presets:
        with report.attempt(name):
            box.require(1.5 * longest)
            start = time.monotonic()
            error = _check_preset(name, create_preset(name, model), model, plan)
            longest = max(longest, time.monotonic() - start)
            report.add({"cache": name, "relative_error": error, "seconds": time.monotonic() - start})
            typer.echo(f"{name}: relative error {error:.1e}")


def create_preset(name: str, model: PreTrainedModel) -> Cache:
    """Creates a preset's cache; those in calibrated bases share a calibration of the model."""
    options: dict[str, Any] = {"calibration": _calibrate(model)} if name.startswith(_CALIBRATED) else {}
    return create_cache(name, model, **options)


@lru_cache(maxsize=1)
def _calibrate(model: PreTrainedModel) -> Any:
    tokens = torch.randint(model.config.vocab_size, (_CALIBRATION_TOKENS,), device=model.device)
    return calibrate_transform(model, [tokens], num_draws=1)


def _check_preset(name: str, cache: Cache, model: PreTrainedModel, plan: Plan) -> float:
    with torch.inference_mode():
        for count in plan.preset_tokens:
            tokens = torch.randint(model.config.vocab_size, (1, count), device=model.device)
            model(tokens, **as_argument(cache), logits_to_keep=1)
        error = require_close_layers(name, cache, model.config.num_attention_heads)
    stats = cache_stats(cache)
    if error is None or stats["kernel_fallbacks"] or not stats["fused_calls"]:
        raise MismatchError(f"{name} was not computed by the kernels: {stats}")
    return error


def time_coding(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Times a prompt and a chunk of tokens coded by kernels and plain PyTorch, and copied, if coded right."""
    report = open_report(out, "gpu_coding", "coding", device, plan.preset_model, tokens=plan.coding_tokens)
    model = build_llama(plan.preset_model, device)
    for name in plan.coding_caches:
        with report.attempt(name):
            box.require(0.0)
            for row in _time_coding_of(name, create_preset(name, model), model, plan, device):
                report.add({"cache": name, **row})
                typer.echo(f"{name}, {row['tokens']} tokens, {row['way']}: {1e3 * row['median_s']:.3f} ms")


@torch.inference_mode()
def _time_coding_of(
    name: str, cache: Cache, model: PreTrainedModel, plan: Plan, device: torch.device
) -> list[dict[str, Any]]:
    layer, keys, values = _fill_layer(cache, model, max(plan.coding_tokens), device)
    assert layer.codec is not None
    start, rows = layer.blocks[0].start, []
    positions = Positions(start)
    for count in plan.coding_tokens:
        own_keys, own_values = (each[:, :, start : start + count] for each in (keys, values))
        encode = partial(layer.codec.encode, own_keys, own_values, positions)
        found = require_same_rows(f"{name}, {count} tokens", layer.codec, own_keys, own_values, positions)
        states = [own_keys, own_values]
        targets = [torch.empty_like(each) for each in states]
        ways: dict[str, Callable[[], Any]] = {
            "kernels": encode,
            "plain": partial(_in_plain_pytorch, encode),
            "copy": partial(torch._foreach_copy_, targets, states),
        }
        for way, function in ways.items():
            seconds = _time_coding(function, device)
            rows.append({"tokens": states[0].shape[2], "way": way, "different_rows": found, **spread(seconds)})
    return rows


def _fill_layer(
    cache: Cache, model: PreTrainedModel, count: int, device: torch.device
) -> tuple[CompressedLayer, torch.Tensor, torch.Tensor]:
    """Has the first layer of a cache code a prompt of random states; returns these too."""
    config, layer = model.config, cache.layers[0]
    assert isinstance(layer, CompressedLayer)
    head_dim = config.hidden_size // config.num_attention_heads
    size = config.num_key_value_heads, count + layer.packing.num_sink_tokens, head_dim
    keys, values = torch.randn(2, 1, *size, device=device).to(DTYPE)
    keys = keys * torch.rand(1, size[0], 1, head_dim, device=device).to(DTYPE)
    layer.update(keys, values)
    query = torch.randn(1, config.num_attention_heads, *size[1:], device=device).to(DTYPE)
    layer.on_exact_attention(AttentionCall(query, is_causal=True))
    layer.settle_prompt()
    return layer, keys, values


def _in_plain_pytorch(function: Callable[[], Any]) -> None:
    with plain_pytorch():
        function()


def _time_coding(function: Callable[[], Any], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return [time_call(function, device)]
    function()
    source = torch.empty(_AHEAD_BYTES // 4, device=device)
    ahead = partial(torch.empty_like(source).copy_, source)
    return [time_on_gpu(function, ahead) for _ in range(_ROUNDS)]


@torch.inference_mode()
def time_attention(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Times decode attention alone, a file a shape. What is not right is not timed; the others are."""
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
                typer.echo(milliseconds(row))


def _make_cache(name: str, model: PreTrainedModel, max_length: int) -> Cache:
    if name == "static":
        return StaticCache(config=model.config, max_cache_len=max_length)
    return create_cache(name, model)


@torch.inference_mode()
def time_whole_steps(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Times whole decode steps of a model at batch 1, caches taking turns."""
    report = open_report(out, "gpu_step", "step", device, plan.model, steps=plan.steps)
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
    seconds, _ = time_steps(model, caches, tokens[:, plan.context + 1 :], report.attempt, box.left)
    for row in step_rows(seconds, caches, plan.context):
        report.add({**row, "tokens_per_s": 1 / row["median_s"], "prefill_s": prefill_seconds[row["cache"]]})
        typer.echo(milliseconds(row))
    for name, times in seconds.items():
        if len(times) < plan.steps:
            report.fail(f"{name}, steps after {len(times)}", "skipped: time, or what stands above")


def _fill(
    model: PreTrainedModel, create: Callable[[], Cache], tokens: torch.Tensor, plan: Plan
) -> tuple[Cache, float]:
    """Fills a cache with the context and one token; returns also the seconds of reading the context again."""
    context, token = tokens[:, : plan.context], tokens[:, plan.context : plan.context + 1]
    # The first time is for what is compiled
    model(context, **as_argument(create()), logits_to_keep=1)
    cache = create()
    seconds = time_call(partial(model, context, **as_argument(cache), logits_to_keep=1), model.device)
    model(token, **as_argument(cache))
    return cache, seconds


def compiled(model: PreTrainedModel) -> Callable[..., Any]:
    """Has steps of a model be CUDA graphs, as `generate` does; on a CPU graphs that are run as they are."""
    options = {"mode": "reduce-overhead"} if model.device.type == "cuda" else {"backend": "eager"}
    made: Callable[..., Any] = torch.compile(model.__call__, fullgraph=True, **options)  # type: ignore[call-overload]
    return made


@torch.no_grad()
def check_captured(name: str, model: PreTrainedModel, plan: Plan) -> dict[str, Any]:
    """
    Decodes what a static cache decodes, by graphs and without.

    Raises:
        MismatchError: if tokens differ.
    """
    tokens = torch.randint(model.config.vocab_size, (1, plan.preset_tokens[0]), device=model.device)

    def decode(run: Callable[..., Any]) -> torch.Tensor:
        cache, step, decoded = create_static(name, model), tokens, []
        for number in range(plan.captured_tokens):
            step = (
                (run if number else model)(step, **as_argument(cache), logits_to_keep=1).logits.argmax(dim=-1).clone()
            )
            decoded.append(step)
        return torch.cat(decoded, dim=1)

    num_equal = int((decode(compiled(model)) == decode(model)).cumprod(dim=1).sum())
    if num_equal < plan.captured_tokens:
        raise MismatchError(f"{name}, captured: {num_equal} of {plan.captured_tokens} tokens are right")
    return {"checked_tokens": num_equal}


def create_static(name: str, model: PreTrainedModel) -> Cache:
    """Makes a cache with room for the tokens of any part."""
    return create_cache(name, model, max_cache_len=_ROOM)


@torch.no_grad()
def time_captured(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Times whole steps at batch 1, captured as CUDA graphs and not, if they decode the same tokens in float32."""
    checked = {"steps": plan.steps, "checked_tokens": plan.captured_tokens}
    report = open_report(out, "gpu_captured", "captured", device, plan.model, **checked)
    small, counts = build_llama(plan.preset_model, device, torch.float32), {}
    for name in plan.captured_caches:
        with report.attempt(f"{name}, tokens"):
            counts[name] = check_captured(name, small, plan)
            typer.echo(f"{name}: tokens of {plan.captured_tokens} steps are equal, {counts[name]}")
    model = build_llama(plan.model, device)
    tokens = torch.randint(model.config.vocab_size, (1, plan.context + 1 + plan.steps), device=device)
    caches, longest, graphs = dict[str, Cache](), 0.0, compiled(model)

    def step(name: str, number: int) -> None:
        place = plan.context + 1 + number
        (graphs if ", " in name else model)(tokens[:, place : place + 1], **as_argument(caches[name]))

    for name in ("dynamic", *(each for right in counts for each in (right, f"{right}, captured"))):
        with report.attempt(name):
            box.require(2 * longest)
            preset, _, way = name.partition(", ")
            cache = create_static(preset, model) if way else create_cache(preset, model)
            read = partial(model, tokens[:, : plan.context], **as_argument(cache), logits_to_keep=1)
            longest = max(longest, time_call(read, device))
            caches[name] = cache
            # What is compiled and captured is so before the first turn
            for _ in range(_WARM_STEPS):
                step(name, -1)
    clock = partial(time_call, device=device)
    seconds = take_turns(
        {name: partial(step, name) for name in caches}, clock, plan.steps, seconds=box.left, guard=report.attempt
    )
    for row in step_rows(seconds, caches, plan.context):
        report.add({**row, **counts.get(row["cache"].partition(", ")[0], {})})
        typer.echo(milliseconds(row))
