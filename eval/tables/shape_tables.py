"""Markdown tables of `bench shapes`: speeds against dense, a line for each kind of model, a column a context."""

from collections.abc import Mapping, Sequence
from typing import Any

from .markdown import make_markdown_table


# A step that takes at most so many times the first cache's is not called slower
_TOLERANCE = 1.02
_KINDS = ("shape", "dtype", "batch_size", "num_threads")
_PARTS = {"step": "whole steps", "attention": "attention alone"}


def render_shapes(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = {part: [row for row in rows if row["part"] == part] for part in _PARTS}
    return "\n".join(_render_part(part, own) for part, own in parts.items() if own)


def _render_part(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    contexts = sorted({row["context"] for row in rows})
    first = _first_cache(rows[0])
    others = list(dict.fromkeys(row["cache"] for row in rows if row["cache"] != _first_cache(row)))
    by_place: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        name = first if row["cache"] == _first_cache(row) else row["cache"]
        by_place.setdefault((*(row[key] for key in _KINDS), row["context"]), {})[name] = row
    kinds = list(dict.fromkeys(place[:-1] for place in by_place))
    cells = [
        [*map(str, kind), *(_render_place(by_place.get((*kind, context)), first, others) for context in contexts)]
        for kind in kinds
    ]
    head = ("heads", "dtype", "batch", "threads", *(f"{context} tokens" for context in contexts))
    names = " / ".join(f"`{name}`" for name in others)
    title = f"Of {_PARTS[part]}: milliseconds of {first}, and how many times as fast {names} are.\n"
    return f"{title}\n{make_markdown_table(head, cells)}\n{_count_slower(rows, others)}\n"


def _first_cache(row: Mapping[str, Any]) -> str:
    return f"dense {row['dtype']}" if row["part"] == "attention" else "dynamic"


def _render_place(place: Mapping[str, Mapping[str, Any]] | None, first: str, others: Sequence[str]) -> str:
    if place is None:
        return "-"
    speeds = [place[name]["speed_against_first"] for name in others]
    shown = (f"**{speed:.2f}**" if speed < 1 / _TOLERANCE else f"{speed:.2f}" for speed in speeds)
    return f"{1e3 * place[first]['median_s']:.2f}: {' / '.join(shown)}"


def _count_slower(rows: Sequence[Mapping[str, Any]], others: Sequence[str]) -> str:
    parts = []
    for name in others:
        own = [row["speed_against_first"] for row in rows if row["cache"] == name]
        slower = sum(speed < 1 / _TOLERANCE for speed in own)
        parts.append(f"`{name}` in {slower} of {len(own)}, at worst {min(own):.2f} times as fast")
    return f"Slower than {_TOLERANCE} times the time: {'; '.join(parts)}."
