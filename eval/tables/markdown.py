"""Markdown tables that several renderers share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any


def make_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


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
    held = [row["memory_after_prefix"] for row in ordered]
    if any(memory.get("shared") for memory in held):
        head.insert(3, "% with what all caches share")
        for line, memory in zip(cells, held, strict=True):
            line.insert(3, f"{memory.get('kv_percent_with_shared', memory['kv_percent']):.1f}")
    means = [row.get("mean_kv_percent") for row in ordered]
    if any(mean is not None for mean in means):
        head.insert(3, "% while decoding")
        for line, mean in zip(cells, means, strict=True):
            line.insert(3, "-" if mean is None else f"{mean:.1f}")
    add_fetched_share(head, cells, ordered)
    return make_markdown_table(head, cells)


def standard_error_of_kl(row: Mapping[str, Any]) -> float:
    """Of the mean of the windows."""
    return float(row["kl_spread"]) / math.sqrt(len(row["windows"]))


def _kl(row: Mapping[str, Any]) -> str:
    has_error = len(row.get("windows", ())) > 1
    return f"{row['kl']:.4f}" + (f" ± {standard_error_of_kl(row):.4f}" if has_error else "")


def add_fetched_share(head: list[str], cells: list[list[str]], rows: Sequence[Mapping[str, Any]]) -> None:
    """
    Adds to a table the share of tokens that caches fetched, if one of them counts it, and of bytes where it is told
    what a cache holds while it decodes.
    """
    stats = [row.get("stats", {}) for row in rows]
    if not any(each.get("tokens_fetchable") for each in stats):
        return
    head.append("% of tokens fetched")
    for line, each in zip(cells, stats, strict=True):
        fetchable = each.get("tokens_fetchable")
        line.append(f"{100 * each['tokens_fetched'] / fetchable:.1f}" if fetchable else "-")
    if all("memory_at_end" in row for row in rows):
        head.append("% of bytes, whole layers at 16 bits")
        for line, row in zip(cells, rows, strict=True):
            share = fetched_share_of_bytes(row)
            line.append("-" if share is None else f"{100 * share:.2f}")


def fetched_share_of_bytes(row: Mapping[str, Any]) -> float | None:
    """
    Bytes that a cache fetched in all its steps, as a share of what offloading of whole layers would have moved at 16
    bits: every key and value of every layer in every step. `None` if it fetched nothing.
    """
    fetched, windows = row["stats"].get("bytes_fetched"), row.get("windows")
    if not fetched or not windows:
        return None
    held = [row[name] for name in ("memory_after_prefix", "memory_at_end")]
    dense = [100 * memory["total_bytes"] / memory["kv_percent"] for memory in held]
    # Counters are those of the last window, whose tokens came one by one
    return float(fetched / (windows[-1]["num_scored"] * sum(dense) / 2))
