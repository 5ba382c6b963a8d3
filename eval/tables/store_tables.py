"""What `bench store` and `bench pool` have measured, as tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_tables import show_milliseconds
from .markdown import make_markdown_table


def render_store(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each prompt of a scenario, by each way."""
    head = (
        "scenario",
        "way",
        "prompt",
        "tokens",
        "known",
        "first token, s",
        "of CPU, s",
        "% of the first",
        "MB",
        "load",
    )
    cells = []
    for row in rows:
        of_way = next(each for each in rows if (each["scenario"], each["way"]) == (row["scenario"], row["way"]))
        share = 100 * row["first_token_cpu_s"] / of_way["first_token_cpu_s"]
        cells.append(
            (
                row["scenario"],
                f"`{row['way']}`",
                row["visit"],
                str(row["num_tokens"]),
                str(row["num_saved"]),
                f"{row['first_token_s']:.2f}",
                f"{row['first_token_cpu_s']:.2f}",
                f"{share:.1f}",
                f"{row['disk_bytes'] / 1e6:.1f}",
                f"{row['load']:.0f}",
            )
        )
    return make_markdown_table(head, cells)


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
