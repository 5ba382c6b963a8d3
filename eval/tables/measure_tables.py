"""Markdown tables of what was measured of answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvcache_plugins.eval.harness.windows import stretch_stops

from .markdown import add_fetched_share, make_markdown_table


def render_retrieval(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["cache", "answers right", "standard error", "answers' tokens right"]
    keys = ("accuracy", "standard_error", "token_accuracy")
    cells = [[f"`{row['cache']}`", *(f"{100 * row[key]:.1f} %" for key in keys)] for row in rows]
    add_fetched_share(head, cells, rows)
    return make_markdown_table(head, cells)


def render_perplexity(rows: Sequence[Mapping[str, Any]]) -> str:
    stops = stretch_stops(rows[0]["stretch"], rows[0]["num_scored"])
    head = ["cache", "MB", "PPL", *(f"to {stop}" for stop in stops)]
    cells = [
        [
            f"`{row['cache']}`",
            f"{row['memory_at_end']['total_bytes'] / 1e6:.2f}",
            f"{row['ppl']:.3f}",
            *(f"{ppl:.2f}" for ppl in row["ppl_by_stretch"]),
        ]
        for row in rows
    ]
    return make_markdown_table(head, cells)


def render_lm_eval(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("model", "seconds (quartiles)", "times `hf`", "largest difference, nats", "relative", "same picks")
    cells = [
        (
            row["model"],
            f"{row['median_s']:.2f} ({row['lower_quartile_s']:.2f} to {row['upper_quartile_s']:.2f})",
            f"{row['speed_against_hf']:.2f}",
            f"{row['largest_difference']:.1e}",
            f"{row['largest_relative_difference']:.1e}",
            f"{row['same_picks']} of {row['num_items']}",
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def render_repeated_tokens(rows: Sequence[Mapping[str, Any]]) -> str:
    """KL of both kinds; in bold what is above 3 times that of text."""
    tables = []
    for column, title in (("behind", "Behind the prompt"), ("decoded", "Decoded behind it")):
        bounds = {name: 3 * kl for row in rows if row["prompt"] == "text" for name, kl in row[column].items()}
        cells = [
            [
                row["prompt"],
                str(row["tokens"]),
                *(f"**{kl:.4f}**" if kl > bounds[name] else f"{kl:.4f}" for name, kl in row[column].items()),
            ]
            for row in rows
        ]
        tables.append(make_markdown_table([title, "tokens", *(f"`{name}`" for name in bounds)], cells))
    return "\n".join(tables)
