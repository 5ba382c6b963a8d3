"""How far a cache's next-token distributions are from the dense cache's, on real text: the cheapest honest measure.

A window of text is a prefix and a continuation. The prefix goes through the cache in one forward, whose logits are not
scored: attention over it is exact in every cache that compresses afterwards, so they would show no error at all. The
continuation then goes through the *filled* cache, and every one of its logits is scored, against the same positions of
a dense cache. The dense logits of a window are computed once and shared by all caches.

    prefix                     continuation
    t[0] ... t[p-1]            t[p] ... t[p+s-1]      fed
                               t[p+1] ... t[p+s]      predicted: s scored tokens, hence windows of p+s+1 tokens

Perplexity is over all scored tokens, KL(dense || cache) and top-1 agreement are over all scored positions.

A layer's error is of its attention's output beside the dense cache's, on the same text. It holds that of the layers
below, whose outputs it is fed with: it is what reaches the residual stream.
"""

import inspect
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel, set_seed

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.inputs import (
    CachesOption,
    DeviceOption,
    DtypeOption,
    ModelOption,
    SeedOption,
    load_for_evaluation,
    read_text,
)
from kvcache_plugins.console.results import memory_fields
from kvcache_plugins.eval.benchmark import benchmark
from kvcache_plugins.eval.harness import (
    CacheFactory,
    cache_factories,
    cache_stats,
    check_is_empty,
    check_length,
    encode_text,
    spread_windows,
)
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.infinigen.queries import find_attention_modules
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.reports.memory import MemoryReport, StatValue, measure_memory


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
        position_kl (`tuple[float, ...]`): KL of each position.
    """

    num_scored: int
    nll: float
    dense_nll: float
    kl: float
    num_agreeing: int
    first_difference: int | None = None
    position_kl: tuple[float, ...] = ()

    @property
    def mean_kl(self) -> float:
        """Mean KL(dense || cache) of the window's positions."""
        return self.kl / self.num_scored

    @property
    def ppl_ratio(self) -> float:
        """The window's perplexity as a multiple of the dense cache's."""
        return math.exp((self.nll - self.dense_nll) / self.num_scored)


@torch.no_grad()
def fill_cache(model: PreTrainedModel, token_ids: torch.Tensor, cache: Cache) -> None:
    """Feeds `[num_tokens]` to the model in one forward through an empty cache, which must then hold all of them."""
    check_is_empty(cache)
    # Only the last logits are computed where the model can do so: the others are a vocabulary each and nobody's.
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model(input_ids=token_ids[None].to(model.device), **as_argument(cache), use_cache=True, **keep)
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
        logits.append(model(input_ids=part[None], **as_argument(cache), use_cache=True).logits[0])
        if after_forward is not None:
            after_forward()
    check_length(cache, length_before + token_ids.numel())
    return torch.cat(logits)


def score_logits(dense_logits: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> WindowScore:
    """Compares a cache's `[num_tokens, vocabulary]` logits with the dense cache's, in float64."""
    nll = dense_nll = 0.0
    agreeing: list[bool] = []
    position_kl: list[float] = []
    rows = zip(
        dense_logits.split(_ROWS_AT_A_TIME), logits.split(_ROWS_AT_A_TIME), targets.split(_ROWS_AT_A_TIME), strict=True
    )
    for dense_rows, cache_rows, target_rows in rows:
        dense_log_probs = F.log_softmax(dense_rows.double(), dim=-1)
        log_probs = F.log_softmax(cache_rows.double(), dim=-1)
        target_rows = target_rows.to(log_probs.device)
        dense_nll += F.nll_loss(dense_log_probs, target_rows, reduction="sum").item()
        nll += F.nll_loss(log_probs, target_rows, reduction="sum").item()
        position_kl += F.kl_div(log_probs, dense_log_probs, reduction="none", log_target=True).sum(dim=-1).tolist()
        agreeing.extend((dense_rows.argmax(-1) == cache_rows.argmax(-1)).tolist())
    return WindowScore(
        num_scored=targets.numel(),
        nll=nll,
        dense_nll=dense_nll,
        kl=sum(position_kl),
        num_agreeing=sum(agreeing),
        first_difference=None if all(agreeing) else agreeing.index(False),
        position_kl=tuple(position_kl),
    )


@dataclass
class AttentionOutputs:
    """Outputs of the attention modules of a model by layer: parts of `[tokens, hidden_size]`."""

    parts: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def by_layer(self) -> list[torch.Tensor]:
        """Joins the outputs of each layer, `[tokens, hidden_size]`."""
        return [torch.cat(self.parts[index]) for index in sorted(self.parts)]


@contextmanager
def record_attention(model: PreTrainedModel) -> Iterator[AttentionOutputs]:
    """
    Records the attention outputs of all forwards in a `with` block, for a batch of one.

    Nothing is recorded of a model whose attention modules are not known: its other measures are worth having.
    """
    recorded = AttentionOutputs()
    try:
        modules = find_attention_modules(model)
    except ValueError:
        modules = {}

    def record(index: int, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        recorded.parts.setdefault(index, []).append(states[0].detach())

    def listen(index: int, module: nn.Module) -> Any:
        return module.register_forward_hook(lambda module, inputs, output: record(index, output))

    handles = [listen(index, module) for index, module in modules.items()]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


class LayerErrors:
    """Adds up, over windows, the squares of differences and of what they are differences from."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[float, float]] = {}

    def add(self, dense: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Adds the outputs of every layer on one window."""
        for index, (exact, other) in enumerate(zip(dense, outputs, strict=True)):
            difference, norm = self._squares.get(index, (0.0, 0.0))
            difference += float((other.double() - exact.double()).square().sum())
            self._squares[index] = (difference, norm + float(exact.double().square().sum()))

    def relative(self) -> tuple[float, ...]:
        """Computes the norm of the difference over that of the dense output, by layer."""
        return tuple(math.sqrt(difference / norm) for difference, norm in self._squares.values())


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
            Relative error of every layer's attention output over the scored tokens, see `LayerErrors`.
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

    def kl_quantile(self, share: float) -> float:
        """KL that so large a share of all scored positions is below, in nats."""
        ordered = sorted(each for window in self.windows for each in window.position_kl)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

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


def fidelity_fields(cache: str, fidelity: Fidelity) -> dict[str, object]:
    """Makes a row of a result."""
    numbers = ["ppl", "dense_ppl", "ppl_ratio", "ppl_ratio_spread", "kl", "kl_spread", "top1_agreement", "num_scored"]
    numbers += ["first_difference", "layer_errors", "mean_kv_percent"]
    return {
        "cache": cache,
        **{name: getattr(fidelity, name) for name in numbers},
        "kl_median": fidelity.kl_quantile(0.5),
        "kl_p999": fidelity.kl_quantile(0.999),
        "memory_after_prefix": memory_fields(fidelity.memory_after_prefix),
        "memory_at_end": memory_fields(fidelity.memory_at_end),
        "stats": fidelity.stats,
        "windows": [_window_fields(window) for window in fidelity.windows],
    }


def _window_fields(window: WindowScore) -> dict[str, object]:
    # A number for each token would be most of a file
    return {key: value for key, value in asdict(window).items() if key != "position_kl"}


@benchmark("fidelity", "{model} on {text_file}: {windows} windows, {scored} tokens scored after {prefix}")
def evaluate_fidelity(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: CachesOption,
    model: ModelOption = "smollm2",
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens that fill the cache, unscored.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens scored through the filled cache.", min=1)] = 512,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--decoded",
            "--chunk",
            help="Scored tokens a forward; 1 decodes as `generate` does. All by default.",
            min=1,
        ),
    ] = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 42,
) -> Iterator[Found]:
    """Measure how far caches are from the dense cache on a text.

    Scored in one forward, new tokens see each other exactly; with --decoded 1 they are read back from the cache one by
    one. Bytes are those after the prefix, "% while decoding" the mean while tokens were scored, buffers included. KL
    is of the next token from the dense cache's, the mean (plus or minus its standard error), the median and the 99.9th
    percentile of all scored positions.

    \b
    Examples:
        kvcache-plugins eval fidelity --text-file wiki.test.raw --cache gear --cache kivi-4bit
        kvcache-plugins eval fidelity --text-file book.txt --windows 2 --decoded 1 \\
            --cache gear-2bit --cache gear-2bit:sparsity=0,rank=8 --out eval/results/rank.json
    """
    text = read_text(text_file, "text_file")
    loaded, tokenizer = load_for_evaluation(model, dtype, device)
    token_ids, start_ids = encode_text(tokenizer, text)
    cut = spread_windows(token_ids, windows, prefix, scored, start_ids)
    factories = cache_factories(list(dict.fromkeys(cache)), loaded)
    set_seed(seed)
    with track_progress(total=len(cut) * len(factories)) as announce:
        results = measure_fidelity(loaded, cut, factories, prefix_length=prefix, chunk=chunk, on_progress=announce)
    yield Settings(dtype=str(loaded.dtype).removeprefix("torch."), device=loaded.device.type)
    yield Content(device=loaded.device)
    for spec, result in sorted(results.items(), key=lambda each: each[1].memory_after_prefix.total_bytes):
        yield fidelity_fields(spec, result)
