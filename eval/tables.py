"""Renders the tables of README.md and docs from the JSON files of `eval/results/`, between markers.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a file of `eval/results/` without its suffix;
the file's shape decides the columns. A Markdown file of that name (the contract's grid) is taken as it is.

    python -m kvcache_plugins.eval.tables README.md
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


RESULTS = Path("eval/results")
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """`text` with the body of every marked table made anew. A missing result file raises a `ValueError`."""
    return _MARKED.sub(lambda match: f"{match[1]}{render_result(results, match['name'])}{match[4]}", text)


def render_result(results: Path, name: str) -> str:
    """The Markdown table of one result."""
    markdown, data = results / f"{name}.md", results / f"{name}.json"
    if markdown.is_file():
        return markdown.read_text(encoding="utf-8")
    if not data.is_file():
        raise ValueError(f"there is no {name}.json or {name}.md in {results}")
    content = json.loads(data.read_text(encoding="utf-8"))
    kind = content.get("benchmark", "fidelity")
    tables = {
        "fidelity": _fidelity,
        "memory": _memory,
        "decode": _decode,
        "kernels": _kernels,
        "step": _step,
        "batch": _batch,
        "prediction": _prediction,
        "retrieval": _retrieval,
        "offloading": _offloading,
    }
    table = tables[kind](content["rows"])
    failures = "".join(f"\nNo row: {each['what']} ({each['reason']}).\n" for each in content.get("failures", []))
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items() if value is not None)
    origin = f"commit {content['commit']}, {content['date'][:10]}, {content['device']}"
    source = f"`{data.name}`: {origin}; {versions}; {settings}."
    return f"{table}{failures}\n{source}\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _fidelity(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["cache", "MB", "% of 16 bits", "PPL / dense", "KL to dense", "same top token"]
    ordered = sorted(rows, key=lambda row: row["memory_after_prefix"]["total_bytes"])
    cells = [
        [
            f"`{row['cache']}`",
            f"{row['memory_after_prefix']['total_bytes'] / 1e6:.2f}",
            f"{row['memory_after_prefix']['kv_percent']:.1f}",
            f"{row['ppl_ratio']:.3f}",
            f"{row['kl']:.4f}",
            f"{100 * row['top1_agreement']:.1f} %",
        ]
        for row in ordered
    ]
    stats = [row.get("stats", {}) for row in ordered]
    if any(each.get("tokens_fetchable") for each in stats):
        head.append("% of tokens fetched")
        for line, each in zip(cells, stats, strict=True):
            fetchable = each.get("tokens_fetchable")
            line.append(f"{100 * each['tokens_fetched'] / fetchable:.1f}" if fetchable else "-")
    return _table(head, cells)


def _retrieval(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "answers right", "standard error", "answers' tokens right")
    keys = ("accuracy", "standard_error", "token_accuracy")
    return _table(head, [(f"`{row['cache']}`", *(f"{100 * row[key]:.1f} %" for key in keys)) for row in rows])


def _memory(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "held, MB", "% of 16 bits", "allocated by a decode step, MB", "process peak, MB")
    keys = ("cache_bytes", "decode_step_peak_bytes", "rss_peak")
    cells = []
    for row in rows:
        held, step, peak = (f"{row[key] / 1e6:.1f}" for key in keys)
        cells.append((f"`{row['cache']}`", held, f"{row['kv_percent']:.1f}", step, peak))
    layer = rows[0]["dense_layer_bytes"] / 1e6
    return f"{_table(head, cells)}\nKeys and values of one layer, dense: {layer:.1f} MB.\n"


def _decode(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("context", *(f"`{row['cache']}`, ms a token" for row in rows))
    bins = zip(*(row["bins"] for row in rows), strict=True)
    cells = [(str(each[0]["context"]), *(f"{item['median_s'] * 1e3:.1f}" for item in each)) for each in bins]
    return _table(head, cells)


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
    return _table(head, cells)


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
    return _table(head, cells)


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
    return _table(head, cells)


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
    return _table(head, cells)


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
    return _table(head, cells)


def main(files: Annotated[list[Path], typer.Argument(help="Markdown files whose tables to render.")]) -> None:
    """Renders the marked tables of Markdown files in place, from eval/results."""
    for file in files:
        file.write_text(render(file.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        typer.echo(f"rendered {file}")


if __name__ == "__main__":
    typer.run(main)
