"""Which cache to take: what fits a memory budget, how far it would reach, and the most faithful of that.

Bytes are those of `memory_prediction`, of the config alone. The largest context and batch are searched for with the
same bytes, so that what is promised is what `memory()` would say.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from kvcache_plugins.models.reference_model import ModelSource
from kvcache_plugins.registry import describe_caches
from kvcache_plugins.reports.memory import MemoryReport
from kvcache_plugins.transform_coding.calibration import AUTO

from .byte_sizes import in_thousands, parse_bytes, show_bytes
from .memory_prediction import CacheSizer, CacheSizingError, check_counts


# Where searches end
MAX_CONTEXT = 2**24
MAX_BATCH_SIZE = 2**16
# Sized by default: presets of "Which cache" in docs/index.md, and the dense cache
DEFAULT_CACHES: tuple[str, ...] = (
    "dynamic",
    "transform",
    "gear",
    "infinigen",
    "transform-16",
    "calibrated-12",
    "gear-2bit",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFit:
    """
    Stands for one cache beside a budget: bytes where the model is, shared ones included, and in host memory; the
    largest context at the same batch size, and batch at the same context, for which it fits while for one more it does
    not (0 for none, `None` beyond the limit). As whole groups are compressed, a little more may fit again.
    """

    cache: str
    memory: MemoryReport
    device_bytes: int
    host_bytes: int
    fits: bool
    largest_context: int | None
    largest_batch_size: int | None


def find_largest(load: Callable[[int], float], start: int, limit: int) -> int | None:
    """
    Finds a number whose `load` is at most 1 and the next one's more; 0 for none, `None` if even that of `limit` is.
    """
    low, high, guess, step = 0, limit + 1, min(start, limit), 1
    points: list[tuple[int, float]] = []
    while True:
        points = [*points[-1:], (guess, load(guess))]
        if points[-1][1] <= 1:
            low = guess
        else:
            high = guess
        if high - low == 1:
            return None if low == limit else low
        # Where the line through the last two points, or through nothing and the only one, reaches 1, if it grows
        (first, first_load), (last, last_load) = [(0, 0.0), *points][-2:]
        slope = (last_load - first_load) / (last - first)
        aim = last + int((1 - last_load) // slope) if slope > 0 else 0
        # Beside what is known already, further away every time
        if aim <= low:
            aim, step = low + step, 2 * step
        elif aim >= high:
            aim, step = high - step, 2 * step
        guess = aim if low < aim < high else (low + high) // 2


# KL to the dense cache behind a prompt of 1024 tokens: SmolLM2 on WikiText-2, of docs/results/gear.md, which a test
# compares; InfiniGen's is decoded, and on Moby Dick
MEASURED_KL = {
    "dynamic": 0.0,
    "llamacpp-q8_0": 0.0001,
    "transform-30": 0.0008,
    "calibrated-28": 0.0009,
    "transform": 0.0026,
    "calibrated-20": 0.0033,
    "transform-22": 0.0046,
    "gear-k4v3": 0.0062,
    "llamacpp-q5_1": 0.0069,
    "gear": 0.0073,
    "gear-4bit": 0.0073,
    "calibrated-16": 0.0077,
    "llamacpp-q5_0": 0.0077,
    "kivi-4bit": 0.0084,
    "quanto-4bit": 0.0085,
    "fp8": 0.009,
    "hqq-4bit": 0.0134,
    "infinigen": 0.0179,
    "transform-16": 0.0179,
    "gear-l-4bit": 0.0184,
    "calibrated-12": 0.0217,
    "kcvt-4bit": 0.023,
    "llamacpp-q4_1": 0.0293,
    "llamacpp-q4_0": 0.0335,
    "turboquant-4bit": 0.0481,
    "gear-2bit": 0.1497,
    "turboquant-3bit": 0.1976,
    "gear-l-2bit": 0.235,
    "kivi-2bit": 0.3176,
    "quanto-2bit": 0.318,
    "hqq-2bit": 0.7572,
    "turboquant-2bit": 0.9745,
    "per-token-2bit": 1.4574,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """
    What `recommend` found for what was asked; `None` of a budget is no limit.

    Attributes:
        weights_bytes (`int`, *optional*): bytes of the weights in the dtype; `None` if they are quantized.
        available_bytes (`int`): what of `memory_bytes` is for the cache: all of it, or what weights leave.
        max_context (`int`, *optional*): tokens that the model was made for, if its config says so.
        caches (`tuple[CacheFit, ...]`): the most faithful first, those that were not measured last.
        not_sized (`dict[str, str]`): caches that could not be sized, and why.
        recommended (`str`, *optional*): the cache to take, `None` if none fits; `reason` says why.
    """

    model: str
    context: int
    batch_size: int
    new_tokens: int
    dtype: str
    device: str
    memory_bytes: int
    host_memory_bytes: int | None
    weights_bytes: int | None
    available_bytes: int
    max_context: int | None
    caches: tuple[CacheFit, ...]
    not_sized: dict[str, str]
    recommended: str | None
    reason: str

    def to_dict(self) -> dict[str, object]:
        """Lists all of it for JSON; in `caches` are those of `CacheFit`, its report's, and `kl`, see `MEASURED_KL`."""
        rows = []
        for fit in self.caches:
            row = {name: getattr(fit, name) for name in CacheFit.__slots__ if name != "memory"}
            row |= {name: getattr(fit.memory, name) for name in ("total_bytes", "kv_percent")}
            parts = {part: size for part, size in fit.memory.parts.items() if size}
            rows.append({**row, "kl": MEASURED_KL.get(fit.cache), "parts": parts})
        return {**{name: getattr(self, name) for name in Recommendation.__slots__}, "caches": rows}


def recommend(
    model: ModelSource,
    memory: int | str,
    context: int,
    *,
    batch_size: int = 1,
    new_tokens: int = 0,
    dtype: torch.dtype | str | None = None,
    device: str = "cuda",
    host_memory: int | str | None = None,
    with_weights: bool = False,
    caches: Sequence[str] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """
    Tells which caches fit a memory budget and which of them to take, from the model's config alone.

    What is counted is what caches hold. Activations, logits and what a framework keeps for itself are not, and weights
    only if asked for. `model`, `context`, `batch_size`, `new_tokens`, `dtype` and `device` are as of `predict_memory`.

    Args:
        memory (`int` or `str`): the budget on the device: bytes, or a text such as `"8GiB"` or `"500MB"`.
        host_memory (`int` or `str`, *optional*): the same in host memory, which some caches use beside a GPU.
            Unlimited by default.
        with_weights (`bool`, *optional*, defaults to `False`): whether the model's weights, in the dtype, have to fit
            the budget too.
        caches (`Sequence[str]`, *optional*): names, or `name:key=value,...` with options. By default those that the
            README names.
        on_progress (`Callable`, *optional*): called with each cache before it is sized.

    Raises:
        ValueError: if an argument is none of the accepted ones, there is no such model, or a cache that was named
            cannot be sized for it. Of those by default the ones that cannot be are in `not_sized`.
        ImportError: if what a cache that was named needs is not installed.

    Example:

    ```python
    >>> from kvcache_plugins import recommend
    >>> found = recommend("Qwen/Qwen2.5-7B", memory="8GiB", context=32768)
    >>> found.recommended, found.reason
    ```
    """
    budget = parse_bytes("memory", memory)
    host_budget = None if host_memory is None else parse_bytes("host_memory", host_memory)
    check_counts(context, batch_size, new_tokens)
    sizer = CacheSizer(model, dtype=dtype, device=device)
    if with_weights and sizer.weights_bytes is None:
        raise ValueError(
            "`with_weights` needs to know the bytes of the weights, but they are quantized, and the config does not "
            "say: give as `memory` what they leave"
        )
    available = max(budget - (sizer.weights_bytes or 0), 0) if with_weights else budget

    def fit_cache(spec: str) -> CacheFit:
        """Sizes a cache beside the budgets, and searches the largest context and batch for which it fits."""

        @cache
        def measure(context: int, batch_size: int) -> tuple[MemoryReport, int, int]:
            # There is a prompt of one token at least
            report = sizer.measure(spec, context, batch_size=batch_size, new_tokens=min(new_tokens, context - 1))
            # What all caches share has to be there too
            own = report.devices[sizer.device]
            return report, own + sum(report.shared.values()), sum(report.devices.values()) - own

        def load(context: int, batch_size: int) -> float:
            """Returns the share of the scarcer budget that a cache takes."""
            _, on_device, in_host = measure(context, batch_size)
            return max(on_device / max(available, 1), 0.0 if host_budget is None else in_host / host_budget)

        memory, device_bytes, host_bytes = measure(context, batch_size)
        return CacheFit(
            cache=spec,
            memory=memory,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            fits=load(context, batch_size) <= 1,
            largest_context=find_largest(lambda number: load(number, batch_size), context, MAX_CONTEXT),
            largest_batch_size=find_largest(lambda number: load(context, number), batch_size, MAX_BATCH_SIZE),
        )

    fits: list[CacheFit] = []
    not_sized: dict[str, str] = {}
    entries = () if sizer.is_calibrated else describe_caches()
    without_calibration = {entry.name for entry in entries if entry.options.get("calibration") == AUTO}
    for spec in caches or DEFAULT_CACHES:
        if on_progress is not None:
            on_progress(spec)
        if not caches and spec in without_calibration:
            not_sized[spec] = "the model has no calibration; `kvcache-plugins calibrate --cache transform` makes one"
            continue
        try:
            fits.append(fit_cache(spec))
        except (CacheSizingError, ImportError) as error:
            if caches:
                raise
            not_sized[spec] = error.reason if isinstance(error, CacheSizingError) else str(error)
    # By measured KL; of what was not measured, what holds most comes first
    fits.sort(key=lambda fit: (MEASURED_KL.get(fit.cache, math.inf), -fit.memory.total_bytes))
    recommended, reason = _choose(fits, in_thousands(memory))
    return Recommendation(
        model=str(model) if isinstance(model, (str, Path)) else sizer.config.model_type,
        context=context,
        batch_size=batch_size,
        new_tokens=new_tokens,
        dtype=str(sizer.dtype).removeprefix("torch."),
        device=device,
        memory_bytes=budget,
        host_memory_bytes=host_budget,
        weights_bytes=sizer.weights_bytes,
        available_bytes=available,
        max_context=sizer.max_context,
        caches=tuple(fits),
        not_sized=not_sized,
        recommended=recommended,
        reason=reason,
    )


def _choose(fits: list[CacheFit], in_thousands: bool) -> tuple[str | None, str]:
    chosen = next((fit for fit in fits if fit.fits), None)
    if not fits:
        return None, "No cache could be sized for this model."
    if chosen is None:
        least = min(fits, key=lambda fit: fit.device_bytes)
        held = show_bytes(least.device_bytes, in_thousands)
        return None, f"No cache fits: the smallest, `{least.cache}`, would hold {held}."
    if chosen.cache == "dynamic":
        return chosen.cache, "`dynamic`, Transformers' dense cache, fits: nothing has to be given up."
    if chosen.cache not in MEASURED_KL:
        return chosen.cache, f"`{chosen.cache}` holds most of what fits, and none of that was measured for fidelity."
    host = f"; {show_bytes(chosen.host_bytes, in_thousands)} of it are in host memory" if chosen.host_bytes else ""
    return chosen.cache, f"`{chosen.cache}` is nearest to the dense cache in measured KL of what fits{host}."
