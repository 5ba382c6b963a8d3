"""Ways to have caches of one prefix: read again, copied, forked, or loaded and forked."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import GEARCache
from kvcache_plugins.eval.harness.timing import time_call
from kvcache_plugins.models.cache_argument import as_argument


# Of these the median is taken
_FILE_ROUNDS = 3


@dataclass(kw_only=True, slots=True)
class Way:
    """
    A way to have caches of one prefix, and what was measured of it.

    Args:
        name (`str`), cache (`str`): the way, and the cache that it is a way for.
        make (`Callable[[], Cache]`): returns a cache that holds the prefix.
        rounds (`int`): how many are made.
        once_s (`dict[str, float]`): seconds of what was done before, once for all continuations, by what it was.
        save_s (`float`, *optional*), file_bytes (`int`, *optional*): seconds that writing the file took which it
            reads, in an earlier process if need be, and its size.
        ready_s, tokens_s (`list[float]`): seconds until a cache was there, and of its continuation's tokens.
        caches (`list[Cache]`): all that were made, with their continuations in them.
        logits (`list[torch.Tensor]`): of the continuations, `[new_tokens, vocabulary]` each.
    """

    name: str
    cache: str
    make: Callable[[], Cache]
    rounds: int
    once_s: dict[str, float] = field(default_factory=dict)
    save_s: float | None = None
    file_bytes: int | None = None
    ready_s: list[float] = field(default_factory=list)
    tokens_s: list[float] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def dense_ways(network: PreTrainedModel, prefix_ids: torch.Tensor, continuations: int, rounds: int) -> list[Way]:
    """The two ways of Transformers' own cache, for a prefix `[1, tokens]`."""

    def prefill() -> Cache:
        return _prefill(network, prefix_ids, DynamicCache(config=network.config))

    typer.echo("the prefix is read through dynamic", err=True)
    seconds, filled = _timed(prefill, network.device)
    return [
        Way(name="prefill again", cache="dynamic", make=prefill, rounds=rounds),
        Way(
            name="deepcopy",
            cache="dynamic",
            make=partial(copy.deepcopy, filled),
            rounds=continuations,
            once_s={"prefill": seconds},
        ),
    ]


def gear_ways(
    network: PreTrainedModel, prefix_ids: torch.Tensor, continuations: int, spec: str, gear: GEARCache, path: Path
) -> list[Way]:
    """The two ways of an empty GEAR cache, for a prefix `[1, tokens]`; the cache is saved at `path` and read back."""
    typer.echo(f"the prefix is read through {spec}", err=True)
    prefill_s, filled = _timed(partial(_prefill, network, prefix_ids, gear), network.device)
    saves = [_timed(partial(filled.save, path, network), network.device) for _ in range(_FILE_ROUNDS)]
    loads = [_timed(partial(GEARCache.load, path, network), network.device) for _ in range(_FILE_ROUNDS)]
    loaded = loads[0][1]
    return [
        Way(
            name="fork",
            cache=spec,
            make=lambda: filled.fork(1)[0],
            rounds=continuations,
            once_s={"prefill": prefill_s},
        ),
        Way(
            name="load and fork",
            cache=spec,
            make=lambda: loaded.fork(1)[0],
            rounds=continuations,
            once_s={"load": statistics.median(seconds for seconds, _ in loads)},
            save_s=statistics.median(seconds for seconds, _ in saves),
            file_bytes=path.stat().st_size,
        ),
    ]


def _prefill(network: PreTrainedModel, prefix_ids: torch.Tensor, cache: Cache) -> Cache:
    network(prefix_ids, **as_argument(cache), logits_to_keep=1)
    return cache


def _timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds that a call takes, and what it returns."""
    returned: list[Any] = []
    seconds = time_call(lambda: returned.append(function()), device)
    return seconds, returned[0]
