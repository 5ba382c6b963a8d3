"""The largest batch of a model that fits into a fixed number of bytes, its throughput and its peak.

A batch fits if the context is read, the cache is filled and `steps` tokens are decoded without the allocator running
out: a chunk of decoded tokens has to be compressed on the way. Context comes into the cache in one of two ways:

- `repeated`: the model reads one sequence, and `batch_repeat_interleave` makes the cache the batch's, as for many
  continuations of one prompt. Every sequence has its own bytes. What limits the batch is the cache;
- `read`: the model reads the whole batch at once, as `generate` does. What limits it is also what the model allocates
  for that.
"""

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.eval.harness import spread, time_call
from kvcache_plugins.gear.kernel_check import require_close_layers
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import measure_memory

from .partial_report import TimeBox, TimeIsUpError
from .parts import build_llama, open_report
from .plan import Plan


WAYS = ("repeated", "read")


class Budget:
    """
    Bytes that may be used, enforced inside a `with`.

    On a GPU PyTorch's allocator enforces it and counts the peak: weights, cache and whatever is computed on the way,
    but not the driver's own context. A CPU's allocator cannot be asked for either: there the cache alone counts, at
    the end of each step, which is enough to try the code.

    Args:
        num_bytes (`int`): the budget.
        device (`torch.device`): of the model.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes, self.is_gpu = num_bytes, device.type == "cuda"
        self.device = device
        self._peak = 0

    def __enter__(self) -> "Budget":
        if self.is_gpu:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self.num_bytes / total), self.device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_gpu:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    @property
    def enforced_by(self) -> str:
        return "the device's allocator" if self.is_gpu else "bytes of the cache"

    def start(self) -> None:
        """Frees what the last trial left and forgets its peak."""
        gc.collect()
        self._peak = 0
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def check(self, cache: Cache) -> None:
        """Raises what the allocator would; it does so by itself on a GPU."""
        if not self.is_gpu:
            self._peak = max(self._peak, measure_memory(cache).total_bytes)
            if self._peak > self.num_bytes:
                raise torch.OutOfMemoryError("the cache exceeds the budget")

    def available(self) -> int:
        """Bytes that are not in use yet."""
        return self.num_bytes - (torch.cuda.memory_allocated(self.device) if self.is_gpu else 0)

    def peaks(self) -> dict[str, int]:
        """The most bytes in use at a time since `start`, and the most that the allocator held."""
        if not self.is_gpu:
            return {"peak_bytes": self._peak, "peak_reserved_bytes": self._peak}
        return {
            "peak_bytes": torch.cuda.max_memory_allocated(self.device),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
        }


def run_batch(
    model: PreTrainedModel, cache: Cache, batch_size: int, way: str, context: int, steps: int, budget: Budget
) -> dict[str, Any] | None:
    """
    Fills a cache and decodes. Returns times, bytes and peaks, or `None` if the budget does not suffice.

    Args:
        model (`PreTrainedModel`): the model; it reads random tokens.
        cache (`Cache`): an empty cache.
        batch_size (`int`): sequences.
        way (`str`): one of `WAYS`.
        context (`int`): tokens of each sequence that are in the cache before decoding.
        steps (`int`): tokens to decode.
        budget (`Budget`): entered and started.
    """
    num_read = 1 if way == "repeated" else batch_size
    tokens = torch.randint(model.config.vocab_size, (num_read, context), device=model.device)
    try:
        model(tokens, **as_argument(cache), logits_to_keep=1)
        if way == "repeated":
            cache.batch_repeat_interleave(batch_size)
        budget.check(cache)
        token = torch.randint(model.config.vocab_size, (batch_size, 1), device=model.device)
        seconds = []
        for _ in range(steps):
            seconds.append(time_call(partial(model, token, **as_argument(cache)), model.device))
            budget.check(cache)
    except torch.OutOfMemoryError:
        return None
    peaks = budget.peaks()
    if peaks["peak_reserved_bytes"] > budget.num_bytes:
        return None
    return {
        "largest_batch": batch_size,
        **spread(seconds),
        "tokens_per_s": batch_size * steps / sum(seconds),
        "cache_bytes": measure_memory(cache).total_bytes,
        **peaks,
    }


def find_largest(
    try_batch: Callable[[int], dict[str, Any] | None], first: int, too_many: int, box: TimeBox, precision: float = 0.02
) -> dict[str, Any] | None:
    """
    Halves the interval between what fits and what does not, beginning with `first`.

    Args:
        try_batch (`Callable`): gives a row for a batch size that fits, else `None`.
        first (`int`): tried first, at least 1.
        too_many (`int`): a batch size known not to fit.
        box (`TimeBox`): a trial is begun only if there is time for one and a half of the longest so far.
        precision (`float`, *optional*, defaults to 0.02): share of the batch up to which it is determined.

    Returns:
        The row of the largest batch that fitted, with `trials` and whether the `search` came to its end; `None` if
        not even one sequence fits.

    Raises:
        TimeIsUpError: if time was up before anything fitted.
    """
    low, high, best = 0, too_many, None
    trials: list[list[int | bool]] = []
    candidate, longest = min(first, too_many - 1), 0.0
    while high - low > max(1, int(precision * low)) and candidate > low:
        if box.left < 1.5 * longest:
            break
        start = time.monotonic()
        row = try_batch(candidate)
        longest = max(longest, time.monotonic() - start)
        trials.append([candidate, row is not None])
        if row is None:
            high = candidate
        else:
            low, best = candidate, row
        candidate = (low + high) // 2
    is_complete = high - low <= max(1, int(precision * low))
    if best is None and not is_complete:
        raise TimeIsUpError
    if best is None:
        return None
    return {**best, "trials": trials, "search": "complete" if is_complete else "cut short: time"}


def measure_largest_batch(
    model: PreTrainedModel,
    create: Callable[[], Cache],
    way: str,
    context: int,
    steps: int,
    budget: Budget,
    box: TimeBox,
) -> dict[str, Any] | None:
    """Measures the largest batch for a cache that `create` makes: see `run_batch` and `find_largest`."""

    def try_batch(batch_size: int) -> dict[str, Any] | None:
        budget.start()
        return run_batch(model, create(), batch_size, way, context, steps, budget)

    budget.start()
    available = budget.available()
    one = run_batch(model, create(), 1, "read", context, 2, budget)
    if one is None:
        return None
    # The bytes that the caches alone hold are a bound; where the model reads all sequences, what it needs for one is
    # a better guess
    most = int(available // one["cache_bytes"])
    one_bytes = one["cache_bytes"] if way == "repeated" else one["peak_bytes"] - (budget.num_bytes - available)
    row = find_largest(try_batch, max(1, int(0.95 * available / one_bytes)), most + 1, box)
    return row if row is None else {**row, "bytes_per_sequence": row["cache_bytes"] / row["largest_batch"]}


@torch.inference_mode()
def search_largest_batches(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Searches the largest batch in a fixed budget, for each way in which context comes into a cache."""
    model, budget = build_llama(plan.model, device), Budget(plan.budget, device)
    report = open_report(
        out,
        "gpu_largest_batch",
        "batch",
        device,
        plan.model,
        model_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        context=plan.batch_context,
        steps=plan.steps,
        budget_bytes=plan.budget,
        enforced_by=budget.enforced_by,
    )
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
