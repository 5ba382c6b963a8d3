"""Rows of the pool on their way to a GPU while the layer before computes.

The host never waits. A kernel on a stream of its own reads the chosen rows from page-locked memory; that stream waits
for all that the computing stream was told, the choice and writes of the pool among it, and the computing stream, once
attention needs the rows, for them. They stand in the computing stream's memory: whoever had it before is done when
they are written, and as that stream waits for them before they are freed, what gets it next comes behind them.

Legend: B batch, H key/value heads, K slots chosen at most (filling among them), R numbers of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from .pool import PAGE_TOKENS, TokenPool
from .selection import Selection


class TransferTimes:
    """
    Sums seconds that a GPU spends on transfers (`transfer_s`) and on waiting for them (`stalled_s`), between pairs of
    events, if they `are_tracked`. A copy has what was summed so far.
    """

    def __init__(self, *, are_tracked: bool):
        self._seconds = dict.fromkeys(("transfer_s", "stalled_s"), 0.0) if are_tracked else {}
        # Begin and end of what may not have happened yet
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, name: str, stream: torch.cuda.Stream) -> Iterator[None]:
        """Times what a stream is given inside, under a name; the host waits for nothing."""
        if not self._seconds:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        yield
        end.record(stream)
        # What is over is summed on the way, so that a long decode does not pile up events
        self._sum_up(lambda event: event.query())
        self._open.append((name, begin, end))

    def _sum_up(self, is_over: Callable[[torch.cuda.Event], bool]) -> None:
        while self._open and is_over(self._open[0][2]):
            name, begin, end = self._open.pop(0)
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1e3

    def seconds(self) -> dict[str, float]:
        """Sums seconds under each name. Waits for all of it; what little time two events take themselves is in it."""
        self._sum_up(lambda event: True)
        return dict(self._seconds)

    def __getstate__(self) -> dict[str, object]:
        self.seconds()
        return self.__dict__


class StagedRows:
    """
    Rows `[B, H, K, R]` of chosen tokens on their way to the GPU; `filled` is when they are there. A copy of a cache
    has `None` in their place, and starts its own.
    """

    def __init__(self, rows: torch.Tensor, filled: torch.cuda.Event, owner: torch.cuda.Stream, times: TransferTimes):
        self._rows, self._filled, self._owner, self._times = rows, filled, owner, times

    def wait(self) -> torch.Tensor:
        """Has the current stream wait for the rows; behind those that a head chose may be anything, NaN among it."""
        stream = torch.cuda.current_stream(self._rows.device)
        with self._times.timed("stalled_s", stream):
            stream.wait_event(self._filled)
        # Not freed before this stream is done, should it be another than the owner
        self._rows.record_stream(stream)
        return self._rows

    def __del__(self) -> None:
        self._owner.wait_event(self._filled)

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream for transfers to a GPU."""
    return torch.cuda.Stream(device)


def start_fetch(pool: TokenPool, selection: Selection, times: TransferTimes) -> StagedRows | None:
    """
    Starts to fetch the tokens of a pool that a GPU has chosen, as its current stream computes it. `None` where the
    host gathers rows when they are needed: on a CPU, or without a kernel for it.
    """
    slots, device = selection.slots, selection.slots.device
    addresses = pool.addresses_for(slots) if pool.pin_memory else None
    if addresses is None:
        return None
    owner, stream = torch.cuda.current_stream(device), _stream_of(device)
    rows = torch.empty((*slots.shape, pool.row_dim), dtype=pool.dtype, device=device)
    stream.wait_stream(owner)
    # Freed only when this stream, which the allocator does not know of, is done
    for tensor in (slots, selection.count, addresses):
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        with times.timed("transfer_s", stream):
            _gather(addresses, selection, rows)
        pool.note(stream)
        filled = stream.record_event()
    return StagedRows(rows, filled, owner, times)


def _gather(addresses: torch.Tensor, selection: Selection, rows: torch.Tensor) -> None:
    # Triton is not everywhere
    from kvcache_plugins.triton_kernels.gather import gather_rows

    gather_rows(addresses, selection.slots, selection.count, rows, PAGE_TOKENS)
