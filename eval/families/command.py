"""`kvcache-plugins models`: which decoder families of the installed Transformers a cache works on."""

from collections.abc import Iterable
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.tables.families import render_families
from kvcache_plugins.registry import OptionValue, check_caches, create_cache, parse_cache_spec

from .survey import Case, FamilyResult, family_names, try_families


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


def result_rows(results: Iterable[FamilyResult]) -> list[dict[str, Any]]:
    """Makes a row for each family, as JSON has it."""
    return [asdict(result) for result in results]


def survey_families(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:key=value,key=value; repeatable. By default GEAR at 8 bits, InfiniGen that fetches "
            "everything and H2O that keeps everything."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
) -> dict[str, Any]:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache is held against DynamicCache: one prompt and a
    second turn, and two prompts of unequal length. It works, works and reads whole layers dense while decoding,
    refuses and says why, or fails. Prints Markdown.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.gear.status != "works")'
        kvcache-plugins models --out eval/results/families.json
    """
    specs = check_caches(cache or [])
    families = [name for name in family_names() if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(family_names())}")
    cases = cases_of(specs) if specs else own_cases()
    with track_progress(len(families)) as announce:
        rows = result_rows(try_families(families, cases, announce, seconds))
    typer.echo(render_families(rows))
    settings = {"families": pattern, "caches": " ".join(cases)}
    return {"benchmark": "families", **provenance(torch.device("cpu")), "settings": settings, "rows": rows}
