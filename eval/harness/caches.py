"""The caches of an evaluation: made from what options name, asked for their counters, and held to having been used."""

from collections.abc import Callable, Sequence
from functools import partial

from transformers import Cache, PreTrainedModel, QuantizedCache

from kvcache_plugins.registry import create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import ReportingMixin, StatValue


# What the others are held against; it comes first
REFERENCE = "dynamic"

# What a peer's cache is known to raise in the middle of a run. The other rows are worth having all the same.
CACHE_FAILURES = (ValueError, RuntimeError, IndexError, AssertionError, NotImplementedError)

# Counters of a cache's `stats()` that stay 0 until it has answered with something other than exact states
EXERCISE_COUNTERS = ("tokens_compressed", "tokens_dropped", "selected_calls", "attend_calls")

CacheFactory = Callable[[], Cache]


def with_reference(specs: Sequence[str]) -> list[str]:
    """The reference and then what is named, nothing twice."""
    return list(dict.fromkeys([REFERENCE, *specs]))


def cache_factories(specs: Sequence[str], model: PreTrainedModel) -> dict[str, CacheFactory]:
    """
    Factories of caches given as `name` or `name:key=value,key=value`, by that text.

    Each is called once and its cache thrown away, so that a wrong name or option is an error before anything has run.
    """
    factories: dict[str, CacheFactory] = {}
    for spec in specs:
        name, options = parse_cache_spec(spec)
        factories[spec] = partial(create_cache, name, model, **options)
        factories[spec]()
    return factories


def cache_stats(cache: Cache) -> dict[str, StatValue]:
    """The cache's own counters; empty for a third party's cache that keeps none."""
    return dict(cache.stats()) if isinstance(cache, ReportingMixin) else {}


def was_exercised(cache: Cache) -> bool:
    """
    Whether a cache has answered with something other than the exact states.

    A cache that never does, such as `DynamicCache`, counts as exercised: there is nothing that a score could miss.
    """
    if isinstance(cache, QuantizedCache):
        return any(getattr(layer, "_quantized_keys", None) is not None for layer in cache.layers)
    stats = cache_stats(cache)
    return all(stats[name] != 0 for name in EXERCISE_COUNTERS if name in stats)


def check_is_empty(cache: Cache) -> None:
    """A `ValueError` if a factory has returned a cache that was used before."""
    if cache.get_seq_length() != 0:
        raise ValueError("A cache factory must return a fresh, empty cache every time")


def check_length(cache: Cache, expected: int) -> None:
    """A `RuntimeError` unless the cache holds what was fed: a model that passes it by scores as if it lost nothing."""
    if cache.get_seq_length() != expected:
        raise RuntimeError(
            f"{type(cache).__name__} reports {cache.get_seq_length()} tokens after {expected}: the model did not go "
            "through it, so nothing can be said about it."
        )
