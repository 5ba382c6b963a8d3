"""Figures: accuracy against bytes held, perplexity against position, time against context.

Colours are those of Okabe and Ito, which colour-blind people tell apart; every line also has a marker of its own.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from .harness import QUARTILES, REFERENCE, stretch_stops
from .tables import standard_error_of_kl


_COLOURS = (
    *("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"),
    *("#E69F00", "#56B4E9", "#8C564B", "#7F7F7F", "#882255"),
)
_MARKERS = "osD^vP*Xh<>"
# Between the shortest and the longest context; beyond it both axes are logarithmic
_MOST_ON_A_LINE = 16
_PERCENTS = (2, 3, 5, 7, 10, 15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 400)
_PLAIN = matplotlib.ticker.FormatStrFormatter("%g")
_BITS = re.compile(r"-(\d)bit")
# Bits of keys and of values, and llama.cpp's types: one method, whatever they are
_BITS_OF_SIDES = re.compile(r"-k\dv\d(-g\d+)?|-q\d_\d")
# Percent of 16 bits, of transform coding: without a calibration and with one
_PERCENT_OF_BITS = re.compile(r"(?:(?<=^transform)|(?<=^calibrated))-\d+$")

Content = Mapping[str, Any]


def draw_sweep(contents: Sequence[Content], folder: Path, prefix: str) -> list[Path]:
    """Draw all figures that the results of one sweep allow into a folder, as PNG whose names begin with `prefix`."""
    groups: dict[tuple[str, str, str], list[Content]] = defaultdict(list)
    for content in contents:
        settings = content["settings"]
        groups[settings["kind"], settings["name"], settings["model"]].append(content)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for (kind, name, model), group in sorted(groups.items()):
        title, own = f"{name}, {Path(model).name}", f"{prefix}-{name}-{Path(model).name}"
        drawn = {f"{own}-bytes.png": _draw_against_bytes(group, title)}
        if kind == "perplexity":
            drawn[f"{own}-position.png"] = _draw_against_position(group, title)
        paths += [_save(figure, folder / file) for file, figure in drawn.items()]
    return paths


def _save(figure: Figure, path: Path) -> Path:
    # Without the date of drawing the same results give the same file
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def _new(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(number: int) -> dict[str, Any]:
    return {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)], "markersize": 6}


def _add_legend(axes: Axes) -> None:
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _set_ticks(axes: Axes, ticks: Sequence[int]) -> None:
    """Make the axis of x logarithmic, with plain numbers at ticks alone."""
    axes.set_xscale("log")
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(_PLAIN)
    axes.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def _score(content: Content) -> tuple[str, float, float]:
    """Pick the measure that a result's `content` is judged by: its name, value and standard error."""
    result, kind = content["result"], content["settings"]["kind"]
    if kind == "task":
        metric = next(iter(result["metrics"]))
        error = result["standard_errors"].get(metric)
        return metric.split(",")[0], result["metrics"][metric], error if isinstance(error, (int, float)) else 0.0
    if kind in ("fidelity", "context"):
        return "KL to dense, nats", result["kl"], standard_error_of_kl(result) if kind == "fidelity" else 0.0
    if kind == "perplexity":
        return "perplexity", result["ppl"], 0.0
    return "answers right", result["accuracy"], result["standard_error"]


def _percent_held(content: Content) -> tuple[float, float]:
    """Return percent of 16 bits that a cache holds, and with what all share as if it were of one sequence alone."""
    memory = content["result"].get("memory_after_prefix", content["memory"])
    own = memory["kv_percent"]
    shared = (memory.get("kv_percent_with_shared", own) - own) * (content["settings"].get("batch") or 1)
    # While tokens are decoded, if that was measured; or, as in the table of fidelity, before the scored tokens have
    # filled a buffer by chance
    mean = content["result"].get("mean_kv_percent")
    held = float(own if mean is None else mean)
    return held, held + shared


def _method(cache: str) -> str:
    """The name of a cache without its bits."""
    name, has_options, options = cache.partition(":")
    if _PERCENT_OF_BITS.search(name):
        return _PERCENT_OF_BITS.sub("", name) + has_options + options
    name = _BITS.split(cache)[0]
    return name.partition("-")[0] if name.startswith("llamacpp-") else _BITS_OF_SIDES.sub("-k-v", name)


def _own_name(cache: str) -> str:
    """The part of a name that tells a cache from the others of its method; the whole where it has none."""
    name = cache.partition(":")[0]
    found = _BITS_OF_SIDES.search(name) or _PERCENT_OF_BITS.search(name) or _BITS.search(name)
    return found.group().strip("-") if found else cache


def _draw_against_bytes(group: Sequence[Content], title: str) -> Figure:
    """A method's settings share a colour and a line; hollow marks are those of at most 2 bits."""
    name = _score(group[0])[0]
    figure, axes = _new(title, "bytes held, % of a cache at 16 bits", name)
    # A logarithm shows what 4 bits lose beside what 2 bits do; the dense cache, which loses nothing, has none
    is_logarithmic = name.startswith("KL")
    methods: dict[str, list[tuple[float, float, float, float, str]]] = defaultdict(list)
    for content in group:
        _, value, error = _score(content)
        cache = content["settings"]["cache"]
        if content["memory"] and not (is_logarithmic and value <= 0):
            methods[_method(cache)].append((*_percent_held(content), value, error, cache))
    for number, (method, points) in enumerate(methods.items()):
        style = _style(number)
        colour = style["color"]
        points.sort()
        axes.plot([each[0] for each in points], [each[2] for each in points], color=colour)
        # One name for the method then, and what tells its settings apart beside the marks
        has_line = len(points) > 1
        for percent, with_shared, value, error, cache in points:
            bits = _BITS.search(cache)
            face = "white" if bits and int(bits[1]) <= 2 else colour
            label = cache if not has_line else method if cache == points[0][-1] else None
            axes.errorbar(percent, value, yerr=error, linestyle="", capsize=2, label=label, mfc=face, **style)
            if with_shared > percent:
                # The size that includes what is shared with other caches
                axes.plot([percent, with_shared], [value, value], ":|", color=colour, linewidth=0.8)
            if has_line:
                # They share all but the number of bits. Lines fall to the right: there is room below on the left, and
                # above on the right. A rim of white keeps apart what is close together all the same
                is_below = number % 2 == 0
                place: dict[str, Any] = {"xytext": (-6, -10) if is_below else (6, 4), "fontsize": 7, "color": colour}
                place |= {"ha": "right" if is_below else "left", "textcoords": "offset points", "zorder": 5}
                place["path_effects"] = [withStroke(linewidth=1.5, foreground="white")]
                axes.annotate(_own_name(cache), (percent, value), **place)
    lowest, highest = axes.get_xlim()
    if highest > 2 * lowest > 0:
        axes.set_xscale("log")
        lowest, highest = axes.get_xlim()
        _set_ticks(axes, [tick for tick in _PERCENTS if lowest <= tick <= highest])
    if is_logarithmic:
        axes.set_yscale("log")
    _add_legend(axes)
    return figure


def _draw_against_position(group: Sequence[Content], title: str) -> Figure:
    """Draw perplexity against position, divided by the dense cache's if there is one: texts differ in difficulty."""
    dense = [each["result"]["ppl_by_stretch"] for each in group if each["settings"]["cache"] == REFERENCE]
    figure, axes = _new(title, "position, tokens", f"perplexity{' / dense' if dense else ''}, by stretch")
    for number, content in enumerate(group):
        result = content["result"]
        ratios = np.divide(result["ppl_by_stretch"], dense[0] if dense else 1.0)
        stops = stretch_stops(result["stretch"], result["num_scored"])
        axes.plot(stops, ratios, label=content["settings"]["cache"], **_style(number))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.yaxis.set_minor_formatter(_PLAIN)
    _add_legend(axes)
    return figure


def draw_result(content: Content, path: Path) -> Path:
    """Draw a result of `bench step` or `eval fidelity` as PNG, its folder made; any other is a `ValueError`."""
    # The second was measured beside llama.cpp, by a command that there was
    if content.get("benchmark") in ("step", "llama-cpp"):
        figure = _draw_steps(content)
    elif content["rows"] and "kl_spread" in content["rows"][0]:
        figure = _draw_fidelity(content)
    else:
        raise ValueError(
            "`figures` can be drawn of a sweep's folder and of a result of `bench step` or `eval fidelity` only"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path)


def _draw_fidelity(content: Content) -> Figure:
    settings = content["settings"]
    title = f"{settings['text_file']}, {settings['model']}, {settings['scored']} tokens after {settings['prefix']}"
    if settings["chunk"] is not None:
        title += f", {settings['chunk']} at a time"
    told = {**settings, "kind": "fidelity"}
    group = [
        {"settings": {**told, "cache": row["cache"]}, "result": row, "memory": row["memory_after_prefix"]}
        for row in content["rows"]
    ]
    return _draw_against_bytes(group, title)


def _draw_steps(content: Content) -> Figure:
    rows = [row for row in content["rows"] if row.get("part", "step") == "step"]
    if not rows:
        raise ValueError("`figures` can be drawn of a result with steps only")
    title = f"decode steps of {content['settings']['model']}, {content['device']}"
    figure, axes = _new(title, "context, tokens", "ms a token, median and quartiles")
    for number, cache in enumerate(dict.fromkeys(row["cache"] for row in rows)):
        own = sorted((row for row in rows if row["cache"] == cache), key=lambda row: row["context"])
        lower, medians, upper = (np.array([1e3 * row[key] for row in own]) for key in QUARTILES)
        contexts, errors = [row["context"] for row in own], (medians - lower, upper - medians)
        axes.errorbar(contexts, medians, yerr=errors, capsize=2, label=cache, **_style(number))
    every = sorted({row["context"] for row in rows})
    if every[-1] > _MOST_ON_A_LINE * every[0]:
        _set_ticks(axes, every)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_PLAIN)
        # Ten of them between powers of ten run into each other
        axes.yaxis.set_minor_locator(matplotlib.ticker.LogLocator(subs=(2, 5)))
        axes.yaxis.set_minor_formatter(_PLAIN)
    else:
        axes.set_ylim(bottom=0)
    _add_legend(axes)
    return figure
