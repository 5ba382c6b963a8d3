"""Buffers on a GPU that rows of the pool are brought to, and the rows in them.

A buffer is held from the start of a transfer until attention over its rows was given to a stream. Events say when it
is filled, and when what read it is done. The host waits for neither.

Legend: B batch, H key/value heads, K slots chosen at most (filling among them), D and E head dimensions of keys and
values.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from .counters import TransferTimes


_GROWTH = 1.25


class StagedRows:
    """
    Rows of chosen tokens that are on their way to the GPU. Used in a `with` statement, which waits for them and, at
    its end, gives their buffer back; or by `wait` and `release`.

    What is copied of it, with the cache that it was started for or into a file, is `None`: a copy starts its own.
    """

    def __init__(self, staging: "Staging", rows: torch.Tensor, times: TransferTimes | None):
        self._staging, self._rows, self._times = staging, rows, times
        # Whoever drops this object without releasing it gives the buffer back all the same
        staging.owner = weakref.ref(self)

    def wait(self) -> torch.Tensor:
        """
        Has the current stream wait for the rows, not the host.

        Returns:
            `torch.Tensor` of shape `[B, H, K, D + E]`: a key and its value side by side, of each head as many as were
            chosen. What stands behind those is left from before and may be anything, NaN among it. Not to be used
            after `release`.
        """
        assert self._staging.owner is not None and self._staging.owner() is self
        stream = torch.cuda.current_stream(self._rows.device)
        with timed(self._times, "stalled_s", stream):
            stream.wait_event(self._staging.filled)
        # Not freed before this stream is done, should it be another than the one that the buffer was made on
        self._rows.record_stream(stream)
        return self._rows

    def release(self) -> None:
        """Gives the buffer back. What the current stream has been given so far may still read it."""
        self._staging.read.record(torch.cuda.current_stream(self._rows.device))
        self._staging.owner = None

    def __enter__(self) -> torch.Tensor:
        return self.wait()

    def __exit__(self, *error: object) -> None:
        self.release()

    def __reduce__(self) -> tuple[object, ...]:
        return _nothing, ()


def _nothing() -> None:
    """What a copy of staged rows is."""


def timed(times: TransferTimes | None, name: str, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """Times what a stream is given inside, if times are wanted."""
    return nullcontext() if times is None else times.timed(name, stream)


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
        """Whether nobody holds rows in it."""
        return self.owner is None or self.owner() is None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
        """An uninitialized tensor in the buffer, which grows if need be; `stream` will use it too."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        if count > self.memory.shape[0]:
            # Outside of inference mode, so that it can be written to within it and without
            with torch.inference_mode(False):
                self.memory = torch.empty(with_growth(count), dtype=torch.uint8, device=self.memory.device)
            # Freed only when that stream, which the allocator does not know of, is done
            self.memory.record_stream(stream)
        return self.memory[:count].view(dtype).view(shape)


def with_growth(num_bytes: int) -> int:
    """Bytes of a buffer that is made when so many are needed."""
    return int(_GROWTH * num_bytes)
