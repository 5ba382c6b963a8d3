"""Rows of the pool on their way to a GPU while the layer before computes, and attention over them.

The host never waits: it does not know which tokens were chosen, nor how many. A kernel on a stream of its own reads
the chosen rows from page-locked memory into a staging buffer; that stream waits for the choice by an event, and the
computing stream, once attention needs the rows, for theirs. Writes of the pool are in the computing stream's order, so
what follows the choice follows them too.

Two buffers take turns: one is read by attention while the other is filled for the next layer. They belong to the
device, not to a layer or a cache, and grow by shares, so in a long decode they are seldom allocated anew.

Without Triton rows are gathered by the host, which then has to wait for the choice.

Legend: B batch, H key/value heads, G query heads a key/value head, K slots chosen at most (filling among them), D and
E head dimensions of keys and values, W tokens of the window.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext

import torch

from .counters import TransferTimes
from .pool import PAGE_TOKENS, TokenPool
from .selection import Selection


_GROWTH = 1.25


class StagedRows:
    """
    Rows of chosen tokens that are on their way to the GPU. Used in a `with` statement, which waits for them and, at
    its end, gives their buffer back; or by `wait` and `release`.

    What is copied of it, with the cache that it was started for or into a file, is `None`: a copy starts its own.
    """

    def __init__(self, staging: "_Staging", rows: torch.Tensor, times: TransferTimes | None):
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
        with _timed(self._times, "stalled_s", stream):
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


def _timed(times: TransferTimes | None, name: str, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    return nullcontext() if times is None else times.timed(name, stream)


class _Staging:
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
        return self.owner is None or self.owner() is None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype, stream: torch.cuda.Stream) -> torch.Tensor:
        """An uninitialized tensor in the buffer, which grows if need be; `stream` will use it too."""
        count = dtype.itemsize
        for size in shape:
            count *= size
        if count > self.memory.shape[0]:
            # Outside of inference mode, so that it can be written to within it and without
            with torch.inference_mode(False):
                self.memory = torch.empty(_with_growth(count), dtype=torch.uint8, device=self.memory.device)
            # Freed only when that stream, which the allocator does not know of, is done
            self.memory.record_stream(stream)
        return self.memory[:count].view(dtype).view(shape)


def _with_growth(num_bytes: int) -> int:
    return int(_GROWTH * num_bytes)


class Prefetcher:
    """
    What fetches rows to a GPU, for all layers and caches there: see `prefetcher_of`.

    Args:
        device (`torch.device`): the GPU, with its index.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._ready = torch.cuda.Event()
        self._stagings: list[_Staging] = []

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(staging.memory.nbytes for staging in self._stagings)

    def start(self, pool: TokenPool, selection: Selection, times: TransferTimes | None = None) -> StagedRows:
        """
        Starts to fetch tokens. The host waits for nothing, unless there is no kernel for it.

        Args:
            pool (`TokenPool`): the tokens. What the current stream was told to write into it is written before.
            selection (`Selection`): which, on the GPU, as the current stream computes it.
            times (`TransferTimes`, *optional*): where the transfer is noted as `transfer_s`, and the time that the
                computing stream waits for it as `stalled_s`.
        """
        addresses = pool.addresses_for(selection.slots)
        staging = self._free_staging()
        rows = staging.room((*selection.slots.shape, pool.row_dim), pool.dtype, self._stream)
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
                    _gather(addresses, selection, rows)
                    pool.pending.note(self._stream)
            staging.filled.record(self._stream)
        return StagedRows(staging, rows, times)

    def _free_staging(self) -> _Staging:
        """A buffer that nobody holds; a third one is made only when somebody holds two."""
        staging = next((each for each in self._stagings if each.is_free), None)
        if staging is None:
            staging = _Staging(self.device)
            self._stagings.append(staging)
        return staging

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


def _gather(addresses: torch.Tensor, selection: Selection, rows: torch.Tensor) -> None:
    # Triton is not everywhere
    from kvcache_plugins.triton_kernels.gather import gather_rows

    gather_rows(addresses, selection.slots, selection.count, rows, PAGE_TOKENS)


# A device has one: what its layers and caches share can be no layer's or cache's own, and is copied with none of them
_PREFETCHERS: dict[torch.device, Prefetcher] = {}


def prefetcher_of(device: torch.device) -> Prefetcher:
    """The one prefetcher of a GPU (with its index), made when it is first asked for."""
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
    Bytes that the buffers of a GPU have once a step has fetched there.

    Args:
        num_bytes (`int`): the most that is fetched for a layer.
        num_layers (`int`): layers that fetch.
        speculate (`bool`): whether one layer fetches while another one attends.
    """
    return _with_growth(num_bytes) * (min(num_layers, 2) if speculate else 1)


def free_staging() -> None:
    """Gives the buffers of all devices back; what fetches next makes new ones."""
    _PREFETCHERS.clear()


def attend_staged(
    query: torch.Tensor,
    selection: Selection,
    rows: torch.Tensor,
    window: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    window_start: int,
    scale: float,
) -> torch.Tensor:
    """
    Attention of one new token over staged rows and the window: `ops.gather.attend_rows` without the host knowing how
    many rows there are. All shapes are those of the most that may be fetched, so an item's result does not depend on
    how many tokens its neighbours fetch; what is no row counts neither as key nor as value, whatever stands there.

    Args:
        query (`torch.Tensor` of shape `[B, H, G, D]`): the token's queries.
        selection (`Selection`): what the rows are of.
        rows (`torch.Tensor` of shape `[B, H, K, D + E]`): the rows, as many as `selection.count` says.
        window (`tuple[torch.Tensor, torch.Tensor]`): keys and values of the newest tokens, `[B, H, W, D or E]`.
        mask (`torch.Tensor` of shape `[B, tokens]`, *optional*): the mask's row, boolean or added to the scores.
        positions (`torch.Tensor` of shape `[B, H, K]`, *optional*): positions of the rows' tokens, needed with a mask.
        window_start (`int`): position of the window's first token.
        scale (`float`): factor of the scores.

    Returns:
        `torch.Tensor` of shape `[B, H, G, E]` in the query's dtype.
    """
    num_staged, key_dim = rows.shape[2], query.shape[3]
    is_filling = ~selection.valid  # [B, H, K]
    scaled = query.float() * scale
    keys, values = rows[..., :key_dim].float(), rows[..., key_dim:].float()
    # Zero times NaN is NaN: a probability of zero alone would not do
    values = values.masked_fill(is_filling[..., None], 0.0)
    staged = (scaled @ keys.transpose(2, 3)).masked_fill(is_filling[:, :, None], -torch.inf)
    scores = torch.cat([staged, scaled @ window[0].float().transpose(2, 3)], dim=3)  # [B, H, G, K + W]
    if mask is not None:
        assert positions is not None
        columns = mask[:, None].expand(-1, query.shape[1], -1)
        seen = torch.cat([columns.gather(2, positions.clamp(min=0)), columns[..., window_start:]], dim=2)[:, :, None]
        scores = scores.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else scores + seen.float()
    weights = scores.softmax(dim=3)
    output = weights[..., :num_staged] @ values + weights[..., num_staged:] @ window[1].float()
    return output.to(query.dtype)
