"""Parts of `bench gpu` about memory: InfiniGen beside full offloading, and the largest batch of a budget.

Three caches tell what InfiniGen's transfers cost. `offloaded`, Transformers' own, brings every layer's keys and values
to the GPU at every step. The same InfiniGen cache with its pool in the GPU's memory does everything that it otherwise
does, choosing included, but moves nothing over the bus: what is left between the two is what the bus costs. `dynamic`
is dense.

A batch fits if its cache is filled and `steps` tokens are decoded without the allocator running out: a chunk of
decoded tokens has to be compressed on the way. The model reads one sequence, and `batch_repeat_interleave` makes the
cache the batch's, as for many continuations of one prompt; every sequence has its own bytes.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.benchmarks.step import step_rows
from kvcache_plugins.eval.harness import spread, time_call
from kvcache_plugins.gear.kernel_check import require_close_layers
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory

from .parts import LLAMA_8B, STEPS, Fields, build_llama, llama, open_report, random_tokens
from .report import PartialReport, Run, TimeBox


RESIDENT = ", all resident"
# Tokens decoded before those that are timed: kernels are compiled, a run of tokens moves into the pool
_WARM_STEPS = 3
# Of the batch that would fill the budget with its caches alone
SHARES = (1.0, 0.975, 0.95, 0.925, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.2, 0.0)
LLAMA_2_7B = llama(32000, 4096, 11008, 32, 32, 32, 65536)


@torch.inference_mode()
def measure_offloading(
    run: Run,
    model: Fields = LLAMA_2_7B,
    context: int = 32768,
    steps: int = 40,
    # Random weights attend broadly, so the default rule always fetches the most that it may, a fifth: its worst case.
    # A twentieth is about what it fetches of a trained model's long contexts
    caches: Sequence[str] = ("dynamic", "infinigen", "offloaded", "infinigen-gear", "infinigen:share=0.05"),
) -> None:
    """Times InfiniGen beside what it stands in for; that it is exact where all is fetched is one of the checks."""
    report = open_report(run, "infinigen", "offloading", model, steps=steps)
    network = build_llama(model, run.device)
    read, fed = random_tokens(network, context + steps).split((context, steps), dim=1)
    # One cache after the other: two long contexts may not fit beside each other
    for index, spec in enumerate(caches):
        typer.echo(f"offloading: {spec} reads {context} tokens")
        box = run.box.share(len(caches) - index)
        with report.attempt(spec), box.step():
            name, options = parse_cache_spec(spec)
            if name.startswith("infinigen"):
                options["track_times"] = True
            cache = create_cache(name, network, **options)
            prefill = time_call(partial(network, read, **as_argument(cache), logits_to_keep=1), run.device)
            for token in fed[:, :_WARM_STEPS].split(1, dim=1):
                network(token, **as_argument(cache))
            _time_steps(spec, report, network, cache, fed, context, box, prefill_s=prefill)
            if isinstance(cache, InfiniGenCache):
                for layer in cache.layers:
                    if isinstance(layer, InfiniGenLayer) and layer.pool is not None:
                        layer.pool.map(partial(torch.Tensor.to, device=layer.device))
                network(fed[:, :1], **as_argument(cache))
                _time_steps(spec + RESIDENT, report, network, cache, fed, context, box)
                cache.detach()
        gc.collect()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
    medians = {row["cache"]: row["median_s"] for row in report.rows}
    for row in report.rows:
        resident = medians.get(row["cache"] + RESIDENT)
        if resident is not None:
            row["time_against_resident"] = row["median_s"] / resident
        if "offloaded" in medians:
            row["speed_against_offloaded"] = medians["offloaded"] / row["median_s"]
    report.save()


def _time_steps(
    name: str,
    report: PartialReport,
    model: PreTrainedModel,
    cache: Cache,
    fed: torch.Tensor,
    context: int,
    box: TimeBox,
    **more: Any,
) -> None:
    """Adds a row of the steps of a cache; three at least, however long they take."""
    before: Mapping[str, Any] = dict(cache.stats()) if isinstance(cache, InfiniGenCache) else {}
    seconds: list[float] = []
    for token in fed.split(1, dim=1):
        if len(seconds) > 2 and box.left <= 0:
            break
        seconds.append(time_call(partial(model, token, **as_argument(cache)), model.device))
    (row,) = step_rows({name: seconds}, {name: cache}, context)
    # Here the first is itself; rows are set against others in the end
    del row["speed_against_first"]
    row |= {**more, "steps": len(seconds), "tokens_per_s": 1 / row["median_s"]}
    if isinstance(cache, InfiniGenCache):
        transfer, stalled = (row["stats"][key] - before[key] for key in ("transfer_s", "stalled_s"))
        row["counted"] = count_transfers(cache)
        row |= {"transfer_s_per_token": transfer / len(seconds), "stalled_s_per_token": stalled / len(seconds)}
        row["hidden_share"] = max(1 - stalled / transfer, 0.0) if transfer else 0.0
    report.add(row, f"  {name}: {1e3 * row['median_s']:.2f} ms a token, {row['tokens_per_s']:.1f} tokens/s")


def count_transfers(cache: InfiniGenCache) -> dict[str, float]:
    """
    Counts the bytes that a decoded token brings over the bus, from the cache's own counters; no GPU is needed.

    Returns:
        `dict[str, float]`: `bytes_per_token`, and `full_offloading_bytes_per_token`, the keys and values of all real
        tokens in all layers, which a cache that is offloaded as a whole brings there.
    """
    stats = cache.stats()
    # A layer takes the same step as all others
    num_steps = stats["selected_calls"] / stats["layers_offloaded"]
    layer = next(each for each in cache.layers if isinstance(each, InfiniGenLayer))
    # As a dense cache has them: what is fetched may be codes
    row_bytes = sum(layer.states_shape(side)[3] for side in ("keys", "values")) * layer.dtype.itemsize
    in_all_layers = stats["tokens_fetchable"] * stats["num_layers"] / stats["layers_offloaded"]
    return {
        "bytes_per_token": stats["bytes_fetched"] / num_steps,
        "full_offloading_bytes_per_token": in_all_layers * row_bytes / num_steps,
    }


class Budget:
    """
    Bytes that may be used, enforced inside `enforce()`.

    On a GPU PyTorch's allocator enforces it and counts the peak: weights, cache and whatever is computed on the way,
    but not the driver's own context. A CPU's allocator cannot be asked for either: there the cache alone counts, at
    the end of each step, which is enough to try the code.

    Args:
        num_bytes (`int`): the budget.
        device (`torch.device`): of the model.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.device = num_bytes, device
        self.is_gpu = device.type == "cuda"
        self._peak = 0

    @contextmanager
    def enforce(self) -> Iterator[None]:
        """Has the allocator refuse more than the budget."""
        if not self.is_gpu:
            yield
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.num_bytes / total), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def start(self) -> int:
        """Frees what the last trial left and forgets its peak; returns the bytes that are not in use."""
        gc.collect()
        self._peak = 0
        if not self.is_gpu:
            return self.num_bytes
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return self.num_bytes - torch.cuda.memory_allocated(self.device)

    def check(self, cache: Cache) -> None:
        """Raises what the allocator would; it does so by itself on a GPU."""
        if not self.is_gpu:
            self._peak = max(self._peak, measure_memory(cache).total_bytes)
            if self._peak > self.num_bytes:
                raise torch.OutOfMemoryError("the cache exceeds the budget")

    def peaks(self) -> dict[str, int]:
        """Reads the most bytes in use at a time since `start`, and the most that the allocator held."""
        if not self.is_gpu:
            return {"peak_bytes": self._peak, "peak_reserved_bytes": self._peak}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }


def run_batch(
    model: PreTrainedModel, cache: Cache, batch_size: int, context: int, steps: int, budget: Budget
) -> dict[str, Any] | None:
    """
    Fills an empty cache with `context` tokens of each sequence and decodes `steps` tokens, the budget enforced and
    started.

    Returns times, bytes and peaks, or `None` if the budget does not suffice.
    """
    try:
        model(random_tokens(model, context), **as_argument(cache), logits_to_keep=1)
        cache.batch_repeat_interleave(batch_size)
        budget.check(cache)
        token, seconds = random_tokens(model, 1, batch_size), []
        for _ in range(steps):
            seconds.append(time_call(partial(model, token, **as_argument(cache)), model.device))
            budget.check(cache)
    except torch.OutOfMemoryError:
        return None
    peaks, held = budget.peaks(), measure_memory(cache).total_bytes
    if peaks["peak_reserved_bytes"] > budget.num_bytes:
        return None
    return {
        "largest_batch": batch_size,
        **spread(seconds),
        "tokens_per_s": batch_size * steps / sum(seconds),
        "cache_bytes": held,
        "bytes_per_sequence": held / batch_size,
        **peaks,
    }


def measure_largest_batch(
    model: PreTrainedModel, create: Callable[[], Cache], context: int, steps: int, budget: Budget, box: TimeBox
) -> dict[str, Any] | None:
    """
    Measures the largest batch for a cache that `create` makes, see `run_batch`.

    What the cache of one sequence holds says how many would fit if nothing else were allocated. Shares of that, see
    `SHARES`, are tried until one fits. `trials` of the row are all that were; `None` if not even one sequence fits.
    """
    available = budget.start()
    one = run_batch(model, create(), 1, context, 2, budget)
    if one is None:
        return None
    trials: list[tuple[int, bool]] = []
    sizes = (int(share * available / one["cache_bytes"]) for share in SHARES)
    for size in dict.fromkeys(max(size, 1) for size in sizes):
        with box.step():
            budget.start()
            row = run_batch(model, create(), size, context, steps, budget)
        trials.append((size, row is not None))
        if row is not None:
            return {**row, "trials": trials}
    return None


@torch.inference_mode()
def search_largest_batches(
    run: Run,
    model: Fields = LLAMA_8B,
    budget_bytes: int = 40 * 2**30,
    context: int = 4096,
    steps: int = STEPS,
    caches: Sequence[str] = ("dynamic", "gear-2bit", "gear"),
) -> None:
    """Searches the largest batch in a fixed budget, for each cache whose attention is right."""
    network, budget = build_llama(model, run.device), Budget(budget_bytes, run.device)
    report = open_report(run, "largest_batch", "batch", model, context=context, steps=steps, budget_bytes=budget_bytes)
    report.settings["model_bytes"] = sum(parameter.nbytes for parameter in network.parameters())
    report.settings["enforced_by"] = "the device's allocator" if budget.is_gpu else "bytes of the cache"
    for index, name in enumerate(caches):
        typer.echo(f"largest batch: {name}")
        with report.attempt(name):
            # A batch of two, with a decoded token in the buffer
            cache, tokens = create_cache(name, network), random_tokens(network, context + 1, 2)
            for part in (tokens[:, :-1], tokens[:, -1:]):
                network(part, **as_argument(cache), logits_to_keep=1)
            require_close_layers(name, cache, network.config.num_attention_heads)
            del cache
            with budget.enforce():
                create, share = partial(create_cache, name, network), run.box.share(len(caches) - index)
                row = measure_largest_batch(network, create, context, steps, budget, share)
            if row is None:
                raise torch.OutOfMemoryError("not even one sequence fits into the budget")
            first = report.rows[0] if report.rows else row
            ratio = row["tokens_per_s"] / first["tokens_per_s"]
            report.add(
                {"cache": name, **row, "throughput_against_first": ratio},
                f"  {row['largest_batch']} sequences, {row['tokens_per_s']:.1f} tokens/s, "
                f"peak {row['peak_bytes'] / 2**30:.2f} GiB",
            )
