"""What `bench store` and `bench pool` have measured, as tables."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from .benchmark_tables import show_milliseconds
from .markdown import make_markdown_table


def render_store(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for the prompts of a visit that were known, and one for those that were not; medians."""
    head = (
        "scenario",
        "way",
        "visit",
        "prompts",
        "tokens",
        "known",
        "first token, s",
        "of CPU, s",
        "% of the first",
        "MB",
        "load",
        "all prompts, s of CPU",
    )
    cells = []
    for (scenario, way), group in groupby(rows, key=lambda row: (row["scenario"], row["way"])):
        of_way = list(group)
        asked = of_way[0].get("prompts_of_scenario", len(of_way))
        count = str(asked) if asked == len(of_way) else f"{len(of_way)} of {asked}"
        whole = f"{sum(row['first_token_cpu_s'] for row in of_way):.1f} ({count})"
        for (visit, _), alike in groupby(of_way, key=lambda row: (row["visit"], row["num_saved"] > 0)):
            cells.append((scenario, f"`{way}`", visit, *_numbers_of(list(alike), of_way[0]), whole))
            whole = ""
    return make_markdown_table(head, cells)


def _numbers_of(alike: Sequence[Mapping[str, Any]], first: Mapping[str, Any]) -> tuple[str, ...]:
    """How many prompts, tokens, tokens known, seconds, seconds of CPU, per cent of the first, megabytes, load."""
    middle = {
        name: median(row[name] for row in alike)
        for name in ("num_tokens", "num_saved", "first_token_s", "first_token_cpu_s", "load")
    }
    return (
        str(len(alike)),
        f"{middle['num_tokens']:.0f}",
        f"{middle['num_saved']:.0f}",
        f"{middle['first_token_s']:.2f}",
        f"{middle['first_token_cpu_s']:.2f}",
        f"{100 * middle['first_token_cpu_s'] / first['first_token_cpu_s']:.1f}",
        f"{alike[-1]['disk_bytes'] / 1e6:.1f}",
        f"{middle['load']:.0f}",
    )


def render_pool(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cache, context and place."""
    head = ("tokens", "cache", "pool in", "pool, MB", "of it mapped, MB", "ms a token (quartiles)")
    cells = [
        (
            str(row["context"]),
            f"`{row['cache']}`",
            row["place"],
            f"{row['pool_bytes'] / 1e6:.0f}",
            "" if row["mapped_bytes"] is None else f"{row['mapped_bytes'] / 1e6:.1f}",
            show_milliseconds(row),
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)
