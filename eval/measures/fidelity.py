"""How far a cache's next-token distributions are from the dense cache's, on real text: the cheapest honest measure.

A window of text is a prefix and a continuation. The prefix goes through the cache in one forward, whose logits are not
scored: attention over it is exact in every cache that compresses afterwards, so they would show no error at all. The
continuation then goes through the *filled* cache, and every one of its logits is scored, against the same positions of
a dense cache. The dense logits of a window are computed once and shared by all caches.

    prefix                     continuation
    t[0] ... t[p-1]            t[p] ... t[p+s-1]      fed
                               t[p+1] ... t[p+s]      predicted: s scored tokens, hence windows of p+s+1 tokens

Perplexity is over all scored tokens, KL(dense || cache) and top-1 agreement are means over all scored positions.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.eval.harness.caches import (
    CacheFactory,
    cache_stats,
)
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory

from .layer_errors import LayerErrors, record_attention
from .window_scores import WindowScore, continuation_logits, fill_cache, score_logits


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """
    A cache against the dense cache over all windows.

    Args:
        windows (`tuple[WindowScore, ...]`): The windows' sums, in text order.
        memory_after_prefix (`MemoryReport`): What the last window's cache held once the prefix was in.
        memory_at_end (`MemoryReport`): What it held after the last scored token.
        stats (`dict`): Its counters at the end.
        layer_errors (`tuple[float, ...]`):
            Relative error of every layer's attention output over the scored tokens, see `layer_errors.py`.
        mean_kv_percent (`float`, *optional*):
            What it held while tokens were scored, in percent of a 16-bit cache: the mean over forwards and windows.
            Buffers are in it as full as they are on average, which after the prefix they need not be. Only where the
            scored tokens are cut into chunks.
    """

    windows: tuple[WindowScore, ...]
    memory_after_prefix: MemoryReport
    memory_at_end: MemoryReport
    stats: dict[str, StatValue]
    layer_errors: tuple[float, ...] = ()
    mean_kv_percent: float | None = None

    @property
    def num_scored(self) -> int:
        """Scored tokens of all windows."""
        return sum(window.num_scored for window in self.windows)

    @property
    def ppl(self) -> float:
        """Perplexity of the scored tokens through the cache."""
        return math.exp(sum(window.nll for window in self.windows) / self.num_scored)

    @property
    def dense_ppl(self) -> float:
        """Perplexity of the scored tokens through the dense cache."""
        return math.exp(sum(window.dense_nll for window in self.windows) / self.num_scored)

    @property
    def ppl_ratio(self) -> float:
        """`ppl / dense_ppl`: 1.0 for a cache that loses nothing."""
        return self.ppl / self.dense_ppl

    @property
    def ppl_ratio_spread(self) -> float:
        """Standard deviation of the windows' own ratios."""
        return _spread([window.ppl_ratio for window in self.windows])

    @property
    def kl(self) -> float:
        """Mean KL(dense || cache) over all scored positions, in nats."""
        return sum(window.kl for window in self.windows) / self.num_scored

    @property
    def kl_spread(self) -> float:
        """Standard deviation of the windows' own mean KL."""
        return _spread([window.mean_kl for window in self.windows])

    @property
    def top1_agreement(self) -> float:
        """Share of positions at which both caches find the same token most likely."""
        return sum(window.num_agreeing for window in self.windows) / self.num_scored

    @property
    def first_difference(self) -> float:
        """Median over windows of the tokens before the first whose most likely one is not the dense cache's."""
        return statistics.median(
            window.num_scored if window.first_difference is None else window.first_difference
            for window in self.windows
        )


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def measure_fidelity(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    factories: Mapping[str, CacheFactory],
    *,
    prefix_length: int,
    chunk: int | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Fidelity]:
    """
    Scores caches on windows of text, each against the dense cache.

    Args:
        model (`PreTrainedModel`): The model, in eval mode.
        windows (`Sequence[torch.Tensor]`): `[prefix_length + num_scored + 1]` token ids each, see `spread_windows`.
        factories (`Mapping[str, Callable]`): Returns a fresh cache for every window, by the name of the result's row.
        prefix_length (`int`): Tokens that fill the cache before anything is scored.
        chunk (`int`, *optional*): Scored tokens a forward, see `continuation_logits`.
        on_progress (`Callable[[str], None]`, *optional*): Called before each window of each cache.

    Returns:
        `dict[str, Fidelity]`: By row, in the order of `factories`.
    """
    scores: dict[str, list[WindowScore]] = {name: [] for name in factories}
    errors = {name: LayerErrors() for name in factories}
    percents: dict[str, list[float]] = {name: [] for name in factories}
    reports: dict[str, tuple[MemoryReport, MemoryReport, dict[str, StatValue]]] = {}
    for number, window in enumerate(windows, start=1):
        fed, targets = window[prefix_length:-1], window[prefix_length + 1 :]
        if not 0 < prefix_length < window.numel() - 1:
            raise ValueError(f"`prefix_length` {prefix_length} leaves nothing to score in {window.numel()} tokens")
        dense = DynamicCache(config=model.config)
        fill_cache(model, window[:prefix_length], dense)
        with record_attention(model) as exact:
            dense_logits = continuation_logits(model, fed, dense, chunk)
        for name, factory in factories.items():
            if on_progress is not None:
                on_progress(f"window {number} of {len(windows)}")
            cache = factory()
            fill_cache(model, window[:prefix_length], cache)
            after_prefix = measure_memory(cache)
            note = None if chunk is None else partial(_note_percent, cache, percents[name])
            with record_attention(model) as recorded:
                logits = continuation_logits(model, fed, cache, chunk, note)
            errors[name].add(exact.by_layer(), recorded.by_layer())
            scores[name].append(score_logits(dense_logits, logits, targets))
            reports[name] = (after_prefix, measure_memory(cache), cache_stats(cache))
    return {
        name: Fidelity(
            windows=tuple(scores[name]),
            memory_after_prefix=reports[name][0],
            memory_at_end=reports[name][1],
            stats=reports[name][2],
            layer_errors=errors[name].relative(),
            mean_kv_percent=statistics.fmean(percents[name]) if percents[name] else None,
        )
        for name in reports
    }


def _note_percent(cache: Cache, percents: list[float]) -> None:
    percents.append(measure_memory(cache).kv_percent)
