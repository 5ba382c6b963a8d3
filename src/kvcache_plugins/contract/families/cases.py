"""The caches that the table is made of: this package's, set so that what comes out can be told to be right."""

from functools import partial

from kvcache_plugins.registry import OptionValue, create_cache, parse_cache_spec

from .survey import Case


# Rounding of another order of sums, carried through a few layers
_EXACT = 0.02
# What 8 bits may change: a lost token or a wrong position changes more
_LOSSY = 0.1
_OWN: dict[str, tuple[str, dict[str, OptionValue | tuple[int, ...]], float]] = {
    "gear": ("gear-4bit", {"nbits": 8, "residual_length": 16}, _LOSSY),
    # Everything is fetched: what it attends to is what the dense cache does. Speculating as for a model on a GPU
    "infinigen": (
        "infinigen",
        {"share": 1.0, "max_fetch_ratio": 1.0, "recent": 8, "full_layers": (), "speculate": True},
        _EXACT,
    ),
    "h2o": ("h2o", {"heavy_ratio": 0.5, "recent_ratio": 0.5}, _EXACT),
}


def own_cases() -> dict[str, Case]:
    """GEAR at 8 bits, InfiniGen that fetches everything, H2O that keeps everything."""
    return {
        name: Case(make_cache=partial(create_cache, registered, **options), limit=limit)  # type: ignore[arg-type]
        for name, (registered, options, limit) in _OWN.items()
    }


def cases_of(specs: list[str]) -> dict[str, Case]:
    """Registered caches, as `name` or `name:key=value`, held to what 8 bits may change."""
    cases = {}
    for spec in specs:
        name, options = parse_cache_spec(spec)
        cases[spec] = Case(make_cache=partial(create_cache, name, **options), limit=_LOSSY)  # type: ignore[arg-type]
    return cases
