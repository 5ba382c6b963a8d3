"""Tables of a sweep, from the JSON files that it has left in a folder.

`kvcache-plugins eval report FOLDER` prints them; `tables.py` puts the same ones into the docs.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvcache_plugins.eval.harness.caches import REFERENCE
from kvcache_plugins.eval.harness.windows import stretch_stops

from .markdown import make_markdown_table, render_fidelity


Content = Mapping[str, Any]


def read_sweep(folder: Path) -> list[Content]:
    """The results of a folder, the largest cache first; the dense one before all. None at all is a `ValueError`."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    contents = [each for each in contents if each.get("benchmark") == "sweep"]
    if not contents:
        raise ValueError(f"`folder`: there is no result of a sweep in {folder}")
    return sorted(contents, key=lambda each: (each["settings"]["cache"] != REFERENCE, -_held(each)))


def _held(content: Content) -> int:
    return int(content["memory"]["total_bytes"]) if content["memory"] else 0


def render_sweep(folder: Path) -> str:
    """Markdown: a table for each measure and model, each with what it was made of."""
    groups: dict[tuple[str, str], list[Content]] = defaultdict(list)
    for content in read_sweep(folder):
        settings = content["settings"]
        groups[settings["name"], settings["model"]].append(content)
    parts = []
    for (name, model), contents in sorted(groups.items()):
        kind = contents[0]["settings"]["kind"]
        options = ", ".join(f"{key} {value}" for key, value in contents[0]["settings"]["options"].items())
        minutes = sum(each["seconds"] for each in contents) / 60
        versions = ", ".join(f"{package} {version}" for package, version in contents[0]["versions"].items())
        commits = ", ".join(sorted({str(each["commit"]) for each in contents}))
        source = (
            f"{options}. `kvcache-plugins eval sweep {folder.name}.yaml --only '{name}/{model}/*'`: "
            f"{minutes:.0f} min, commit {commits}, {contents[0]['date'][:10]}, {contents[0]['device']}; {versions}."
        )
        parts.append(f"**{name}**, {model}\n\n{_RENDERERS[kind](contents)}\n{source}\n")
    return "\n".join(parts)


def _megabytes(content: Content) -> list[str]:
    memory = content["memory"]
    return [f"{memory['total_bytes'] / 1e6:.2f}", f"{memory['kv_percent']:.1f}"] if memory else ["-", "-"]


def _render_task(contents: Sequence[Content]) -> str:
    metrics = list(contents[0]["result"]["metrics"])
    head = ["cache", "MB at most", "% of 16 bits"]
    for metric in metrics:
        head += [metric.removesuffix(",none"), "less `dynamic`"]
    reference = next((each for each in contents if each["settings"]["cache"] == REFERENCE), None)
    rows = []
    for content in contents:
        row = [f"`{content['settings']['cache']}`", *_megabytes(content)]
        for metric in metrics:
            error = content["result"]["standard_errors"].get(metric)
            shown = f" ± {error:.3f}" if isinstance(error, (int, float)) else ""
            row += [f"{content['result']['metrics'][metric]:.3f}{shown}", _difference(content, reference, metric)]
        rows.append(row)
    return make_markdown_table(head, rows)


def _difference(content: Content, reference: Content | None, metric: str) -> str:
    """From the dense cache, item by item: its standard error is far below that of either score."""
    if reference is None or content is reference:
        return "-"
    ours, theirs = (each["result"]["by_item"].get(metric) for each in (content, reference))
    if not ours or not theirs or len(ours) != len(theirs):
        return f"{content['result']['metrics'][metric] - reference['result']['metrics'][metric]:+.3f}"
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0
    return f"{statistics.mean(differences):+.3f} ± {error:.3f}"


def _render_fidelity(contents: Sequence[Content]) -> str:
    return render_fidelity([each["result"] for each in contents])


def _render_perplexity(contents: Sequence[Content]) -> str:
    first = contents[0]["result"]
    stops = stretch_stops(first["stretch"], first["num_scored"])
    head = ["cache", "MB", "% of 16 bits", "PPL", *(f"to {stop}" for stop in stops)]
    rows = [
        [
            f"`{each['settings']['cache']}`",
            *_megabytes(each),
            f"{each['result']['ppl']:.3f}",
            *(f"{ppl:.2f}" for ppl in each["result"]["ppl_by_stretch"]),
        ]
        for each in contents
    ]
    return make_markdown_table(head, rows)


def _render_retrieval(contents: Sequence[Content]) -> str:
    head = ["cache", "MB", "% of 16 bits", "answers right", "answers' tokens right"]
    rows = [
        [
            f"`{each['settings']['cache']}`",
            *_megabytes(each),
            f"{each['result']['accuracy']:.3f} ± {each['result']['standard_error']:.3f}",
            f"{each['result']['token_accuracy']:.3f}",
        ]
        for each in contents
    ]
    return make_markdown_table(head, rows)


_RENDERERS: dict[str, Callable[[Sequence[Content]], str]] = {
    "task": _render_task,
    "fidelity": _render_fidelity,
    "perplexity": _render_perplexity,
    "retrieval": _render_retrieval,
}
