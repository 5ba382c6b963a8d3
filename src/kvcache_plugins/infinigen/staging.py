"""Rows of the pool on their way to a GPU while the layer before computes.

The host never waits. A kernel on a stream of its own reads the chosen rows from page-locked memory; that stream waits
for all that the computing stream was told, the choice and writes of the pool among it, and the computing stream, once
attention needs the rows, for them. They stand in the computing stream's memory: whoever had it before is done when
they are written, and as that stream waits for them before they are freed, what gets it next comes behind them.

Legend: B batch, H key/value heads, K slots chosen at most (filling among them), R numbers of a row.
"""

from __future__ import annotations

from functools import cache

import torch

from kvcache_plugins.kernels.engine import load_triton

from .pool import PAGE_TOKENS, TokenPool
from .selection import Selection


class StagedRows:
    """
    Rows `[B, H, K, R]` of chosen tokens on their way to the GPU; `filled` is when they are there. A copy of a cache
    has `None` in their place, and starts its own.
    """

    def __init__(self, rows: torch.Tensor, filled: torch.cuda.Event, owner: torch.cuda.Stream):
        self._rows, self._filled, self._owner = rows, filled, owner

    def wait(self) -> torch.Tensor:
        """Has the current stream wait for the rows; behind those that a head chose may be anything, NaN among it."""
        stream = torch.cuda.current_stream(self._rows.device)
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


def start_fetch(pool: TokenPool, selection: Selection) -> StagedRows | None:
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
        _gather(addresses, selection, rows)
        pool.note(stream)
        filled = stream.record_event()
    return StagedRows(rows, filled, owner)


def _gather(addresses: torch.Tensor, selection: Selection, rows: torch.Tensor) -> None:
    load_triton().gather_rows(addresses, selection.slots, selection.count, rows, PAGE_TOKENS)
