"""Renders the tables of README.md and docs from the JSON files of `eval/results/`, between markers.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a file of `eval/results/` without its suffix;
the file's shape decides the columns. A Markdown file of that name (the contract's grid) is taken as it is; a folder of
that name holds the results of a sweep.

    python -m kvcache_plugins.eval.tables.documents README.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.eval.harness.windows import stretch_stops

from .markdown import add_fetched_share, make_markdown_table, render_fidelity
from .sweeps import render_sweep


RESULTS = Path("eval/results")
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """`text` with the body of every marked table made anew. A missing result file raises a `ValueError`."""
    return _MARKED.sub(lambda match: f"{match[1]}{render_result(results, match['name'])}{match[4]}", text)


def render_result(results: Path, name: str) -> str:
    """The Markdown table of one result."""
    markdown, data = results / f"{name}.md", results / f"{name}.json"
    if (results / name).is_dir():
        return render_sweep(results / name)
    if markdown.is_file():
        return markdown.read_text(encoding="utf-8")
    if not data.is_file():
        raise ValueError(f"there is no {name}.json or {name}.md in {results}")
    content = json.loads(data.read_text(encoding="utf-8"))
    kind = content.get("benchmark", "fidelity")
    tables = {
        "fidelity": render_fidelity,
        "memory": _memory,
        "decode": _decode,
        "kernels": _kernels,
        "step": _step,
        "prefix": _prefix,
        "batch": _batch,
        "prediction": _prediction,
        "retrieval": _retrieval,
        "offloading": _offloading,
        "perplexity": _perplexity,
        "lm-eval": _lm_eval,
        "runahead": _runahead,
        "runahead-simulation": _runahead_simulation,
    }
    table = tables[kind](content["rows"])
    failures = "".join(f"\nNo row: {each['what']} ({each['reason']}).\n" for each in content.get("failures", []))
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items() if value is not None)
    origin = f"commit {content['commit']}, {content['date'][:10]}, {content['device']}"
    source = f"`{data.name}`: {origin}; {versions}; {settings}."
    return f"{table}{failures}\n{source}\n"


def _retrieval(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["cache", "answers right", "standard error", "answers' tokens right"]
    keys = ("accuracy", "standard_error", "token_accuracy")
    cells = [[f"`{row['cache']}`", *(f"{100 * row[key]:.1f} %" for key in keys)] for row in rows]
    add_fetched_share(head, cells, rows)
    return make_markdown_table(head, cells)


def _perplexity(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _lm_eval(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _runahead(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _runahead_simulation(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "held, MB", "% of 16 bits", "allocated by a decode step, MB", "process peak, MB")
    keys = ("cache_bytes", "decode_step_peak_bytes", "rss_peak")
    cells = []
    for row in rows:
        held, step, peak = (f"{row[key] / 1e6:.1f}" for key in keys)
        cells.append((f"`{row['cache']}`", held, f"{row['kv_percent']:.1f}", step, peak))
    layer = rows[0]["dense_layer_bytes"] / 1e6
    return f"{make_markdown_table(head, cells)}\nKeys and values of one layer, dense: {layer:.1f} MB.\n"


def _decode(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("context", *(f"`{row['cache']}`, ms a token" for row in rows))
    bins = zip(*(row["bins"] for row in rows), strict=True)
    cells = [(str(each[0]["context"]), *(f"{item['median_s'] * 1e3:.1f}" for item in each)) for each in bins]
    return make_markdown_table(head, cells)


def _milliseconds(row: Mapping[str, Any]) -> str:
    """Median and quartiles."""
    median, lower, upper = (1e3 * row[key] for key in ("median_s", "lower_quartile_s", "upper_quartile_s"))
    return f"{median:.2f} ({lower:.2f} to {upper:.2f})"


def _kernels(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("attention over", "MB read", "ms (quartiles)", "% of copy bandwidth", "times dense")
    cells = [
        (
            row["name"],
            f"{row['bytes'] / 1e6:.1f}",
            _milliseconds(row),
            f"{100 * row['share_of_copy_bandwidth']:.0f}",
            f"{row['speed_against_dense']:.2f}",
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def _step(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["context", "cache", "MB", "ms a token (quartiles)", f"times `{rows[0]['cache']}`"]
    cells = [
        [
            str(row["context"]),
            f"`{row['cache']}`",
            f"{row['bytes'] / 1e6:.1f}",
            _milliseconds(row),
            f"{row['speed_against_first']:.2f}",
        ]
        for row in rows
    ]
    if any("parts_s" in row for row in rows):
        head.append("of which ms")
        for row, line in zip(rows, cells, strict=True):
            line.append(", ".join(f"{part} {1e3 * each:.1f}" for part, each in row.get("parts_s", {}).items()))
    return make_markdown_table(head, cells)


def _prefix(rows: Sequence[Mapping[str, Any]]) -> str:
    count = rows[0]["num_continuations"]
    head = (
        "way",
        "cache",
        f"held by all {count}, MB",
        "once, s",
        "each, ms (quartiles)",
        f"all {count} ready, s",
        "its tokens, ms (quartiles)",
        "KL to dense",
        "file, MB",
    )
    cells = []
    for row in rows:
        is_part = row["is_extrapolated"]
        way = f"{row['way']}, {row['num_measured']} measured" if is_part else row["way"]
        once = ", ".join(f"{what} {seconds:.2f}" for what, seconds in row["once_s"].items())
        saved = "" if row["save_s"] is None else f" (save {row['save_s']:.2f})"
        cells.append(
            (
                way,
                f"`{row['cache']}`",
                # What was not measured to the end is marked
                f"{'~ ' if is_part else ''}{row['held_bytes'] / 1e6:.1f}",
                f"{once}{saved}",
                _milliseconds(row),
                f"{'~ ' if is_part else ''}{row['all_ready_s']:.2f}",
                _milliseconds(row["tokens_s"]),
                f"{row['kl']:.4f}",
                "" if row["file_bytes"] is None else f"{row['file_bytes'] / 1e6:.1f}",
            )
        )
    table = make_markdown_table(head, cells)
    if any(row["is_extrapolated"] for row in rows):
        table += f"\n~ is the median time, and the mean of the bytes, of those measured, times {count}.\n"
    return table


def _offloading(rows: Sequence[Mapping[str, Any]]) -> str:
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
                _milliseconds(row),
                f"{row['tokens_per_s']:.1f}",
                f"{row['speed_against_offloaded']:.2f}" if "speed_against_offloaded" in row else "",
                f"{row['time_against_resident']:.2f}" if "time_against_resident" in row else "",
                f"{100 * row['hidden_share']:.0f} %" if "time_against_resident" in row else "",
                f"{counted['bytes_per_token'] / 1e6:.1f}" if counted else "",
                f"{100 * share:.1f} %" if counted else "",
            )
        )
    return make_markdown_table(head, cells)


def _batch(rows: Sequence[Mapping[str, Any]]) -> str:
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


def _prediction(rows: Sequence[Mapping[str, Any]]) -> str:
    head = (
        "batch x tokens",
        "cache",
        "MB to read",
        "ms, predicted, not measured",
        "times dense, predicted",
        "launches, not in the time",
    )
    cells = [
        (
            f"{row['batch_size']} x {row['context']}",
            f"`{row['cache']}`",
            f"{row['bytes'] / 1e6:.1f}",
            f"{1e3 * row['predicted_s']:.4f}",
            f"{row['predicted_speed_against_dense']:.2f}",
            "-" if row["launches"] is None else str(row["launches"]),
        )
        for row in rows
    ]
    return make_markdown_table(head, cells)


def main(files: Annotated[list[Path], typer.Argument(help="Markdown files whose tables to render.")]) -> None:
    """Renders the marked tables of Markdown files in place, from eval/results."""
    for file in files:
        file.write_text(render(file.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        typer.echo(f"rendered {file}")


if __name__ == "__main__":
    typer.run(main)
