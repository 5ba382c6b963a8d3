"""What is counted and timed on a device: the host asks for it when somebody wants to know, and waits only then."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceCounters:
    """Sums of numbers that only a device knows."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def start(self, name: str, device: torch.device) -> None:
        """Begins a sum on a device, unless it has been begun."""
        if name not in self._sums:
            self._sums[name] = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, name: str, amount: torch.Tensor) -> None:
        """Adds an integer, a tensor without dimensions."""
        before = self._sums.get(name)
        # Not in place: what was made in inference mode could not be written to outside of it
        self._sums[name] = amount if before is None else before.to(amount.device, non_blocking=True) + amount

    def values(self) -> dict[str, int]:
        """All sums. Waits for the device."""
        return {name: int(amount) for name, amount in self._sums.items()}

    def tensors(self) -> Iterator[torch.Tensor]:
        """What is stored."""
        yield from self._sums.values()


class TransferTimes:
    """
    Seconds that a GPU spends on transfers and on waiting for them, between pairs of events. A copy has what was summed
    so far.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        # Begin and end of what may not have happened yet
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, name: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Times what a stream is given inside, under a name; the host waits for nothing."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        # What is over is summed on the way, so that a long decode does not pile up events
        while self._open and self._open[0][2].query():
            self._sum_first()
        self._open.append((name, begin, end))

    def _sum_first(self) -> None:
        name, begin, end = self._open.pop(0)
        end.synchronize()
        self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3

    def seconds(self) -> dict[str, float]:
        """Seconds under each name. Waits for all of it; what little time two events take themselves is in it."""
        while self._open:
            self._sum_first()
        return dict(self._seconds)

    def __getstate__(self) -> dict[str, object]:
        self.seconds()
        return self.__dict__
