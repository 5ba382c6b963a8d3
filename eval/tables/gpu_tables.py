"""Markdown tables of what is measured on a GPU alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from .benchmark_tables import (
    show_milliseconds,
)
from .markdown import make_markdown_table


def render_offloading(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "context",
        "cache",
        "ms a token (quartiles)",
        "tokens/s",
        "times `offloaded`",
        "of the time with all resident",
        "transfers hidden",
        "MB a token, counted",
        "of full offloading's, counted",
    )
    cells = []
    for row in rows:
        counted = row.get("counted")
        share = counted["bytes_per_token"] / counted["full_offloading_bytes_per_token"] if counted else 0.0
        cells.append(
            (
                str(row["context"]),
                f"`{row['cache']}`",
                show_milliseconds(row),
                f"{row['tokens_per_s']:.1f}",
                f"{row['speed_against_offloaded']:.2f}" if "speed_against_offloaded" in row else "",
                f"{row['time_against_resident']:.2f}" if "time_against_resident" in row else "",
                f"{100 * row['hidden_share']:.0f} %" if "time_against_resident" in row else "",
                f"{counted['bytes_per_token'] / 1e6:.1f}" if counted else "",
                f"{100 * share:.1f} %" if counted else "",
            )
        )
    return make_markdown_table(head, cells)


def render_batch(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("context", "cache", "largest batch", "tokens/s", "times first", "MB a sequence", "peak, GiB")
    cells = [
        (
            row["way"],
            f"`{row['cache']}`",
            # A search that ran out of time gives a batch that fits, perhaps not the largest
            f"{row['largest_batch']}" if row["search"] == "complete" else f"at least {row['largest_batch']}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['throughput_against_first']:.2f}",
            f"{row['bytes_per_sequence'] / 1e6:.1f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)
