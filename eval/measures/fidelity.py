"""How far a cache's next-token distributions are from the dense cache's, on real text: the cheapest honest measure.

A window of text is a prefix and a continuation. The prefix goes through the cache in one forward, whose logits are not
scored: attention over it is exact in every cache that compresses afterwards, so they would show no error at all. The
continuation then goes through the *filled* cache, and every one of its logits is scored, against the same positions of
a dense cache. The dense logits of a window are computed once and shared by all caches.

    prefix                     continuation
    t[0] ... t[p-1]            t[p] ... t[p+s-1]      fed
                               t[p+1] ... t[p+s]      predicted: s scored tokens, hence windows of p+s+1 tokens

Perplexity is over all scored tokens, KL(dense || cache) and top-1 agreement are means over all scored positions.

Run it with `kvcache-plugins eval fidelity`.
"""

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, set_seed

from kvcache_plugins.console.command_line import load_for_evaluation, make_table, open_console, track_progress
from kvcache_plugins.console.json_output import with_results
from kvcache_plugins.console.run_report import memory_fields, provenance
from kvcache_plugins.eval.harness.caches import (
    CacheFactory,
    cache_factories,
    cache_stats,
    check_is_empty,
    check_length,
)
from kvcache_plugins.eval.harness.windows import encode_text, spread_windows
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory

from .layer_errors import LayerErrors, record_attention


# Rows of logits turned into float64 at a time: a vocabulary of 50k takes 25 MB for them.
_ROWS_AT_A_TIME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowScore:
    """
    Sums over the scored positions of one window.

    Args:
        num_scored (`int`): Scored tokens.
        nll (`float`): Negative log-likelihood of the text through the cache, in nats, summed.
        dense_nll (`float`): The same through the dense cache.
        kl (`float`): KL(dense || cache) of the next-token distributions, in nats, summed.
        num_agreeing (`int`): Positions whose most likely token is the dense cache's.
        first_difference (`int`, *optional*): The first position where it is not, if there is one.
    """

    num_scored: int
    nll: float
    dense_nll: float
    kl: float
    num_agreeing: int
    first_difference: int | None = None

    @property
    def mean_kl(self) -> float:
        """Mean KL(dense || cache) of the window's positions."""
        return self.kl / self.num_scored

    @property
    def ppl_ratio(self) -> float:
        """The window's perplexity as a multiple of the dense cache's."""
        return math.exp((self.nll - self.dense_nll) / self.num_scored)


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


@torch.no_grad()
def fill_cache(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache) -> None:
    """Feeds `[num_tokens]` to the model in one forward through an empty cache, which must then hold all of them."""
    check_is_empty(cache)
    # Only the last logits are computed where the model can do so: the others are a vocabulary each and nobody's.
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=token_ids[None].to(model.device), past_key_values=cache, use_cache=True, **keep)
    check_length(cache, token_ids.numel())


@torch.no_grad()
def continuation_logits(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    after_forward: Callable[[], None] | None = None,
) -> torch.Tensor:
    """
    Feeds `[num_tokens]` to the model through a filled cache and returns all their logits, `[num_tokens, vocabulary]`.

    Args:
        chunk (`int`, *optional*):
            Tokens a forward; 1 is decode. By default all in one, or one by one if the cache would be exact for many.
        after_forward (`Callable[[], None]`, *optional*):
            Called after each forward.
    """
    if chunk is None and getattr(cache, "is_exact_for_many", False):
        chunk = 1
    if chunk is not None and chunk < 1:
        raise ValueError(f"`chunk` must be at least 1 or `None`, but got {chunk}")
    length_before = cache.get_seq_length()
    if length_before == 0:
        raise ValueError("The cache is empty: scores over it would say nothing about it. Fill it first.")
    parts = token_ids.to(model.device).split(chunk or token_ids.numel())
    logits = []
    for part in parts:
        logits.append(model(input_ids=part[None], past_key_values=cache, use_cache=True).logits[0])
        if after_forward is not None:
            after_forward()
    check_length(cache, length_before + token_ids.numel())
    return torch.cat(logits)


def score_logits(dense_logits: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> WindowScore:
    """Compares a cache's `[num_tokens, vocabulary]` logits with the dense cache's, in float64."""
    nll = dense_nll = kl = 0.0
    agreeing = []
    rows = zip(
        dense_logits.split(_ROWS_AT_A_TIME), logits.split(_ROWS_AT_A_TIME), targets.split(_ROWS_AT_A_TIME), strict=True
    )
    for dense_rows, cache_rows, target_rows in rows:
        dense_log_probs = F.log_softmax(dense_rows.double(), dim=-1)
        log_probs = F.log_softmax(cache_rows.double(), dim=-1)
        target_rows = target_rows.to(log_probs.device)
        dense_nll += F.nll_loss(dense_log_probs, target_rows, reduction="sum").item()
        nll += F.nll_loss(log_probs, target_rows, reduction="sum").item()
        kl += F.kl_div(log_probs, dense_log_probs, reduction="sum", log_target=True).item()
        agreeing.extend((dense_rows.argmax(-1) == cache_rows.argmax(-1)).tolist())
    return WindowScore(
        num_scored=targets.numel(),
        nll=nll,
        dense_nll=dense_nll,
        kl=kl,
        num_agreeing=sum(agreeing),
        first_difference=None if all(agreeing) else agreeing.index(False),
    )


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


def fidelity_fields(cache: str, fidelity: Fidelity) -> dict[str, object]:
    """A row of a JSON file."""
    numbers = ["ppl", "dense_ppl", "ppl_ratio", "ppl_ratio_spread", "kl", "kl_spread", "top1_agreement", "num_scored"]
    numbers += ["first_difference", "layer_errors", "mean_kv_percent"]
    return {
        "cache": cache,
        **{name: getattr(fidelity, name) for name in numbers},
        "memory_after_prefix": memory_fields(fidelity.memory_after_prefix),
        "memory_at_end": memory_fields(fidelity.memory_at_end),
        "stats": fidelity.stats,
        "windows": [asdict(window) for window in fidelity.windows],
    }


def _fidelity_cells(cache: str, fidelity: Fidelity) -> tuple[str, ...]:
    memory = fidelity.memory_after_prefix
    return (
        cache,
        f"{memory.total_bytes / 1e6:.2f}",
        f"{memory.kv_percent:.1f}",
        "-" if fidelity.mean_kv_percent is None else f"{fidelity.mean_kv_percent:.1f}",
        f"{memory.compression_ratio:.2f}",
        f"{fidelity.ppl:.3f}",
        f"{fidelity.ppl_ratio:.4f}",
        f"{fidelity.ppl_ratio_spread:.4f}",
        f"{fidelity.kl:.4f}",
        f"{fidelity.kl_spread:.4f}",
        f"{fidelity.top1_agreement:.3f}",
        f"{fidelity.first_difference:g}",
        f"{max(fidelity.layer_errors):.3f}" if fidelity.layer_errors else "-",
    )


_COLUMNS = {
    "cache": "name",
    "MB": "number",
    "KV %": "number",
    "mean %": "number",
    "ratio": "number",
    "PPL": "number",
    "x dense": "number",
    "+- PPL": "number",
    "KL": "number",
    "+- KL": "number",
    "top-1": "number",
    "differs at": "number",
    "layer error": "number",
}


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,key=value; may be given several times.")],
    model: Annotated[str, typer.Option(help="A short name, a folder or a hub name.")] = "smollm2",
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.")] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens that fill the cache, unscored.")] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens scored through the filled cache.")] = 512,
    chunk: Annotated[int | None, typer.Option(help="Scored tokens a forward, 1 for decode; all by default.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 42,
) -> dict[str, Any]:
    """Measure how far caches are from the dense cache on a text: perplexity, KL and agreement, against bytes held.

    "mean %" is what was held while tokens were scored, buffers included, if they are cut into chunks; "differs at" is
    the first scored token whose most likely one is not the dense cache's, the median over windows;
    "layer error" the largest relative error of a layer's attention output.

    \b
    Examples:
        kvcache-plugins eval fidelity --text-file wiki.test.raw --cache gear-2bit --cache kivi-2bit
        kvcache-plugins eval fidelity --text-file book.txt --windows 2 --chunk 1 \\
            --cache gear-2bit --cache gear-2bit:sparsity=0,rank=8 --out eval/results/rank.json
    """
    settings = {name: value for name, value in locals().items() if name != "cache"}
    text = text_file.read_text(encoding="utf-8")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    cut = spread_windows(token_ids, windows, prefix, scored, start_ids)
    factories = cache_factories(list(dict.fromkeys(cache)), loaded)
    set_seed(seed)
    with track_progress(total=len(cut) * len(factories)) as announce:
        results = measure_fidelity(loaded, cut, factories, prefix_length=prefix, chunk=chunk, on_progress=announce)
    rows = sorted(results.items(), key=lambda row: row[1].memory_after_prefix.total_bytes)
    title = (
        f"{model} on {text_file.name}: {windows} windows, {scored} tokens scored after {prefix}; bytes of the prefix"
    )
    open_console().print(make_table(title, _COLUMNS, [_fidelity_cells(*row) for row in rows]))
    settings.update(
        text_file=text_file.name, dtype=str(loaded.dtype).removeprefix("torch."), device=loaded.device.type
    )
    rows_as_json = [fidelity_fields(*row) for row in rows]
    return {**provenance(loaded.device), "settings": settings, "rows": rows_as_json}
