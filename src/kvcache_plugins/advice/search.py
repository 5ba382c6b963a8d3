"""The largest context and batch for which a cache fits a budget, by the bytes of `memory_prediction`."""

from collections.abc import Callable
from dataclasses import dataclass

from kvcache_plugins.reports.memory import MemoryReport

from .memory_prediction import CacheSizer


# Where searches end
MAX_CONTEXT = 2**24
MAX_BATCH_SIZE = 2**16


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheFit:
    """
    One cache beside a budget.

    Attributes:
        cache (`str`): a name, or `name:key=value,...` with options.
        memory (`MemoryReport`): what it would hold.
        device_bytes (`int`): of that, where the model is, and what all caches of the model share there.
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


class Search:
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
            device_bytes=self._device_bytes(report),
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
        on_device = self._device_bytes(report) / max(self.device_budget, 1)
        return on_device if self.host_budget is None else max(on_device, self._host_bytes(report) / self.host_budget)

    def _device_bytes(self, report: MemoryReport) -> int:
        # What all caches share has to be there too
        return report.devices[self.sizer.device] + sum(report.shared.values())

    def _host_bytes(self, report: MemoryReport) -> int:
        return sum(size for device, size in report.devices.items() if device != self.sizer.device)


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
