"""Rows of the pool that are fetched to a GPU while the layer before computes.

The host never waits. A kernel on a stream of its own reads the selected rows from page-locked memory. Its stream
waits for the work that the computing stream has so far, the selection and writes of the pool included; the computing
stream waits for the rows once attention needs them. The rows are in memory of the computing stream: its earlier users
are done before the rows are written, and as the stream waits for the rows before they are freed, later users of the
memory come after them.

Legend: B batch, H key/value heads, K slots of a selection (filling included), R numbers of a row.
"""

from __future__ import annotations

from functools import cache

import torch

from kvcache_plugins.kernels.engine import load_triton
from kvcache_plugins.kernels.selective_attention import Selection

from .pool import PAGE_TOKENS, TokenPool
from .selection_plan import DeviceSelectionPlan


class StagedRows:
    """
    Rows `[B, H, K, R]` of selected tokens on their way to a GPU, complete after the event `filled`. A copy of a cache
    has `None` instead, and fetches its own.
    """

    def __init__(self, rows: torch.Tensor, filled: torch.cuda.Event, owner: torch.cuda.Stream):
        self._rows = rows
        self._filled = filled
        self._owner = owner

    def wait(self) -> torch.Tensor:
        """Return the rows, for which the current stream waits. Filling holds arbitrary numbers, perhaps NaN."""
        stream = torch.cuda.current_stream(self._rows.device)
        stream.wait_event(self._filled)
        # Should the stream not be the owner, the rows are freed only after its work
        self._rows.record_stream(stream)
        return self._rows

    def __del__(self) -> None:
        self._owner.wait_event(self._filled)

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for transfers to a GPU."""
    return torch.cuda.Stream(device)


def start_fetch(pool: TokenPool, selection: Selection, plan: DeviceSelectionPlan | None = None) -> StagedRows | None:
    """
    Start to fetch selected tokens from a pool, by the launch of a plan if there is one, after the work of the GPU's
    current stream. `None` if the host has to gather rows when attention needs them: on a CPU, or without a kernel.
    """
    slots = selection.slots
    device = slots.device
    addresses = pool.addresses_for(slots) if pool.pin_memory else None
    if addresses is None:
        return None
    owner = torch.cuda.current_stream(device)
    stream = _stream_of(device)
    rows = torch.empty((*slots.shape, pool.row_dim), dtype=pool.dtype, device=device)
    stream.wait_stream(owner)
    # The allocator must not free them before this stream is done
    for tensor in (slots, selection.count, addresses):
        tensor.record_stream(stream)
    with torch.cuda.stream(stream):
        _gather(addresses, selection, rows, plan)
        pool.record_event(stream)
        filled = stream.record_event()
    return StagedRows(rows, filled, owner)


def _gather(
    addresses: torch.Tensor, selection: Selection, rows: torch.Tensor, plan: DeviceSelectionPlan | None
) -> None:
    if plan is None:
        load_triton().gather_rows(addresses, selection.slots, selection.count, rows, PAGE_TOKENS)
    else:
        plan.gather(addresses, selection, rows, PAGE_TOKENS)
