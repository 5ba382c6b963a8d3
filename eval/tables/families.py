"""Markdown table of a survey of decoder families."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .markdown import make_markdown_table


_STATUSES = ("works", "reads dense", "refuses", "fails")
_CELLS = {"works": "works", "reads dense": "reads dense", "refuses": "refuses", "fails": "FAILS"}


def render_families(rows: Sequence[Mapping[str, Any]]) -> str:
    """Counts what families do, and lists them with reasons: of refusals, failures and families not tried."""
    tried = [row for row in rows if not row["dense"]]
    caches = list(dict.fromkeys(name for row in tried for name in row["outcomes"]))
    counts = {name: Counter(row["outcomes"][name]["status"] for row in tried) for name in caches}
    summary = [[f"`{name}`", *(str(counts[name][status]) for status in _STATUSES)] for name in caches]
    lines = [[f"`{row['family']}`", *(_CELLS[row["outcomes"][name]["status"]] for name in caches)] for row in tried]
    parts = [
        f"Of {len(rows)} families `DynamicCache` runs {len(tried)}; of those:\n",
        make_markdown_table(["cache", *_STATUSES], summary),
        make_markdown_table(["family", *(f"`{name}`" for name in caches)], lines),
        *_reasons(tried),
    ]
    untried = [f"- `{row['family']}`: {_one_line(row['dense'])}\n" for row in rows if row["dense"]]
    if untried:
        parts.append("Not tried, as `DynamicCache` does not run a tiny one:\n\n" + "".join(untried))
    return "\n".join(parts)


def _reasons(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each reason once, with the families that it was given for."""
    families: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, outcome in row["outcomes"].items():
            if outcome["status"] in ("refuses", "fails"):
                key = name, _CELLS[outcome["status"]], _one_line(outcome["detail"])
                families.setdefault(key, []).append(f"`{row['family']}`")
    lines = [
        f"- `{name}` {status} {', '.join(where)}: {detail}\n" for (name, status, detail), where in families.items()
    ]
    return ["Why:\n\n" + "".join(lines)] if lines else []


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
