"""HTML of a cache or of a memory report for notebooks: a stacked bar of its parts, ratios and counters.

Plain elements with inline styles: no script, no style sheet and no file besides, so that it survives the cleaning that
viewers of notebooks do, and where styles are taken away the table still says everything. Text has the colour of the
page and nothing has a background but the bar, so that it can be read on light and on dark ones. Colours are those of
Okabe and Ito, which colour-blind people tell apart; a part has the same colour in every report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .memory import MemoryReport


# Neither black nor white: one of them would be lost on every page
_PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#8C564B", "#7F7F7F")
_BLUE, _SKY, _GREEN, _VERMILION, _PURPLE, _ORANGE, _BROWN, _GREY = _PALETTE
# No two that one cache has are alike
_COLOURS = {
    "codes": _BLUE,
    "quantized": _BLUE,
    "kept": _BLUE,
    "pool": _BLUE,
    "scales": _SKY,
    "low_rank": _GREEN,
    "scoring": _GREEN,
    "outliers": _VERMILION,
    "correction": _VERMILION,
    "residual": _PURPLE,
    "dense": _ORANGE,
    "index": _BROWN,
    "spare": _GREY,
}
# Pages give tables a colour and a font of their own
_TABLE = "color:inherit;font:inherit;background:transparent;border:none;margin:0"
_CELL = "padding:0 1em 0 0;background:transparent;border:none"


def render_memory(
    title: str, report: MemoryReport, counters: Mapping[str, float | str | Mapping[str, float]] | None = None
) -> str:
    """
    HTML of what a cache holds, well-formed as XML too.

    Args:
        title (`str`): What it is of. All names are escaped.
        report (`MemoryReport`): Bytes; parts that hold nothing are left out.
        counters (`Mapping`, *optional*): What the cache did, and how it was chosen.
    """
    held = {part: num_bytes for part, num_bytes in report.parts.items() if num_bytes}
    lines = [f"<b>{escape(title)}</b>: holds nothing yet"]
    if held:
        total = report.total_bytes
        lines = [
            f"<b>{escape(title)}</b>: {total / 1e6:.2f} MB, {report.kv_percent:.1f} % of a cache at 16 bits a value; "
            f"dense {report.dense_bytes / 1e6:.2f} MB, {report.compression_ratio:.2f} times as much",
            _bar(held, total),
            _table(held, total),
        ]
        lines.append(_pairs("devices", {name: f"{size / 1e6:.2f} MB" for name, size in report.devices.items()}))
    if report.shared:
        shared = {name: f"{size / 1e6:.2f} MB" for name, size in report.shared.items()}
        lines.append(_pairs("shared by all caches", shared))
    if counters:
        lines.append(_pairs("counters", {name: _shown(value) for name, value in counters.items()}))
    blocks = "\n".join(f"<div>{line}</div>" for line in lines)
    return f'<div style="color:currentColor;max-width:48em">\n{blocks}\n</div>'


def _bar(held: Mapping[str, int], total: int) -> str:
    segments = "".join(
        f'<div title="{escape(part)}" style="width:{100 * num_bytes / total:.4f}%;height:1.2em;'
        f'background-color:{colour}"></div>'
        for part, num_bytes, colour in _coloured(held)
    )
    return f'<div style="display:flex;width:100%;margin:0.4em 0">{segments}</div>'


def _table(held: Mapping[str, int], total: int) -> str:
    rows = "".join(
        f'<tr style="background:transparent"><td style="{_CELL};text-align:left"><span style="display:inline-block;'
        f'width:0.8em;height:0.8em;background-color:{colour}"></span> {escape(part)}</td>'
        f'<td style="{_CELL};text-align:right">{num_bytes:,} bytes</td>'
        f'<td style="{_CELL};text-align:right">{100 * num_bytes / total:.1f} %</td></tr>'
        for part, num_bytes, colour in _coloured(held)
    )
    return f'<table style="{_TABLE}">{rows}</table>'


def _coloured(held: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """Parts with bytes and colour, the known ones first and in their order."""
    known = [part for part in _COLOURS if part in held]
    free = [colour for colour in _PALETTE if colour not in {_COLOURS[part] for part in known}] or list(_PALETTE)
    others = zip(sorted(held.keys() - _COLOURS.keys()), cycle(free), strict=False)
    for part, colour in [*((part, _COLOURS[part]) for part in known), *others]:
        yield part, held[part], colour


def _pairs(name: str, values: Mapping[str, str]) -> str:
    shown = ", ".join(f"{escape(key)}&#160;{escape(value)}" for key, value in values.items())
    return f"<small>{name}: {shown}</small>"


def _shown(value: float | str | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_shown(each)}' for key, each in value.items())})"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
