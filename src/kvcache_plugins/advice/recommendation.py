"""Which cache to take: what fits a memory budget, how far it would reach, and the most faithful of that.

Bytes are those of `sizing`, of the config alone. The largest context and batch are searched for with the same bytes,
so that what is promised is what `memory()` would say.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvcache_plugins.registry import describe_caches
from kvcache_plugins.reports.memory import MemoryReport

from .memory_prediction import CacheSizer, CacheSizingError, ModelSource, check_counts


# The most faithful first, by their KL to the dense cache: of the README's table, which a test compares, and of
# docs/infinigen.md. What drops tokens for good is last.
FIDELITY_ORDER = (
    "dynamic",
    "gear-k4v4-g32",
    "gear-k4v4",
    "gear-k4v3",
    "gear-4bit",
    "kivi-4bit",
    "quanto-4bit",
    "fp8",
    "infinigen",
    "infinigen-gear",
    "hqq-4bit",
    "gear-l-4bit",
    "kcvt-4bit",
    "gear-k3v2",
    "infinigen-paper",
    "gear-2bit",
    "gear-k2v2",
    "gear-l-2bit",
    "kivi-2bit",
    "quanto-2bit",
    "hqq-2bit",
    "per-token-2bit",
    "h2o",
)
# Where searches end
MAX_CONTEXT = 2**24
MAX_BATCH_SIZE = 2**16
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFit:
    """
    One cache beside a budget.

    Attributes:
        cache (`str`): a name, or `name:key=value,...` with options.
        memory (`MemoryReport`): what it would hold.
        device_bytes (`int`): of that, where the model is.
        host_bytes (`int`): of that, in host memory while the model is on a GPU.
        fits (`bool`): whether both are within their budgets.
        largest_context (`int`, *optional*): the context for which it fits at the same batch size, while for one token
            more it does not; 0 if not even one token does, `None` if `MAX_CONTEXT` tokens do. A cache that compresses
            whole groups may hold some tokens less than a group in exact form: so nearby contexts of less than a group
            more may fit again, or of less not.
        largest_batch_size (`int`, *optional*): the same of sequences at the same context; `None` if `MAX_BATCH_SIZE`
            do.
    """

    cache: str
    memory: MemoryReport
    device_bytes: int
    host_bytes: int
    fits: bool
    largest_context: int | None
    largest_batch_size: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """
    What `recommend` found.

    Attributes:
        model (`str`): the model as it was named, or its type.
        context, batch_size, new_tokens (`int`): as asked.
        dtype, device (`str`): as asked or by default.
        memory_bytes (`int`): the budget on the device.
        host_memory_bytes (`int`, *optional*): the budget in host memory, if there is one.
        weights_bytes (`int`, *optional*): bytes of the weights in the dtype; `None` if they are quantized.
        available_bytes (`int`): what of the budget on the device is for the cache: all of it, or what weights leave.
        max_context (`int`, *optional*): tokens that the model was made for, if its config says so.
        caches (`tuple[CacheFit, ...]`): the most faithful first, those that were not measured last.
        not_sized (`dict[str, str]`): caches that could not be sized, and why.
        recommended (`str`, *optional*): the cache to take; `None` if none fits.
        reason (`str`): why, in a sentence.
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
        """
        All of it for JSON: the attributes by name, and in `caches` for each a dictionary of `cache`, `fits`,
        `device_bytes`, `host_bytes`, `total_bytes`, `kv_percent` (of a cache at 16 bits), `parts` (bytes by part),
        `largest_context` and `largest_batch_size`.
        """
        rows = []
        for fit in self.caches:
            row = {name: getattr(fit, name) for name in CacheFit.__slots__ if name != "memory"}
            parts = {part: size for part, size in fit.memory.parts.items() if size}
            row |= {"total_bytes": fit.memory.total_bytes, "kv_percent": fit.memory.kv_percent, "parts": parts}
            rows.append(row)
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
        memory (`int` or `str`):
            The budget on the device: bytes, or a text such as `"8GiB"` or `"500MB"`.
        host_memory (`int` or `str`, *optional*):
            The same in host memory, which some caches use beside a GPU. Unlimited by default.
        with_weights (`bool`, *optional*, defaults to `False`):
            Whether the model's weights, in the dtype, have to fit the budget too.
        caches (`Sequence[str]`, *optional*):
            Names, or `name:key=value,...` with options. By default every registered cache.
        on_progress (`Callable`, *optional*):
            Called with each cache before it is sized.

    Raises:
        ValueError: if an argument is none of the accepted ones, there is no such model, or a cache that was named
            cannot be sized for it. Of all caches by default, those that cannot be are in `not_sized`.
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
    available = budget - _weights_bytes(sizer) if with_weights else budget
    search = _Search(sizer, context, batch_size, new_tokens, max(available, 0), host_budget)
    fits, not_sized = [], {}
    for spec in caches or default_caches():
        if on_progress is not None:
            on_progress(spec)
        try:
            fits.append(search.fit(spec))
        except (CacheSizingError, ImportError) as error:
            if caches:
                raise
            not_sized[spec] = error.reason if isinstance(error, CacheSizingError) else str(error)
    fits.sort(key=_rank)
    recommended, reason = _choose(fits)
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
        available_bytes=max(available, 0),
        max_context=sizer.max_context,
        caches=tuple(fits),
        not_sized=not_sized,
        recommended=recommended,
        reason=reason,
    )


def default_caches() -> list[str]:
    """Names of all registered caches, one of those that stand for the same."""
    names: list[str] = []
    seen = []
    for entry in sorted(describe_caches(), key=lambda entry: entry.name not in FIDELITY_ORDER):
        stands_for = (entry.factory, dict(entry.options))
        if stands_for not in seen:
            seen.append(stands_for)
            names.append(entry.name)
    return names


def parse_bytes(name: str, size: int | str) -> int:
    """
    Bytes of a number, or of a text such as `8GiB`, `1.5 GB` or `500MB`. In units with an `i` a step is 1024, in others
    1000; capital or small letters mean the same.

    Args:
        name (`str`): the option, named in the `ValueError` for anything else.
        size (`int` or `str`): the size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = None if match is None else _UNITS.get(match[2].lower())
    if isinstance(size, bool) or not isinstance(size, (int, str)) or match is None or unit is None:
        raise ValueError(
            f"`{name}` has to be a number of bytes, or one with a unit, B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such "
            f"as `8GiB`, but got {size!r}"
        )
    parsed = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if parsed < 1:
        raise ValueError(f"`{name}` has to be at least a byte but got {size!r}")
    return parsed


def show_bytes(size: int) -> str:
    """A size for people, in units of 1024."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit.lower()]:
            return f"{size / _UNITS[unit.lower()]:.2f} {unit}"
    return f"{size} B"


def find_largest(load: Callable[[int], float], start: int, limit: int) -> int | None:
    """
    A number that is not too much, while the next one is.

    Args:
        load (`Callable[[int], float]`): what a number from 1 on takes of what there is; more than 1 is too much. It
            grows, all in all, along a line.
        start (`int`): the first that is tried.
        limit (`int`): the last.

    Returns:
        `int`, *optional*: the number; 0 if 1 is too much, `None` if `limit` is not.
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
        aim = _on_line(points)
        # Beside what is known already, further away every time
        if aim <= low:
            aim, step = low + step, 2 * step
        elif aim >= high:
            aim, step = high - step, 2 * step
        guess = aim if low < aim < high else (low + high) // 2


def _on_line(points: list[tuple[int, float]]) -> int:
    """Where the line through the last two points, or through nothing and the only one, reaches 1."""
    (first, first_load), (last, last_load) = [(0, 0.0), *points][-2:]
    slope = (last_load - first_load) / (last - first)
    # A load that does not grow reaches it nowhere
    return last + int((1 - last_load) // slope) if slope > 0 else 0


class _Search:
    """Sizes caches of one model beside a budget."""

    def __init__(
        self,
        sizer: CacheSizer,
        context: int,
        batch_size: int,
        new_tokens: int,
        device_budget: int,
        host_budget: int | None,
    ) -> None:
        self.sizer, self.context, self.batch_size, self.new_tokens = sizer, context, batch_size, new_tokens
        self.device_budget, self.host_budget = device_budget, host_budget

    def fit(self, spec: str) -> CacheFit:
        report = self._measure(spec, self.context, self.batch_size)
        return CacheFit(
            cache=spec,
            memory=report,
            device_bytes=report.devices[self.sizer.device],
            host_bytes=self._host_bytes(report),
            fits=self._load(report) <= 1,
            largest_context=self._largest(
                lambda context: self._measure(spec, context, self.batch_size), self.context, MAX_CONTEXT
            ),
            largest_batch_size=self._largest(
                lambda batch_size: self._measure(spec, self.context, batch_size), self.batch_size, MAX_BATCH_SIZE
            ),
        )

    def _measure(self, spec: str, context: int, batch_size: int) -> MemoryReport:
        # There is a prompt of one token at least
        new_tokens = min(self.new_tokens, context - 1)
        return self.sizer.measure(spec, context, batch_size=batch_size, new_tokens=new_tokens)

    def _largest(self, measure: Callable[[int], MemoryReport], start: int, limit: int) -> int | None:
        return find_largest(lambda number: self._load(measure(number)), start, limit)

    def _load(self, report: MemoryReport) -> float:
        """What a cache takes of the budgets, of the scarcer one."""
        on_device = report.devices[self.sizer.device] / max(self.device_budget, 1)
        return on_device if self.host_budget is None else max(on_device, self._host_bytes(report) / self.host_budget)

    def _host_bytes(self, report: MemoryReport) -> int:
        return sum(size for device, size in report.devices.items() if device != self.sizer.device)


def _weights_bytes(sizer: CacheSizer) -> int:
    if sizer.weights_bytes is None:
        raise ValueError(
            "`with_weights` needs to know the bytes of the weights, but they are quantized, and the config does not "
            "say: give as `memory` what they leave"
        )
    return sizer.weights_bytes


def _rank(fit: CacheFit) -> tuple[int, int]:
    """The most faithful first; of what was not measured, what holds most."""
    known = fit.cache in FIDELITY_ORDER
    return (FIDELITY_ORDER.index(fit.cache) if known else len(FIDELITY_ORDER)), -fit.memory.total_bytes


def _choose(fits: list[CacheFit]) -> tuple[str | None, str]:
    chosen = next((fit for fit in fits if fit.fits), None)
    if chosen is None:
        least = min(fits, key=lambda fit: fit.device_bytes, default=None)
        if least is None:
            return None, "No cache could be sized for this model."
        return None, f"No cache fits: the smallest, `{least.cache}`, would hold {show_bytes(least.device_bytes)}."
    if chosen.cache == "dynamic":
        return chosen.cache, "`dynamic`, Transformers' dense cache, fits: nothing has to be given up."
    if chosen.cache not in FIDELITY_ORDER:
        return chosen.cache, f"`{chosen.cache}` holds most of what fits, and none of that was measured for fidelity."
    host = f"; {show_bytes(chosen.host_bytes)} of it are in host memory" if chosen.host_bytes else ""
    return chosen.cache, f"`{chosen.cache}` is nearest to the dense cache in measured KL of what fits{host}."
