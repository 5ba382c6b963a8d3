"""Recommendation of a cache for a memory budget: the most faithful one that fits, and how far each cache would reach.

Bytes are predicted from the config alone, by `memory_prediction`. The largest context and batch size are searched with
the same prediction, so `memory()` of a real run agrees with them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcache_plugins.models.reference_model import ModelSource
from kvcache_plugins.option_checks import check_number
from kvcache_plugins.registry import describe_caches
from kvcache_plugins.reports.memory import MemoryReport
from kvcache_plugins.transform_coding.calibration import AUTO

from .byte_sizes import in_thousands, parse_bytes, show_bytes
from .memory_prediction import CacheSizer, CacheSizingError, check_counts


# Limits of the searches
MAX_CONTEXT = 2**24
MAX_BATCH_SIZE = 2**16
# Caches that are sized by default: presets of "Choose a cache" in docs/index.md, and the dense cache
DEFAULT_CACHES: tuple[str, ...] = (
    "dynamic",
    "transform",
    "gear",
    "infinigen",
    "transform-16",
    "calibrated-12",
    "gear-2bit",
)
# KL to the dense cache of 512 tokens in one forward after 1024: SmolLM2 on WikiText-2, from `eval/results` (a test
# checks). Decoded tokens have a larger KL, see docs/results/gear.md. InfiniGen's is of decoded tokens of Moby Dick
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
class CacheFit:
    """
    Memory of one cache, compared with a budget.

    Attributes:
        cache (`str`): the cache.
        kl (`float`, *optional*): measured KL to the dense cache, if it is known.
        memory (`MemoryReport`): the predicted report.
        device_bytes, host_bytes (`int`): bytes on the model's device, including shared ones, and in host memory.
        fits (`bool`): True if both are within the budget.
        largest_context, largest_batch_size (`int`, *optional*): largest number that fits, the other one being as asked
            for, while one more does not fit; 0 if none fits, and `None` beyond the limit of the search. A slightly
            larger number may fit again, as whole groups are compressed.
    """

    cache: str
    kl: float | None
    memory: MemoryReport
    device_bytes: int
    host_bytes: int
    fits: bool
    largest_context: int | None
    largest_batch_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """
    Result of `recommend`, with its arguments; a budget of `None` is unlimited.

    Attributes:
        weights_bytes (`int`, *optional*): bytes of the weights in the dtype; `None` if they are quantized.
        available_bytes (`int`): part of `memory_bytes` for the cache: all of it, or the rest beside the weights.
        max_context (`int`, *optional*): largest context of the model, if its config has it.
        caches (`tuple[CacheFit, ...]`): the most faithful first, unmeasured ones last.
        not_sized (`dict[str, str]`): caches that cannot be sized, and the reasons.
        recommended (`str`, *optional*): the recommended cache, `None` if none fits.
        reason (`str`): the reason for it.
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
        """Return all fields for JSON. Entries of `caches` have parts of the report."""
        rows = []
        for fit in self.caches:
            row = {name: getattr(fit, name) for name in CacheFit.__slots__ if name != "memory"}
            row |= {name: getattr(fit.memory, name) for name in ("total_bytes", "kv_percent")}
            parts = {part: size for part, size in fit.memory.parts.items() if size}
            rows.append({**row, "parts": parts})
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
    kl: Mapping[str, float] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Recommendation:
    """
    List the caches that fit a memory budget, and recommend one of them, from the model's config alone.

    The bytes are those of caches. Activations, logits and the framework's own memory are not counted, and weights only
    `with_weights`.

    Args:
        model (`str`, `Path`, `PreTrainedConfig` or `PreTrainedModel`): see [`predict_memory`].
        memory (`int` or `str`): the budget on the device: bytes, or a text such as `"8GiB"` or `"500MB"`.
        context (`int`): tokens in the cache, for each sequence.
        batch_size (`int`, *optional*, defaults to 1): sequences, all of the same length.
        new_tokens (`int`, *optional*, defaults to 0): tokens of the context that were decoded one by one.
        dtype (`torch.dtype` or `str`, *optional*): dtype of keys and values. Defaults to float32 on `"cpu"` and
            bfloat16 on `"cuda"`.
        device (`str`, *optional*, defaults to `"cuda"`): device of the model, `"cuda"` or `"cpu"`.
        host_memory (`int` or `str`, *optional*): the budget in host memory, which some caches use beside a GPU.
            Unlimited by default.
        with_weights (`bool`, *optional*, defaults to `False`): the model's weights, in the dtype, have to fit the
            budget too.
        caches (`Sequence[str]`, *optional*): names, or `name:key=value,...` with options. The main presets by
            default, or those of `kl` and the dense cache.
        kl (`Mapping[str, float]`, *optional*): KL of caches on your own text or chat, from [`measure_kl`]. Measured on
            SmolLM2 by default.
        on_progress (`Callable`, *optional*): called with each cache before it is sized.

    Returns:
        `Recommendation`: `recommended` and `reason`; and `caches`, the memory of each with the largest context and
        batch size that fit.

    Raises:
        ValueError: if an argument is not accepted, there is no such model, or one of `caches` cannot be sized for it.
            Default caches that cannot be sized are in `not_sized`.
        ImportError: if a package that one of `caches` needs is not installed.

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
    _check_search(context, batch_size, caches, kl)
    sizer = CacheSizer(model, dtype=dtype, device=device)
    available = budget - _bytes_of_weights(sizer) if with_weights else budget
    if kl is not None:
        kl = {"dynamic": 0.0, **kl}
        caches = caches or tuple(kl)
    search = _Search(sizer, max(available, 0), host_budget, new_tokens, MEASURED_KL if kl is None else kl)
    fits, not_sized = search.fit_all(caches, context, batch_size, on_progress)
    # Sort by measured KL; the largest of the unmeasured caches comes first
    fits.sort(key=lambda fit: (math.inf if fit.kl is None else fit.kl, -fit.memory.total_bytes))
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
        available_bytes=search.device_budget,
        max_context=sizer.max_context,
        caches=tuple(fits),
        not_sized=not_sized,
        recommended=recommended,
        reason=reason,
    )


def _check_search(context: int, batch_size: int, caches: object, kl: Mapping[str, float] | None) -> None:
    """Raise a `ValueError` for numbers beyond the search, and for caches or KL of a wrong type."""
    for name, value, most in (("context", context, MAX_CONTEXT), ("batch_size", batch_size, MAX_BATCH_SIZE)):
        if value > most:
            raise ValueError(f"`{name}` has to be at most {most} but got {value}")
    if isinstance(caches, str) or (caches is not None and not caches):
        raise ValueError(f"`caches` has to be a sequence of names of caches but got {caches!r}")
    if kl is not None and not isinstance(kl, Mapping):
        raise ValueError(f"`kl` has to be a mapping of names of caches to numbers but got {kl!r}")
    for each in (kl or {}).values():
        check_number("kl", each, least=0.0)


def _bytes_of_weights(sizer: CacheSizer) -> int:
    if sizer.weights_bytes is None:
        raise ValueError(
            "`with_weights` needs to know the bytes of the weights, but they are quantized, and the config does not "
            "say: give as `memory` what they leave"
        )
    return sizer.weights_bytes


def _check_calibration(spec: str, sizer: CacheSizer) -> None:
    """Raise a `CacheSizingError` for a preset with a calibration if the model has none."""
    needs_one = any(entry.options.get("calibration") == AUTO for entry in describe_caches(spec))
    if needs_one and not sizer.is_calibrated:
        advice = "the model has no calibration; `kvcache-plugins calibrate --cache transform` makes one"
        raise CacheSizingError(spec, ValueError(advice))


@dataclass(frozen=True, slots=True)
class _Search:
    """Search of the largest sizes of caches within two budgets."""

    sizer: CacheSizer
    device_budget: int
    host_budget: int | None
    new_tokens: int
    kl: Mapping[str, float]

    def fit_all(
        self, caches: Sequence[str] | None, context: int, batch_size: int, on_progress: Callable[[str], None] | None
    ) -> tuple[list[CacheFit], dict[str, str]]:
        """Fit every cache. Return also the reasons, by cache, why default ones cannot be sized; named ones raise."""
        fits: list[CacheFit] = []
        not_sized: dict[str, str] = {}
        for spec in caches or DEFAULT_CACHES:
            if on_progress is not None:
                on_progress(spec)
            try:
                if not caches:
                    _check_calibration(spec, self.sizer)
                fits.append(self.fit(spec, context, batch_size))
            except (CacheSizingError, ImportError) as error:
                if caches:
                    raise
                not_sized[spec] = error.reason if isinstance(error, CacheSizingError) else str(error)
        return fits, not_sized

    def fit(self, spec: str, context: int, batch_size: int) -> CacheFit:
        """Compare a cache with the budgets, and find the largest context and batch size that fit."""
        memory = self._measure(spec, context, batch_size)
        device_bytes, host_bytes = self._split(memory)
        return CacheFit(
            cache=spec,
            kl=self.kl.get(spec),
            memory=memory,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            fits=self._load(memory) <= 1,
            largest_context=find_largest(
                lambda number: self._load(self._measure(spec, number, batch_size)), context, MAX_CONTEXT
            ),
            largest_batch_size=find_largest(
                lambda number: self._load(self._measure(spec, context, number)), batch_size, MAX_BATCH_SIZE
            ),
        )

    def _measure(self, spec: str, context: int, batch_size: int) -> MemoryReport:
        # The prompt has one token at least
        new_tokens = min(self.new_tokens, context - 1)
        return self.sizer.measure(spec, context, batch_size=batch_size, new_tokens=new_tokens)

    def _split(self, memory: MemoryReport) -> tuple[int, int]:
        """Return the bytes on the device, including shared ones, and in host memory."""
        on_device = memory.devices[self.sizer.device]
        return on_device + sum(memory.shared.values()), sum(memory.devices.values()) - on_device

    def _load(self, memory: MemoryReport) -> float:
        """Return the larger share of a budget that a cache needs."""
        on_device, in_host = self._split(memory)
        host_load = 0.0 if self.host_budget is None else in_host / self.host_budget
        return max(on_device / max(self.device_budget, 1), host_load)


def find_largest(load: Callable[[int], float], start: int, limit: int) -> int | None:
    """
    Find a number whose `load` is at most 1 while the next number's is more; 0 if there is none, `None` if the load of
    `limit` is at most 1. The search follows the line through the last two points, as most loads are nearly linear.
    """
    low, high = 0, limit + 1
    guess = min(start, limit)
    last, last_load = 0, 0.0
    step = 1
    while True:
        previous, previous_load = last, last_load
        last, last_load = guess, load(guess)
        if last_load <= 1:
            low = guess
        else:
            high = guess
        if high - low == 1:
            return None if low == limit else low
        slope = (last_load - previous_load) / (last - previous)
        aim = last + int((1 - last_load) // slope) if slope > 0 else 0
        # An aim outside of the bounds moves inside, further each time
        if aim <= low:
            aim = low + step
            step *= 2
        elif aim >= high:
            aim = high - step
            step *= 2
        guess = aim if low < aim < high else (low + high) // 2


def _choose(fits: list[CacheFit], is_decimal: bool) -> tuple[str | None, str]:
    """Return the first cache that fits, if any, and the reason."""
    if not fits:
        return None, "No cache could be sized for this model."
    chosen = next((fit for fit in fits if fit.fits), None)
    if chosen is None:
        least = min(fits, key=lambda fit: fit.device_bytes)
        held = show_bytes(least.device_bytes, is_decimal)
        host = f", and {show_bytes(least.host_bytes, is_decimal)} in host memory" if least.host_bytes else ""
        return None, f"No cache fits: the smallest, `{least.cache}`, would hold {held}{host}."
    if chosen.cache == "dynamic":
        return chosen.cache, "`dynamic`, Transformers' dense cache, fits: nothing has to be given up."
    if chosen.kl is None:
        return chosen.cache, f"`{chosen.cache}` holds most of what fits, and none of that was measured for fidelity."
    host = f"; {show_bytes(chosen.host_bytes, is_decimal)} of it are in host memory" if chosen.host_bytes else ""
    return chosen.cache, f"`{chosen.cache}` is nearest to the dense cache in measured KL of what fits{host}."
