"""Rows of the pool on their way to a GPU while the layer before computes.

The host never waits: it does not know which tokens were chosen, nor how many. A kernel on a stream of its own reads
the chosen rows from page-locked memory into a staging buffer; that stream waits for the choice by an event, and the
computing stream, once attention needs the rows, for theirs. Writes of the pool are in the computing stream's order, so
what follows the choice follows them too.

Two buffers take turns: one is read by attention while the other is filled for the next layer. They belong to the
device, not to a layer or a cache, and grow by shares, so in a long decode they are seldom allocated anew.

Without Triton rows are gathered by the host, which then has to wait for the choice.

Legend: B batch, H key/value heads, K slots chosen at most (filling among them), D and E head dimensions of keys and
values.
"""

import torch

from .counters import TransferTimes
from .pool import TokenPool
from .selection import Selection
from .staging import StagedRows, Staging, timed, with_growth


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
        self._stagings: list[Staging] = []

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
            with timed(times, "transfer_s", self._stream):
                if addresses is None:
                    self._copy_by_host(pool, selection, rows)
                else:
                    _gather(addresses, pool.page_tokens, selection, rows)
                    pool.pending.note(self._stream)
            staging.filled.record(self._stream)
        return StagedRows(staging, rows, times)

    def _free_staging(self) -> Staging:
        """A buffer that nobody holds; a third one is made only when somebody holds two."""
        staging = next((each for each in self._stagings if each.is_free), None)
        if staging is None:
            staging = Staging(self.device)
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


def _gather(addresses: torch.Tensor, page_tokens: int, selection: Selection, rows: torch.Tensor) -> None:
    # Triton is not everywhere
    from kvcache_plugins.triton_kernels.gather import gather_rows

    gather_rows(addresses, selection.slots, selection.count, rows, page_tokens)


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
    return with_growth(num_bytes) * (min(num_layers, 2) if speculate else 1)


def free_staging() -> None:
    """Gives the buffers of all devices back; what fetches next makes new ones."""
    _PREFETCHERS.clear()
