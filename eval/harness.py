"""Helpers that all measurements share: caches by name, windows of text, filled caches, and clocks."""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    Cache,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    QuantizedCache,
    StoppingCriteria,
)

from kvcache_plugins.console import inputs
from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.models.cache_argument import as_argument, reading_options
from kvcache_plugins.option_checks import check_integer
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import ReportingMixin, StatValue


# Dense cache that others are compared with; its row comes first
REFERENCE = "dynamic"
# Counters of `stats()` that are 0 while a cache holds exact states alone, and while attention has read no others
_HELD_COUNTERS = ("tokens_compressed", "tokens_dropped")
_READ_COUNTERS = ("selected_calls", "attend_calls")

QUARTILES = ("lower_quartile_s", "median_s", "upper_quartile_s")
# Bounds of the median, see `median_interval`
INTERVAL = ("median_from_s", "median_to_s")

CacheFactory = Callable[[], Cache]
States = Sequence[tuple[torch.Tensor, torch.Tensor]]

# Caches


def cache_factories(specs: Sequence[str], model: PreTrainedModel) -> dict[str, CacheFactory]:
    """Make factories of caches, by their specs. Each is called once, so that errors come before any measurement."""
    factories: dict[str, CacheFactory] = {spec: partial(create_cache, spec, model) for spec in specs}
    for factory in factories.values():
        factory()
    return factories


def cache_stats(cache: Cache) -> dict[str, StatValue]:
    """Return a cache's counters; none for a third party's cache without `stats()`."""
    return dict(cache.stats()) if isinstance(cache, ReportingMixin) else {}


def holds_inexact(cache: Cache) -> bool:
    """Return False if a cache's counters say that it holds exact states alone, else True."""
    if isinstance(cache, QuantizedCache):
        return any(getattr(layer, "_quantized_keys", None) is not None for layer in cache.layers)
    stats = cache_stats(cache)
    return all(stats[name] != 0 for name in _HELD_COUNTERS if name in stats)


def was_exercised(cache: Cache) -> bool:
    """Return False if a cache's counters say that attention has seen exact states alone so far, else True."""
    stats = cache_stats(cache)
    return holds_inexact(cache) and all(stats[name] != 0 for name in _READ_COUNTERS if name in stats)


def check_is_empty(cache: Cache) -> None:
    """Raise a `ValueError` if a factory has returned a cache that holds tokens."""
    if cache.get_seq_length() != 0:
        raise ValueError("A cache factory must return a fresh, empty cache every time")


def check_length(cache: Cache, expected: int) -> None:
    """Raise a `RuntimeError` if a cache does not hold all fed tokens: scores would not be those of the cache."""
    if cache.get_seq_length() != expected:
        raise RuntimeError(
            f"{type(cache).__name__} reports {cache.get_seq_length()} tokens after {expected}: the model did not go "
            "through it, so nothing can be said about it."
        )


@torch.no_grad()
def feed(
    model: PreTrainedModel,
    token_ids: torch.Tensor,
    cache: Cache,
    chunk: int | None = None,
    *,
    mask: torch.Tensor | None = None,
    needs_logits: bool = True,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[torch.Tensor]:
    """
    Feed tokens `[B, tokens]` to a model, after those that a cache holds, and yield the logits of each forward. A
    forward has `chunk` tokens, or all. `mask` `[B, all tokens]` is 0 for padding. See `reading_options`.
    """
    held, num_new = int(cache.get_seq_length()), token_ids.shape[1]
    every = F.pad(token_ids.to(model.device), (held, 0))
    for start in range(0, num_new, chunk or num_new):
        stop = held + min(start + (chunk or num_new), num_new)
        options = reading_options(model.forward, cache, every, mask, stop, needs_logits=needs_logits)
        with autocast():
            logits = model(**options).logits
        yield logits
    check_length(cache, held + num_new)


# Windows of text: disjoint, of one length, spread evenly from its beginning to its end


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[torch.Tensor, list[int]]:
    """Encode a whole text without special tokens; return also the special tokens that every text begins with."""
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    # Tokenizers add a beginning (and some an end) of text even around nothing; only the beginning belongs before text
    start_ids = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]
    return torch.tensor(token_ids, dtype=torch.long, device="cpu"), start_ids


def load_with_tokens(
    model: str, text_file: Path, num_tokens: int, dtype: str | None = None
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Load a model, and encode the first tokens of a file, `[1, num_tokens]`; a `ValueError` if it has fewer."""
    text = inputs.read_text(text_file, "text_file")
    network, tokenizer = inputs.load_for_evaluation(model, dtype)
    token_ids: torch.Tensor = tokenizer(text, return_tensors="pt").input_ids
    if token_ids.shape[1] < num_tokens:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {num_tokens} are needed")
    return network, token_ids[:, :num_tokens].to(network.device)


def read_rows(path: Path, option: str) -> list[dict[str, Any]]:
    """Read rows of a file of JSON lines; a `ValueError` names a line that is no JSON."""
    rows = []
    # `splitlines` would cut at separators that JSON has inside of strings
    for number, line in enumerate(inputs.read_text(path, option).split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"`{option}`: line {number} of {path} is no JSON ({error.msg})") from error
    return rows


def spread_windows(
    token_ids: torch.Tensor, num_windows: int, prefix_length: int, num_scored: int, start_ids: Sequence[int] = ()
) -> list[torch.Tensor]:
    """
    Cut disjoint windows, spread evenly over a text `[num_tokens]` without special tokens. A window has `prefix_length`
    tokens, which begin with `start_ids`, then `num_scored`, and one more to predict. Raise a `ValueError` if the text
    is too short.
    """
    check_integer("num_windows", num_windows, 1)
    check_integer("prefix_length", prefix_length, len(start_ids) + 1)
    check_integer("num_scored", num_scored, 1)
    length = prefix_length + num_scored + 1 - len(start_ids)
    if token_ids.numel() < num_windows * length:
        raise ValueError(
            f"{num_windows} windows of {length} tokens need a text of {num_windows * length} tokens, but it has "
            f"{token_ids.numel()}: ask for fewer or shorter windows."
        )
    stride = token_ids.numel() // num_windows
    start = torch.tensor(list(start_ids), dtype=token_ids.dtype, device="cpu")
    return [torch.cat([start, token_ids[i * stride : i * stride + length]]) for i in range(num_windows)]


def load_with_windows(
    model: str | inputs.LoadedModel, text_file: Path, sizes: tuple[int, int, int], *place: str | None
) -> tuple[PreTrainedModel, list[torch.Tensor]]:
    """Load a model in a dtype on a device (`place`), and cut windows of a file; `sizes` as for `spread_windows`."""
    text = inputs.read_text(text_file, "text_file")
    network, tokenizer = inputs.load_for_evaluation(model, *place)
    token_ids, start_ids = encode_text(tokenizer, text)
    return network, spread_windows(token_ids, *sizes, start_ids)


def stretch_stops(stretch: int, num_scored: int) -> list[int]:
    """List the ends of stretches of `stretch` scored tokens each; the last may be shorter."""
    return [min(start + stretch, num_scored) for start in range(0, num_scored, stretch)]


def mean_by_stretch(values: Sequence[float], stretch: int) -> list[float]:
    """Return the means of values of tokens over stretches of `stretch` tokens each."""
    stops = stretch_stops(stretch, len(values))
    return [statistics.fmean(values[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]


# Long contexts for timing decode steps: the keys and values of a short text, repeated, as reading 16384 tokens takes
# minutes. Repeated keys have the positions of the short text, and caches see no queries of the prompt. The time of a
# step depends on neither.


@torch.inference_mode()
def read_states(network: PreTrainedModel, token_ids: torch.Tensor) -> States:
    """Read tokens `[B, T]` into a dense cache; return keys and values of every layer, `[B, H, T, D]`."""
    cache = DynamicCache(config=network.config)
    network(token_ids, **as_argument(cache), logits_to_keep=1)
    layers: list[Any] = cache.layers
    if any(layer.keys is None or layer.values is None for layer in layers):
        raise ValueError("a model whose layers have no keys and values cannot be given any")
    return [(layer.keys, layer.values) for layer in layers]


@torch.inference_mode()
def fill_with_states(cache: Cache, states: States, context: int, batch_size: int = 1) -> None:
    """Fill a cache with `context` tokens of repeated `states` in each of `batch_size` sequences."""
    layers: list[Any] = cache.layers
    for index, sides in enumerate(states):
        times = -(-context // sides[0].shape[2])
        keys, values = (side.repeat(1, 1, times, 1)[:, :, :context].contiguous() for side in sides)
        if not isinstance(cache, InfiniGenCache):
            cache.update(keys, values, index)
            continue
        # Its hooks have announced no layer, which `cache.update` would refuse
        layers[index].update(keys, values)
        if isinstance(layers[index], InfiniGenLayer):
            layers[index].commit_prompt()
    if batch_size > 1:
        cache.batch_repeat_interleave(batch_size)


# Clocks


def time_call(
    function: Callable[[], Any], device: torch.device | None = None, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds that a function takes by a clock, with the work that it starts on a GPU."""
    is_gpu = device is not None and device.type == "cuda"
    if is_gpu:
        torch.cuda.synchronize(device)
    start = clock()
    function()
    if is_gpu:
        torch.cuda.synchronize(device)
    return clock() - start


def time_on_gpu(function: Callable[[], Any], ahead: Callable[[], Any]) -> float:
    """
    Return the seconds that a GPU is busy with the work of a function. `ahead` starts work before it, which has to last
    longer than Python needs for the function's launches, and move more bytes than the GPU's cache holds, so that the
    function reads from memory.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    ahead()
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles (extremes of fewer than three) and interval of the median, named as in results."""
    extremes = [min(seconds), statistics.median(seconds), max(seconds)]
    quartiles = extremes if len(seconds) < 3 else statistics.quantiles(seconds, n=4)
    return dict(zip((*QUARTILES, *INTERVAL), (*quartiles, *median_interval(seconds)), strict=True))


def median_interval(seconds: Sequence[float]) -> tuple[float, float]:
    """
    Return two samples: the true median lies between them with a confidence of at least 95 %, by the binomial
    distribution. Fewer than six samples return their extremes, whose confidence is lower.
    """
    ordered = sorted(seconds)
    count = len(ordered)
    first = 0
    outside = 0.0
    for below in range(count // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 0.05:
            break
        first = below
    return ordered[first], ordered[count - 1 - first]


def take_turns(
    functions: Mapping[str, Callable[[int], Any]],
    time_one: Callable[[Callable[[], Any]], float],
    rounds: int,
    *,
    warm_up: int = 0,
    seconds: float = float("inf"),
    guard: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, list[float]]:
    """
    Time functions in turns, so that other work of the machine slows all of them alike. A function gets the number of
    the round. No round begins after `seconds`, except the first three. `guard`, a context manager made with the
    function's name, is around each call: if it suppresses an error, the function takes no further turns.
    """
    measured: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        for _ in range(warm_up):
            function(0)
    racing, start = dict(functions), time.perf_counter()
    for number in range(rounds):
        if number >= 3 and time.perf_counter() - start > seconds:
            break
        for name, function in racing.items():
            with guard(name):
                measured[name].append(time_one(partial(function, number)))
        racing = {name: function for name, function in racing.items() if len(measured[name]) > number}
    return measured


class TokenTimer(StoppingCriteria):
    """Records the time of its creation, right before `generate`, and of each token, and calls `on_token`."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_token: Callable[[], None] = lambda: None
    ) -> None:
        self.clock, self.on_token = clock, on_token
        self.times = [clock()]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: Any) -> torch.Tensor:
        self.times.append(self.clock())
        self.on_token()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def prefill_seconds(self) -> float:
        """Seconds to the first token."""
        return self.times[1] - self.times[0]

    @property
    def seconds_per_token(self) -> float | None:
        """Median over the decoded tokens but the first, which warms up; `None` if there is no other."""
        intervals = [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]
        return statistics.median(intervals[1:]) if len(intervals) > 1 else None
