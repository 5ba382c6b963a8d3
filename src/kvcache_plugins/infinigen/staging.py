"""Rows of the pool on their way to a GPU while the layer before computes.

The host never waits: it does not know which tokens were chosen, nor how many. A kernel on a stream of its own reads
the chosen rows from page-locked memory into a staging buffer; that stream waits for the choice by an event, and the
computing stream, once attention needs the rows, for theirs. Writes of the pool are in the computing stream's order, so
what follows the choice follows them too.

Two buffers take turns: one is read by attention while the other is filled for the next layer. They belong to the
device, not to a layer or a cache, and grow by shares, so in a long decode they are seldom allocated anew. A buffer is
held from the start of a transfer until attention over its rows was given to a stream.

Without Triton rows are gathered by the host, which then has to wait for the choice.

Legend: B batch, H key/value heads, K slots chosen at most (filling among them), R numbers of a row.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .pool import TokenPool
from .selection import Selection


_GROWTH = 1.25


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
        """Sums seconds under each name. Waits for all of it; what little time two events take themselves is in it."""
        while self._open:
            self._sum_first()
        return dict(self._seconds)

    def __getstate__(self) -> dict[str, object]:
        self.seconds()
        return self.__dict__


def _timed(times: TransferTimes | None, name: str, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    return nullcontext() if times is None else times.timed(name, stream)


class StagedRows:
    """
    Rows of chosen tokens that are on their way to the GPU. Used in a `with` statement, which waits for them and, at
    its end, gives their buffer back.

    What is copied of it, with the cache that it was started for or into a file, is `None`: a copy starts its own.
    """

    def __init__(self, staging: Staging, rows: torch.Tensor, times: TransferTimes | None):
        self._staging, self._rows, self._times = staging, rows, times
        # Whoever drops this object without releasing it gives the buffer back all the same
        staging.owner = weakref.ref(self)

    def __enter__(self) -> torch.Tensor:
        """
        Has the current stream wait for the rows, not the host. Returns `[B, H, K, R]`, of each head as many rows as
        were chosen; what stands behind those may be anything, NaN among it. Not to be used behind the statement.
        """
        assert self._staging.owner is not None and self._staging.owner() is self
        stream = torch.cuda.current_stream(self._rows.device)
        with _timed(self._times, "stalled_s", stream):
            stream.wait_event(self._staging.filled)
        # Not freed before this stream is done, should it be another than the one that the buffer was made on
        self._rows.record_stream(stream)
        return self._rows

    def __exit__(self, *error: object) -> None:
        # What the current stream has been given so far may still read it
        self._staging.read.record(torch.cuda.current_stream(self._rows.device))
        self._staging.owner = None

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()


def _nothing() -> None:
    """Makes what a copy of staged rows is."""


class Staging:
    """
    A buffer on the device.

    Attributes:
        memory (`torch.Tensor` of shape `[bytes]`, uint8): the buffer.
        filled, read (`torch.cuda.Event`): the rows are there; what reads them is done.
        owner (`weakref.ref`, *optional*): the rows that it holds, unless they were released.
    """

    def __init__(self, device: torch.device):
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.filled, self.read = torch.cuda.Event(), torch.cuda.Event()
        self.owner: weakref.ref[StagedRows] | None = None

    @property
    def is_free(self) -> bool:
        """Tells whether nobody holds rows in it."""
        return self.owner is None or self.owner() is None

    def reserve(self, shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
        """Returns an uninitialized tensor in the buffer, which grows if need be; `stream` will use it too."""
        count = dtype.itemsize * math.prod(shape)
        if count > self.memory.shape[0]:
            # Outside of inference mode, so that it can be written to within it and without
            with torch.inference_mode(False):
                self.memory = torch.empty(int(_GROWTH * count), dtype=torch.uint8, device=self.memory.device)
            # Freed only when that stream, which the allocator does not know of, is done
            self.memory.record_stream(stream)
        return self.memory[:count].view(dtype).view(shape)


class Prefetcher:
    """Fetches rows to a device, for all layers and caches there: see `prefetcher_of`."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()
        self._stagings: list[Staging] = []

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(staging.memory.nbytes for staging in self._stagings)

    def start(self, pool: TokenPool, selection: Selection, times: TransferTimes | None = None) -> StagedRows:
        """
        Starts to fetch the tokens of a pool that the GPU has chosen, as the current stream computes it; what that was
        told to write into the pool is written before. The host waits for nothing, unless there is no kernel for it.
        Times are noted as `transfer_s` and, of the computing stream that waits, `stalled_s`.
        """
        addresses = pool.addresses_for(selection.slots)
        # A third buffer is made only when somebody holds two
        staging = next((each for each in self._stagings if each.is_free), None)
        if staging is None:
            staging = Staging(self.device)
            self._stagings.append(staging)
        rows = staging.reserve((*selection.slots.shape, pool.row_dim), pool.dtype, self._stream)
        # All that the host has given the computing stream: the choice, writes of the pool, a new buffer's last user
        self._ready.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._ready)
        self._stream.wait_event(staging.read)
        # Freed only when this stream, which the allocator does not know of, is done
        for tensor in (selection.slots, selection.count, *(() if addresses is None else (addresses,))):
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            with _timed(times, "transfer_s", self._stream):
                if addresses is None:
                    self._copy_by_host(pool, selection, rows)
                else:
                    _gather(addresses, pool.page_tokens, selection, rows)
                    pool.pending.note(self._stream)
            staging.filled.record(self._stream)
        return StagedRows(staging, rows, times)

    def _copy_by_host(self, pool: TokenPool, selection: Selection, rows: torch.Tensor) -> None:
        """Gathers on the host, which waits for the choice (and with it for earlier writes of the pool)."""
        slots, count = (
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            for tensor in (selection.slots, selection.count)
        )
        chosen = torch.cuda.Event()
        chosen.record(self._stream)
        chosen.synchronize()
        most = int(count.max())
        if most == 0:
            return
        gathered = pool.gather(slots[:, :, :most])
        gathered = gathered if gathered.is_pinned() else gathered.pin_memory()
        rows[:, :, :most].copy_(gathered, non_blocking=True)


def _gather(addresses: torch.Tensor, page_tokens: int, selection: Selection, rows: torch.Tensor) -> None:
    # Triton is not everywhere
    from kvcache_plugins.triton_kernels.gather import gather_rows

    gather_rows(addresses, selection.slots, selection.count, rows, page_tokens)


# A device has one: what its layers and caches share can be no layer's or cache's own, and is copied with none of them
_PREFETCHERS: dict[torch.device, Prefetcher] = {}


def prefetcher_of(device: torch.device) -> Prefetcher:
    """Returns the one prefetcher of a GPU (with its index), made when it is first asked for."""
    if device not in _PREFETCHERS:
        _PREFETCHERS[device] = Prefetcher(device)
    return _PREFETCHERS[device]


def start_fetch(pool: TokenPool, selection: Selection, times: TransferTimes | None = None) -> StagedRows | None:
    """Starts to fetch tokens to the GPU that they were chosen on; `None` on a CPU, where they stand already."""
    return prefetcher_of(selection.slots.device).start(pool, selection, times) if pool.pin_memory else None


def staging_bytes(device: torch.device) -> int:
    """Bytes of the buffers that all caches on a device share; 0 where nothing was fetched to."""
    return _PREFETCHERS[device].staging_bytes if device in _PREFETCHERS else 0


def expected_staging_bytes(num_bytes: int, num_layers: int, *, speculate: bool) -> int:
    """
    Predicts the bytes of a GPU's buffers after a step of layers that fetch `num_bytes` at most each, where one layer
    fetches while another one attends if they speculate.
    """
    return int(_GROWTH * num_bytes) * (min(num_layers, 2) if speculate else 1)
