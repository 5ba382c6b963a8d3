"""Tables of results, each described once: for documents as Markdown, for terminals by rich.

A benchmark's table is a `table` of columns; a column has a heading and a function that shows a row. Results that need
more than a line for each row have a function from rows to Markdown.

    python -m kvcache_plugins.eval.tables README.md

renders the tables of Markdown files again, each between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a file of
`eval/results/` without its suffix, or the folder of a sweep there. A Markdown file of that name (the contract's grid,
and tables that no command measures any more) is copied.
"""

import math
import re
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvcache_plugins.console.display import MIN_NAME_WIDTH, make_table, open_console, print_line

from .harness import INTERVAL, QUARTILES, REFERENCE, stretch_stops
from .result_files import read_result


Row = Mapping[str, Any]
Rows = Sequence[Row]
RESULTS = Path("eval/results")
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
# Beginning of a cell that holds a number or nothing
_NUMBER = re.compile(r"$|(-|exact)$|~?[ +-]*\d")
_QUARTILES = re.compile(r" \(.* to .*\)")


def field(row: Row, path: str) -> Any:
    """Find a field by a path such as `memory.total_bytes` or `ppl_by_stretch.0`; `None` where it is missing."""
    found: Any = row
    for key in path.split("."):
        is_list = isinstance(found, list | tuple)
        found = found[int(key)] if is_list else found.get(key) if isinstance(found, Mapping) else None
    return found


def any_has(path: str) -> Callable[[Rows], bool]:
    """Show a column if any row has a value in a field."""
    return lambda rows: any(field(row, path) for row in rows)


def varies(path: str) -> Callable[[Rows], bool]:
    """Show a column if rows differ in a field."""
    return lambda rows: len({str(field(row, path)) for row in rows}) > 1


class Column(NamedTuple):
    """Column: its heading, formatted with fields of the first row, the function of a cell, and a test of the rows."""

    head: str
    show: Callable[[Row], str]
    when: Callable[[Rows], bool] = bool


def name(head: str, path: str = "", when: Callable[[Rows], bool] = bool) -> Column:
    """Make a column of words."""
    return number(head, path or head, "", when=when)


def code(head: str = "cache", path: str = "cache", when: Callable[[Rows], bool] = bool) -> Column:
    """Make a column of names in backticks; terminals show them without."""
    return Column(head, lambda row: f"`{field(row, path)}`", when)


def number(
    head: str,
    path: str,
    form: str = ".1f",
    scale: float = 1,
    *,
    of: str = "",
    missing: str = "-",
    suffix: str = "",
    when: Callable[[Rows], bool] = bool,
) -> Column:
    """Make a column of numbers times a scale; with `of`, as shares of that field."""

    def show(row: Row) -> str:
        found, whole = field(row, path), field(row, of) if of else 1
        if found is None or not whole:
            return missing
        return f"{found if scale == whole == 1 else scale * found / whole:{form}}{suffix}"

    return Column(head, show, when)


def speed_up(over: str, path: str, missing: str = "-") -> Column:
    """Make a column of speed-ups over the cache that `over` names."""
    return number(f"speed-up over {over} (greater is better)", path, ".2f", missing=missing)


def quartiles(head: str, scale: float = 1e3) -> Column:
    """Make a column of medians with their quartiles, of seconds times a scale."""

    def show(row: Row) -> str:
        lower, median, upper = (scale * row[key] for key in QUARTILES)
        return f"{median:.2f} ({lower:.2f} to {upper:.2f})"

    return Column(head, show)


def interval(scale: float = 1e3) -> Column:
    """Make a column of intervals in which medians lie, of seconds times a scale."""

    def show(row: Row) -> str:
        if any(key not in row for key in INTERVAL):
            return "-"
        lower, upper = (scale * row[key] for key in INTERVAL)
        return f"{lower:.2f} to {upper:.2f}"

    return Column("95 % interval of the median", show, any_has(INTERVAL[0]))


def table(*columns: Column) -> Callable[[Rows], str]:
    """Make a function that renders rows as Markdown, a line for each."""

    def render(rows: Rows) -> str:
        shown = [column for column in columns if column.when(rows)]
        heads = [column.head.format_map(rows[0]) for column in shown]
        lines = [heads, ["---"] * len(heads), *([column.show(row) for column in shown] for row in rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return render


def print_markdown(text: str, title: str = "") -> None:
    """
    Print Markdown in a terminal, its tables by rich. If a table is too wide, headings are folded, then quartiles are
    left out, and then columns are split into several tables with the names on the left of each.
    """
    console = open_console()
    for number, (is_table, lines) in enumerate(groupby(text.splitlines(), key=lambda line: line.startswith("| "))):
        if is_table and number and not title:
            console.print()
        if not is_table:
            for line in filter(None, lines):
                print_line(line.replace("`", ""))
            continue
        heads, _, *rows = ([cell.strip(" `*").replace("`", "") for cell in line[2:-2].split(" | ")] for line in lines)
        sides = list(zip(*rows, strict=True))
        kinds = ["number" if all(_NUMBER.match(cell) for cell in cells) else "name" for cells in sides]
        room, words = console.width - 2, ["\n".join(head.split()) for head in heads]
        if sum(_widths(heads, sides, kinds)) > room:
            if sum(_widths(words, sides, kinds)) > room:
                sides = [tuple(_QUARTILES.sub("", cell) for cell in cells) for cells in sides]
            folded = zip(heads, _widths(words, sides, kinds), strict=True)
            heads = ["\n".join(textwrap.wrap(head, width - 2)) for head, width in folded]
        # Columns that identify a line: all up to the first names, at most three of them
        own = kinds.index("name") + 1 if "name" in kinds else 1
        own += next((at for at, kind in enumerate(kinds[own : own + 2]) if kind != "name"), 2)
        widths, shown = _widths(heads, sides, kinds), list(range(len(heads)))
        while shown:
            count = len(shown)
            while count > own + 1 and sum(widths[at] for at in shown[:count]) > room:
                count -= 1
            columns = {heads[at]: kinds[at] for at in shown[:count]}
            console.print(make_table(title, columns, list(zip(*(sides[at] for at in shown[:count]), strict=True))))
            shown, title = ([*range(own), *shown[count:]] if shown[count:] else []), ""


def _widths(heads: Sequence[str], sides: Sequence[Sequence[str]], kinds: Sequence[str]) -> list[int]:
    """Measure columns, whose heads may have several lines, with their separators."""
    least = [1 if kind == "number" else MIN_NAME_WIDTH for kind in kinds]
    columns = zip(heads, sides, least, strict=True)
    return [max(own, *map(len, (*head.splitlines(), *cells))) + 2 for head, cells, own in columns]


# Fidelity


def standard_error_of_kl(row: Row) -> float:
    """Compute the standard error of the mean KL of windows."""
    return float(row["kl_spread"]) / math.sqrt(len(row["windows"]))


def _kl(row: Row) -> str:
    has_error = len(row.get("windows", ())) > 1
    return f"{row['kl']:.4f}" + (f" ± {standard_error_of_kl(row):.4f}" if has_error else "")


def _fetched_bytes(row: Row) -> str:
    """Show bytes fetched in all steps, in percent of those that offloading whole layers at 16 bits would move."""
    fetched, windows = row["stats"].get("bytes_fetched"), row.get("windows")
    if not fetched or not windows:
        return "-"
    held = [row[name] for name in ("memory_after_prefix", "memory_at_end")]
    dense = [100 * memory["total_bytes"] / memory["kv_percent"] for memory in held]
    # Counters are those of the last window, whose tokens came one by one
    return f"{100 * fetched / (windows[-1]['num_scored'] * sum(dense) / 2):.2f}"


def _percent_with_shared(row: Row) -> str:
    memory = row["memory_after_prefix"]
    return f"{memory.get('kv_percent_with_shared', memory['kv_percent']):.1f}"


_FETCHES = any_has("stats.tokens_fetchable")
FETCHED = number("% of tokens fetched", "stats.tokens_fetched", scale=100, of="stats.tokens_fetchable", when=_FETCHES)
FIDELITY = table(
    code(),
    number("MB", "memory_after_prefix.total_bytes", ".2f", 1e-6),
    number("% of 16 bits", "memory_after_prefix.kv_percent"),
    number("% while decoding", "mean_kv_percent", when=any_has("mean_kv_percent")),
    Column("% with what all caches share", _percent_with_shared, any_has("memory_after_prefix.shared")),
    number("PPL / dense", "ppl_ratio", ".3f"),
    Column("KL to dense", _kl),
    number("KL, median", "kl_median", ".4f", when=any_has("kl_median")),
    number("99.9th percentile", "kl_p999", ".3f", when=any_has("kl_p999")),
    Column(
        "KL by stretches",
        lambda row: ", ".join(f"{kl:.4f}" for kl in row["kl_by_stretch"]),
        any_has("kl_by_stretch"),
    ),
    number("last / first quarter", "kl_last_to_first_quarter", ".2f", when=any_has("kl_by_stretch")),
    number("KL a 1000 tokens deeper", "kl_per_1000_tokens", "+.4f", when=any_has("kl_by_stretch")),
    *(
        number(
            f"norm of {age} {side}s / dense",
            f"{side}_norm_by_stretch.{index}",
            ".3f",
            when=any_has(f"{side}_norm_by_stretch"),
        )
        for side in ("key", "value")
        for age, index in (("oldest", 0), ("newest", -1))
    ),
    number("same top token", "top1_agreement", ".1f", 100, suffix=" %"),
    FETCHED,
    Column(
        "% of bytes, whole layers at 16 bits",
        _fetched_bytes,
        lambda rows: _FETCHES(rows) and all("memory_at_end" in row for row in rows),
    ),
)


HELD = (
    number("MB", "memory_at_end.total_bytes", ".2f", 1e-6, when=any_has("memory_at_end.total_bytes")),
    number("% of 16 bits", "memory_at_end.kv_percent", when=any_has("memory_at_end.kv_percent")),
)


def render_memory(rows: Rows) -> str:
    """Render bytes held and allocated, and below them what a dense layer has."""
    columns = (
        number("held, MB", "cache_bytes", ".1f", 1e-6),
        number("% of 16 bits", "kv_percent"),
        number("allocated by a decode step, MB", "decode_step_peak_bytes", ".1f", 1e-6),
        number("process peak, MB", "rss_peak", ".1f", 1e-6),
    )
    dense = f"Keys and values of one layer, dense: {rows[0]['dense_layer_bytes'] / 1e6:.1f} MB."
    return f"{table(code(), *columns)(rows)}\n{dense}\n"


def render_perplexity(rows: Rows) -> str:
    """Render perplexities, a column for each stretch."""
    stops = enumerate(stretch_stops(rows[0]["stretch"], rows[0]["num_scored"]))
    columns = [number(f"to {stop}", f"ppl_by_stretch.{index}", ".2f") for index, stop in stops]
    return table(code(), *HELD, number("PPL", "ppl", ".3f"), *columns)(rows)


def render_context(rows: Rows) -> str:
    """Render tasks that need much of their context: a table for each measure, a column for each task."""
    fetched = (
        number("MB fetched a step", "fetched_bytes", ".2f", 1e-6),
        number("% of bytes, whole layers at 16 bits", "fetched_share", ".2f", 100),
    )
    tables = []
    for title, key, form, scale, own in (
        ("NLL of a token of the right answer, nats", "nll", ".3f", 1, (*HELD, *fetched)),
        ("KL to `dynamic`", "kl", ".4f", 1, (number("mean", "kl", ".4f"),)),
        ("Tokens right, %", "right", ".0f", 100, ()),
        ("Whole lines right, %", "lines", ".0f", 100, ()),
    ):
        # Results of before lines were counted
        if not any(key in each for each in rows[0]["tasks"].values()):
            continue
        columns = (number(task, f"tasks.{task}.{key}", form, scale) for task in rows[0]["tasks"])
        tables.append(f"{title}:\n\n{table(code(), *own, *columns)(rows)}")
    sizes = ", ".join(f"{task} {each['num_scored']:.0f}" for task, each in rows[0]["tasks"].items())
    return "\n".join([*tables, f"Tokens scored: {sizes}.\n"])


def render_task(rows: Rows) -> str:
    """Render metrics of a task of lm-eval, each with its difference from the dense cache's."""
    reference = next((row for row in rows if row["cache"] == REFERENCE), None)

    def score(metric: str, row: Row) -> str:
        error = row["standard_errors"].get(metric)
        return f"{row['metrics'][metric]:.3f}" + (f" ± {error:.3f}" if isinstance(error, (int, float)) else "")

    columns = [number("MB at most", "memory_at_end.total_bytes", ".2f", 1e-6), HELD[1]]
    for metric in rows[0]["metrics"]:
        columns.append(Column(metric.removesuffix(",none"), partial(score, metric)))
        columns.append(Column("less `dynamic`", partial(_difference, metric, reference)))
    return table(code(), *columns)(rows)


def _difference(metric: str, reference: Row | None, row: Row) -> str:
    """Show the difference from the dense cache, item by item: its error is far below that of either score."""
    if reference is None or row is reference:
        return "-"
    ours, theirs = (each["by_item"].get(metric) for each in (row, reference))
    if not ours or not theirs or len(ours) != len(theirs):
        return f"{row['metrics'][metric] - reference['metrics'][metric]:+.3f}"
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return f"{statistics.mean(differences):+.3f} ± {error:.3f}"


_STATUSES = ("works", "works, dense reads", "refuses", "FAILS")


def render_families(rows: Rows) -> str:
    """Render counts of outcomes, a line for each family, and reasons of refusals, failures and families not tried."""
    tried = [row for row in rows if not row["dense"]]
    holds = {cache: outcome["holds"] for row in tried for cache, outcome in row["outcomes"].items()}
    counts = [
        {"cache": each, "holds": held, **Counter(row["outcomes"][each]["status"] for row in tried)}
        for each, held in holds.items()
    ]
    summary = table(code(), name("holds"), *(number(status, status, "", missing="0") for status in _STATUSES))
    columns = (Column(f"`{each}`: {held}", partial(_status, each)) for each, held in holds.items())
    lines = table(code("family", "family"), *columns)
    reasons = defaultdict(list)
    for row in tried:
        for cache, outcome in row["outcomes"].items():
            if outcome["detail"]:
                reasons[cache, outcome["status"], _one_line(outcome["detail"])].append(f"`{row['family']}`")
    why = [f"- `{cache}` {verb} {', '.join(where)}: {detail}\n" for (cache, verb, detail), where in reasons.items()]
    untried = [f"- `{row['family']}`: {_one_line(row['dense'])}\n" for row in rows if row["dense"]]
    heading = f"Of {len(rows)} families `DynamicCache` runs {len(tried)}; of those:\n"
    parts = [heading, summary(counts), lines(tried)] if tried else [heading]
    for title, listed in (("Why:", why), ("Not tried, as `DynamicCache` does not run a tiny one:", untried)):
        if listed:
            parts.append(f"{title}\n\n{''.join(listed)}")
    return "\n".join(parts)


def _status(cache: str, row: Row) -> str:
    return str(row["outcomes"][cache]["status"])


def _one_line(text: str) -> str:
    return textwrap.shorten(text, 400, placeholder=" ...").replace("|", "\\|").replace("<", "&lt;")


# Functions of one row, by the kind of the result

_READ = {"prompt": "at once", "chunks": "in chunks of {chunk}", "behind": "behind {context} tokens"}
CONTEXT = number("context", "context", "")

RENDERERS: dict[str, Callable[[Rows], str]] = {
    "fidelity": lambda rows: FIDELITY(sorted(rows, key=lambda row: row["memory_after_prefix"]["total_bytes"])),
    "order": table(
        code(),
        code("read", "order"),
        *HELD,
        number("KL", "kl", ".4f"),
        number("KL / that of `prompt`", "kl_ratio", ".2f"),
    ),
    "repetition": table(
        code(),
        *HELD,
        number("% of 4-grams distinct", "mean_distinct", scale=100),
        number("in the most repetitive text", "least_distinct", scale=100),
        number("tokens of a text, median", "median_length", ".0f"),
        number("texts that ended", "ended", ""),
    ),
    "perplexity": render_perplexity,
    "retrieval": table(
        code(),
        *HELD,
        Column("answers right", lambda row: "{accuracy:.3f} ± {standard_error:.3f}".format_map(row)),
        number("answers' tokens right", "token_accuracy", ".3f"),
        FETCHED,
    ),
    "overview": table(
        code(),
        name("what it is", "what"),
        number("% of 16 bits", "kv_percent"),
        number("KL", "kl", ".4f"),
        speed_up("`dynamic`", "speed_against_dynamic"),
    ),
    "families": render_families,
    "context": render_context,
    "task": render_task,
    "step": table(
        name("shape", when=varies("shape")),
        name("dtype", when=varies("dtype")),
        number("batch", "batch_size", "", when=varies("batch_size")),
        number("threads", "num_threads", "", when=varies("num_threads")),
        CONTEXT,
        code(),
        number("MB", "bytes", ".1f", 1e-6),
        quartiles("ms a token (quartiles)"),
        interval(),
        speed_up("`{cache}`", "speed_against_first"),
    ),
    "kernels": table(
        name("attention over", "name"),
        number("MB read", "bytes", ".1f", 1e-6),
        quartiles("ms (quartiles)"),
        interval(),
        number("% of copy bandwidth", "share_of_copy_bandwidth", ".0f", 100),
        speed_up("dense", "speed_against_dense"),
    ),
    "memory": render_memory,
    "prompts": table(
        number("tokens", "new_tokens", ""),
        Column("read", lambda row: _READ[row["what"]].format_map(row)),
        code(),
        quartiles("s (quartiles)", 1),
        number("time / `{cache}`'s (less is better)", "time_against_first", ".2f"),
        number("% coding", "coding_share", ".1f", 100),
        number("error of logits", "relative_error", ".1e"),
    ),
    "machine-code": table(
        code(),
        name("kernel"),
        number("head dim", "head_dim", ""),
        number("query heads", "query_heads", "d"),
        number("warp instructions a number", "instructions_a_number", ".3f"),
        number("bits a number", "bits_a_number", ".2f"),
        number("registers", "registers", ""),
        number("bytes spilled", "spilled", ""),
        number("shared memory", "shared", ""),
        number("% of copy bandwidth, bound", "share_of_copy_bandwidth", ".0f", 100),
        speed_up("dense, at most", "times_dense"),
    ),
    "offloading": table(
        CONTEXT,
        code(),
        quartiles("ms a token (quartiles)"),
        interval(),
        number("tokens/s", "tokens_per_s"),
        speed_up("`offloaded`", "speed_against_offloaded", missing=""),
        number("time / that with all resident (less is better)", "time_against_resident", ".2f", missing=""),
        Column(
            "transfers hidden",
            lambda row: f"{100 * row['hidden_share']:.0f} %" if "time_against_resident" in row else "",
        ),
        number("MB a token, counted", "counted.bytes_per_token", ".1f", 1e-6, missing=""),
        number(
            "of full offloading's, counted",
            "counted.bytes_per_token",
            scale=100,
            of="counted.full_offloading_bytes_per_token",
            missing="",
            suffix=" %",
        ),
    ),
    "batch": table(
        code(),
        number("largest batch", "largest_batch", ""),
        number("tokens/s", "tokens_per_s", ".0f"),
        speed_up("the first", "throughput_against_first"),
        number("MB a sequence", "bytes_per_sequence", ".1f", 1e-6),
        number("peak, GiB", "peak_bytes", ".2f", 2**-30),
    ),
    "runahead": table(
        number("tokens", "length", ""),
        name("way", "method"),
        Column("slices", lambda row: " + ".join(map(str, row["lengths"]))),
        quartiles("seconds to the first token (quartiles)", 1),
        speed_up("one rank", "speed_against_one_rank"),
        number("MB sent", "bytes_sent", ".1f", 1e-6),
        number("predicted, s", "predicted_s", ".2f", when=any_has("predicted_s")),
    ),
}


# Sweeps


def read_sweep(folder: Path) -> list[Row]:
    """Read the results of a folder, the dense cache's first, then by falling size; a `ValueError` if it has none."""
    contents = [read_result(path) for path in sorted(folder.glob("*.json"))]
    contents = [each for each in contents if each.get("benchmark") == "sweep"]
    if not contents:
        raise ValueError(f"`folder`: there is no result of a sweep in {folder}")

    def order(content: Row) -> tuple[bool, int]:
        return content["settings"]["cache"] != REFERENCE, -(field(content, "memory.total_bytes") or 0)

    return sorted(contents, key=order)


def render_sweep(folder: Path) -> str:
    """Render a table for each measure and model, each with its settings."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for content in read_sweep(folder):
        groups[content["settings"]["name"], content["settings"]["model"]].append(content)
    parts = []
    for (measure, model), contents in sorted(groups.items()):
        settings = contents[0]["settings"]
        minutes = sum(each["seconds"] for each in contents) / 60
        commits = ", ".join(sorted({str(each["commit"]) for each in contents}))
        command = f"kvcache-plugins eval sweep {folder.name}.yaml --only '{measure}/{model}/*'"
        source = (
            f"{_listed(settings['options'])}. `{command}`: {minutes:.0f} min, commit {commits}, "
            f"{contents[0]['date'][:10]}, {contents[0]['device']}; {_listed(contents[0]['versions'])}."
        )
        rows = [
            {"cache": each["settings"]["cache"], "memory_at_end": each["memory"], **each["result"]}
            for each in contents
        ]
        parts.append(f"**{measure}**, {model}\n\n{RENDERERS[settings['kind']](rows)}\n{fold(source)}")
    return "\n".join(parts)


def fold(source: str) -> str:
    """Fold the settings of a measurement; the attribute makes the site render them as Markdown."""
    return f'<details markdown="1"><summary>How it was measured</summary>\n\n{source}\n\n</details>\n'


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in fields.items())


# Documents


def render(text: str, results: Path) -> str:
    """Render every marked table of a text again. Raise a `ValueError` if a result file is missing."""
    return _MARKED.sub(lambda match: f"{match[1]}{render_result(results, match['name'])}{match[4]}", text)


def render_result(results: Path, name: str) -> str:
    """Render one result as a Markdown table, with its settings."""
    markdown, data = results / f"{name}.md", results / f"{name}.json"
    if (results / name).is_dir():
        return render_sweep(results / name)
    if markdown.is_file():
        return markdown.read_text(encoding="utf-8")
    if not data.is_file():
        raise ValueError(f"there is no {name}.json or {name}.md in {results}")
    content = read_result(data)
    kind = content.get("benchmark", "fidelity")
    if kind not in RENDERERS:
        raise ValueError(f"{data} is a result of `{kind}`, which has no table; tables are for {', '.join(RENDERERS)}")
    failures = "".join(f"\nNo row: {each['what']} ({each['reason']}).\n" for each in content.get("failures", []))
    settings = {key: value for key, value in content["settings"].items() if value is not None}
    origin = f"commit {content['commit']}, {content['date'][:10]}, {content['device']}"
    source = f"`{data.name}`: {origin}; {_listed(content['versions'])}; {_listed(settings)}."
    return f"{RENDERERS[kind](content['rows'])}{failures}\n{fold(source)}"


def main(files: Annotated[list[Path], typer.Argument(help="Markdown files whose tables to render.")]) -> None:
    """Render the marked tables of Markdown files in place, from eval/results."""
    for file in files:
        file.write_text(render(file.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        typer.echo(f"rendered {file}")


if __name__ == "__main__":
    typer.run(main)
