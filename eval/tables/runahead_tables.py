"""Markdown tables of KV-Runahead's prefill, measured and simulated."""

from collections.abc import Mapping, Sequence
from typing import Any

from .markdown import make_markdown_table


def render_runahead(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["tokens", "way", "slices", "seconds to the first token (quartiles)", "times one rank", "MB sent"]
    is_throttled = any("seconds_against_full" in row for row in rows)
    head += ["link", "of its time over the full link"] if is_throttled else []
    cells = []
    for row in rows:
        quartiles = f"{row['lower_quartile_s']:.2f} to {row['upper_quartile_s']:.2f}"
        line = [
            str(row["length"]),
            row["method"],
            " + ".join(map(str, row["lengths"])),
            f"{row['median_s']:.2f} ({quartiles})",
            f"{row['speed_against_one_rank']:.2f}",
            f"{row['bytes_sent'] / 1e6:.1f}",
        ]
        if is_throttled:
            against = row.get("seconds_against_full")
            line += [row["link"], "-" if against is None else f"{against:.3f}"]
        cells.append(line)
    return make_markdown_table(head, cells)


def render_simulation(rows: Sequence[Mapping[str, Any]]) -> str:
    if "measured_s" in rows[0]:
        head = ["slices", "measured, s", "simulated, s", "simulated / measured"]
        keys = ("measured_s", "simulated_s", "simulated_against_measured")
        cells = [[" + ".join(map(str, row["lengths"])), *(f"{row[key]:.3f}" for key in keys)] for row in rows]
        return make_markdown_table(head, cells)
    head = ["tokens", "GB/s", "ranks", "one rank, s", "TSP, s", "KV-Runahead, s", "ranks used", "times TSP"]
    cells = [
        [
            str(row["length"]),
            f"{row['gb_s']:g}",
            str(row["num_ranks"]),
            *(f"{row[key]:.3f}" for key in ("one_rank_s", "tsp_s", "runahead_s")),
            str(len(row["lengths"])),
            f"{row['tsp_s'] / row['runahead_s']:.2f}",
        ]
        for row in rows
    ]
    return make_markdown_table(head, cells)
