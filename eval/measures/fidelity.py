"""Distance of a cache's next-token distributions from the dense cache's, on text.

A window of text is a prefix and a continuation. The prefix fills the cache in one forward, whose logits are not
scored: caches compress after that forward's attention, so that its logits have no error. The continuation is fed
through the filled cache, and each of its logits is compared with a dense cache's at the same position. Dense logits of
a window are computed once for all caches.

    prefix                     continuation
    t[0] ... t[p-1]            t[p] ... t[p+s-1]      fed
                               t[p+1] ... t[p+s]      predicted: s scored tokens, hence windows of p+s+1 tokens

Perplexity is over all scored tokens, KL(dense || cache) and top-1 agreement are over all scored positions.

Perplexity against position has no prefix: a long text is fed a few tokens at a time, and each token is scored through
the cache of those before it, as in decoding. Scores are averaged over stretches of 256 tokens, as in the papers'
plots, where accumulating errors widen the gap to the dense cache.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval import harness
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory

from .norms import NormRatios, norm_ratios, norms_by_stretch


# Rows of logits that are in float64 at a time: 25 MB for a vocabulary of 50k
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowScore:
    """
    Sums over the scored positions of one window, in nats: `nll` and `dense_nll` are negative log-likelihoods of the
    text, `kl` is KL(dense || cache); `num_agreeing` counts positions whose most likely token is the dense cache's.
    """

    num_scored: int
    nll: float
    dense_nll: float
    kl: float
    num_agreeing: int
    position_kl: tuple[float, ...] = ()


def fill_cache(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache) -> None:
    """Feed `[(batch,) num_tokens]` to the model in one forward through an empty cache, which must then hold them."""
    harness.check_is_empty(cache)
    list(harness.feed(model, torch.atleast_2d(token_ids), cache, needs_logits=False))


def continuation_logits(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    percents: list[float] | None = None,
) -> torch.Tensor:
    """
    Feed `[(batch,) num_tokens]` to the model through a filled cache, and return all logits, `[(batch,) num_tokens,
    vocabulary]`. A forward has `chunk` tokens (1 decodes); by default all, or 1 for a cache that is exact for several
    new tokens. Append the cache's bytes after each forward to `percents`, in percent of 16 bits.
    """
    if chunk is None and getattr(cache, "is_exact_for_many", False):
        chunk = 1
    check_integer("chunk", chunk, 1, is_optional=True)
    if cache.get_seq_length() == 0:
        raise ValueError("The cache is empty: scores over it would say nothing about it. Fill it first.")
    logits = []
    for part in harness.feed(model, torch.atleast_2d(token_ids), cache, chunk):
        logits.append(part)
        if percents is not None:
            percents.append(measure_memory(cache).kv_percent)
    return torch.cat(logits, dim=1).reshape(*token_ids.shape, -1)


def score_logits(dense_logits: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> WindowScore:
    """Compare a cache's `[num_tokens, vocabulary]` logits with the dense cache's, in float64."""
    nll, dense_nll, num_agreeing = 0.0, 0.0, 0
    position_kl: list[float] = []
    rows = (each.split(_ROWS_AT_A_TIME) for each in (dense_logits, logits, targets.to(logits.device)))
    for dense_rows, cache_rows, target_rows in zip(*rows, strict=True):
        dense_log_probs, log_probs = (F.log_softmax(each.double(), dim=-1) for each in (dense_rows, cache_rows))
        dense_nll += F.nll_loss(dense_log_probs, target_rows, reduction="sum").item()
        nll += F.nll_loss(log_probs, target_rows, reduction="sum").item()
        position_kl += F.kl_div(log_probs, dense_log_probs, reduction="none", log_target=True).sum(dim=-1).tolist()
        num_agreeing += int((dense_rows.argmax(-1) == cache_rows.argmax(-1)).sum())
    return WindowScore(
        num_scored=targets.numel(),
        nll=nll,
        dense_nll=dense_nll,
        kl=sum(position_kl),
        num_agreeing=num_agreeing,
        position_kl=tuple(position_kl),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """
    Comparison of a cache with the dense cache over all windows. Spreads are standard deviations over windows.

    Attributes:
        ppl_ratio (`float`): `ppl / dense_ppl`, 1.0 for a cache that loses nothing.
        kl (`float`): mean KL(dense || cache) over all scored positions, in nats; half of them are below `kl_median`,
            99.9 % below `kl_p999`.
        top1_agreement (`float`): share of positions at which both caches find the same token most likely.
        windows (`tuple[WindowScore, ...]`): the windows' sums, in text order.
        memory_after_prefix, memory_at_end (`MemoryReport`), stats (`dict`): of the last cache, which may have held
            several windows.
        mean_kv_percent (`float`, *optional*): bytes held while tokens were scored, buffers included, in percent of 16
            bits: the mean over forwards and windows. Measured with `chunk` alone.
        norms (`NormRatios`, *optional*): of all tokens of the last cache at its end, the oldest first, if asked for.
            `None` if it has evicted tokens.
    """

    ppl: float
    dense_ppl: float
    ppl_ratio: float
    ppl_ratio_spread: float
    kl: float
    kl_spread: float
    kl_median: float
    kl_p999: float
    top1_agreement: float
    num_scored: int
    windows: tuple[WindowScore, ...]
    memory_after_prefix: MemoryReport
    memory_at_end: MemoryReport
    stats: dict[str, StatValue]
    mean_kv_percent: float | None = None
    norms: NormRatios | None = None


def _summarize(windows: Sequence[WindowScore], percents: Sequence[float], last: dict[str, Any]) -> Fidelity:
    """Make the result of a cache from the scores of its windows, and the fields of its `last` window."""
    num_scored = sum(window.num_scored for window in windows)

    def mean(name: str) -> float:
        return sum(getattr(window, name) for window in windows) / num_scored

    def spread(values: Sequence[float]) -> float:
        return statistics.stdev(values) if len(values) > 1 else 0.0

    ordered = sorted(each for window in windows for each in window.position_kl)
    ppl, dense_ppl = math.exp(mean("nll")), math.exp(mean("dense_nll"))
    return Fidelity(
        ppl=ppl,
        dense_ppl=dense_ppl,
        ppl_ratio=ppl / dense_ppl,
        ppl_ratio_spread=spread([math.exp((each.nll - each.dense_nll) / each.num_scored) for each in windows]),
        kl=mean("kl"),
        kl_spread=spread([window.kl / window.num_scored for window in windows]),
        kl_median=ordered[int(0.5 * num_scored)],
        kl_p999=ordered[int(0.999 * num_scored)],
        top1_agreement=mean("num_agreeing"),
        num_scored=num_scored,
        windows=tuple(windows),
        mean_kv_percent=statistics.fmean(percents) if percents else None,
        **last,
    )


def measure_fidelity(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    factories: Mapping[str, harness.CacheFactory],
    *,
    prefix_length: int,
    chunk: int | None = None,
    batch: int = 1,
    with_norms: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Fidelity]:
    """
    Score caches on windows of text against the dense cache, and return the results by the names of `factories`. A
    window has `[prefix_length + num_scored + 1]` token ids (see `spread_windows`), a forward `chunk` scored tokens
    (see `continuation_logits`), and a cache `batch` windows.
    """
    scores: dict[str, list[WindowScore]] = {name: [] for name in factories}
    percents: dict[str, list[float]] = {name: [] for name in factories}
    last: dict[str, dict[str, Any]] = {}
    for start in range(0, len(windows), batch):
        together = torch.stack(list(windows[start : start + batch]))
        prefix, fed = together[:, :prefix_length], together[:, prefix_length:-1]
        targets = together[:, prefix_length + 1 :]
        if not 0 < prefix_length < together.shape[1] - 1:
            raise ValueError(f"`prefix_length` {prefix_length} leaves nothing to score in {together.shape[1]} tokens")
        dense = DynamicCache(config=model.config)
        fill_cache(model, prefix, dense)
        dense_logits = continuation_logits(model, fed, dense, chunk)
        for name, factory in factories.items():
            on_progress(f"window {start + len(together)} of {len(windows)}")
            cache = factory()
            fill_cache(model, prefix, cache)
            after_prefix = measure_memory(cache)
            logits = continuation_logits(model, fed, cache, chunk, None if chunk is None else percents[name])
            scores[name] += map(score_logits, dense_logits, logits, targets)
            at_end = {"memory_at_end": measure_memory(cache), "stats": harness.cache_stats(cache)}
            norms = norm_ratios(cache, dense) if with_norms else None
            last[name] = {"memory_after_prefix": after_prefix, **at_end, "norms": norms}
    return {name: _summarize(scores[name], percents[name], last[name]) for name in factories}


def trend(windows: Sequence[WindowScore], stretch: int) -> dict[str, Any]:
    """Return KL by stretches, the slope of KL over positions, and the last quarter's KL over the first quarter's."""
    by_position = [statistics.fmean(each) for each in zip(*(each.position_kl for each in windows), strict=True)]
    quarter = len(by_position) // 4
    first, last = statistics.fmean(by_position[:quarter]), statistics.fmean(by_position[-quarter:])
    return {
        "kl_by_stretch": harness.mean_by_stretch(by_position, stretch),
        "kl_per_1000_tokens": 1000 * statistics.linear_regression(range(len(by_position)), by_position).slope,
        # The dense cache's first quarter may have a KL of 0
        "kl_last_to_first_quarter": last / first if first else None,
    }


def fidelity_fields(cache: str, fidelity: Fidelity, stretch: int | None = None) -> dict[str, Any]:
    """Make a row of a result; with `stretch`, also the `trend` of KL, and norms by stretches of tokens."""
    row = {"cache": cache, **asdict(fidelity)}
    # A number for each token would be most of a file
    del row["norms"]
    for name in ("memory_after_prefix", "memory_at_end"):
        row[name] = memory_fields(getattr(fidelity, name))
    for window in row["windows"]:
        del window["position_kl"]
    if stretch is None:
        return row
    if fidelity.norms is not None:
        row |= norms_by_stretch(fidelity.norms, stretch)
    return row | trend(fidelity.windows, stretch)


# Perplexity against position


def score_text(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache, chunk: int) -> torch.Tensor:
    """Feed `[tokens]` through an empty cache, `chunk` a forward; return nats of all but the first, in float64."""
    harness.check_is_empty(cache)
    fed, targets = token_ids[None, :-1], token_ids[1:].to(model.device).split(chunk)
    pairs = zip(harness.feed(model, fed, cache, chunk), targets, strict=True)
    return torch.cat([F.cross_entropy(one[0].double(), wanted, reduction="none").cpu() for one, wanted in pairs])


def measure_perplexity(
    model: PreTrainedModel,
    windows: Sequence[torch.Tensor],
    factories: Mapping[str, harness.CacheFactory],
    *,
    chunk: int = 1,
    stretch: int = 256,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Iterator[dict[str, Any]]:
    """
    Score windows of one length through fresh caches, `chunk` tokens a forward. Yield a row for each: perplexity over
    all tokens and over each stretch of all windows, negative log-likelihoods `nll` of each window's stretches, bytes
    and counters of the last cache at its end.
    """
    check_integer("chunk", chunk, 1)
    check_integer("stretch", stretch, 1)
    for name, factory in factories.items():
        scores = []
        for number, window in enumerate(windows, start=1):
            on_progress(f"{name}, window {number} of {len(windows)}")
            cache = factory()
            scores.append(score_text(model, window, cache, chunk))
        stretches = torch.stack(scores).split(stretch, dim=1)
        yield {
            "cache": name,
            "ppl": math.exp(torch.stack(scores).mean()),
            "ppl_by_stretch": tuple(math.exp(part.mean()) for part in stretches),
            "stretch": stretch,
            "num_scored": windows[0].numel() - 1,
            "nll": torch.stack([part.sum(dim=1) for part in stretches], dim=1).tolist(),
            "memory_at_end": memory_fields(measure_memory(cache)),
            "stats": harness.cache_stats(cache),
        }
