"""Observers of InfiniGen caches: shares of well chosen tokens, and seconds of transfers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch

from kvcache_plugins.infinigen import InfiniGenCache, staging
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.staging import StagedRows
from kvcache_plugins.kernels.attention_call import AttentionCall
from kvcache_plugins.kernels.selective_attention import Selection


class HitCounter:
    """
    Counter of chosen tokens that are among as many with the highest true weights. All keys are read in every step;
    copies of the cache are not observed.

    Attributes:
        hits, possible (`int`): tokens that were right, and tokens that were chosen.
    """

    def __init__(self, cache: InfiniGenCache) -> None:
        self.hits = self.possible = 0
        for layer in cache.layers:
            if isinstance(layer, InfiniGenLayer):
                self._observe(layer)

    def _observe(self, layer: InfiniGenLayer) -> None:
        attend = layer.attend_selection

        def attend_and_count(call: AttentionCall, selection: Selection, staged: StagedRows | None) -> torch.Tensor:
            output = attend(call, selection, staged)
            self._count(layer, call, selection)
            return output

        # A plan would select and attend without a selection to observe
        vars(layer).update(attend_selection=attend_and_count, _plan_next_steps=lambda query, scale: None)

    def _count(self, layer: InfiniGenLayer, call: AttentionCall, selection: Selection) -> None:
        assert layer.pool is not None and call.scale is not None
        keys = layer.pooled_keys()
        scores = call.query.float() * call.scale @ keys.float().transpose(2, 3)
        if layer.padding is not None:
            is_padding = layer.pool.positions(keys.device) < layer.padding[:, None, None]
            scores = scores.masked_fill(is_padding[:, :, None], -torch.inf)
        self.hits += int(count_hits(selection, scores))
        self.possible += int(selection.count.sum())


def count_hits(selection: Selection, scores: torch.Tensor) -> torch.Tensor:
    """Count chosen tokens that are among as many with the highest true weights, given scores `[B, H, G, N]`."""
    best = scores.softmax(dim=3).mean(dim=2).topk(selection.slots.shape[2], dim=2).indices
    ranks = torch.arange(best.shape[2], dtype=torch.int64, device=best.device) < selection.count[..., None]
    is_best = torch.zeros(*best.shape[:2], scores.shape[3], dtype=torch.bool, device=best.device)
    is_best.scatter_(2, best, ranks)
    return (is_best.gather(2, selection.slots) & selection.valid).sum()


class TransferTimes:
    """
    Seconds that a GPU spends inside the `with` block on transfers of InfiniGen caches (`transfer_s`) and on waiting
    for them (`stalled_s`), from pairs of events. The host waits in `seconds` alone.
    """

    def __init__(self) -> None:
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._patches = ExitStack()

    def __enter__(self) -> TransferTimes:
        for name, owner, function in (("transfer_s", staging, "_gather"), ("stalled_s", StagedRows, "wait")):
            timed = self._timed(name, getattr(owner, function))
            self._patches.enter_context(patch.object(owner, function, timed))
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that gives work to the current stream."""

        def timed(*arguments: Any) -> Any:
            stream = torch.cuda.current_stream()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            result = function(*arguments)
            end.record(stream)
            self._events.append((name, begin, end))
            return result

        return timed

    def seconds(self) -> dict[str, float]:
        """Wait for all events, and sum seconds by name; the time of the events themselves is included."""
        total = {"transfer_s": 0.0, "stalled_s": 0.0}
        for name, begin, end in self._events:
            end.synchronize()
            total[name] += begin.elapsed_time(end) / 1e3
        return total
