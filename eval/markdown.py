"""Markdown tables that several renderers share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def make_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def stretch_stops(stretch: int, num_scored: int) -> list[int]:
    """Where the stretches of `perplexity` end, in scored tokens."""
    return [min(start + stretch, num_scored) for start in range(0, num_scored, stretch)]


def render_fidelity(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each cache, the smallest first: see `fidelity_fields`."""
    head = ["cache", "MB", "% of 16 bits", "PPL / dense", "KL to dense", "same top token"]
    ordered = sorted(rows, key=lambda row: row["memory_after_prefix"]["total_bytes"])
    cells = [
        [
            f"`{row['cache']}`",
            f"{row['memory_after_prefix']['total_bytes'] / 1e6:.2f}",
            f"{row['memory_after_prefix']['kv_percent']:.1f}",
            f"{row['ppl_ratio']:.3f}",
            _kl(row),
            f"{100 * row['top1_agreement']:.1f} %",
        ]
        for row in ordered
    ]
    add_fetched_share(head, cells, ordered)
    return make_markdown_table(head, cells)


def standard_error_of_kl(row: Mapping[str, Any]) -> float:
    """Of the mean of the windows."""
    return float(row["kl_spread"]) / math.sqrt(len(row["windows"]))


def _kl(row: Mapping[str, Any]) -> str:
    has_error = len(row.get("windows", ())) > 1
    return f"{row['kl']:.4f}" + (f" ± {standard_error_of_kl(row):.4f}" if has_error else "")


def add_fetched_share(head: list[str], cells: list[list[str]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Adds to a table the share of tokens that caches fetched, if one of them counts it."""
    stats = [row.get("stats", {}) for row in rows]
    if any(each.get("tokens_fetchable") for each in stats):
        head.append("% of tokens fetched")
        for line, each in zip(cells, stats, strict=True):
            fetchable = each.get("tokens_fetchable")
            line.append(f"{100 * each['tokens_fetched'] / fetchable:.1f}" if fetchable else "-")
