"""Draws the figures of the documentation, each for light and for dark pages.

    python docs/figures/draw.py

Measured ones come from `eval/results/`; the one of GEAR's parts from keys of SmolLM2, read while LICENSE is its text.
The same inputs give the same files.
"""

from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Polygon, Rectangle

from kvcache_plugins.eval.result_files import read_result
from kvcache_plugins.gear.config import GEARConfig


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "eval" / "results"
FOLDER = Path(__file__).resolve().parent

# Okabe and Ito's colours, which colour-blind people tell apart; all of them stand out on white and on slate
BLUE, ORANGE, GREEN, PINK, GREY = "#0A84CC", "#D55E00", "#009E73", "#CC79A7", "#8A8F98"
TEXT = {"light": "#24292F", "dark": "#E3E6EB"}

# The head of SmolLM2 whose keys are shown, and how many tokens of them
LAYER, HEAD, NUM_TOKENS = 15, 0, 128
# One run of `bench runahead`, whose slices and times are shown
RUNAHEAD_LENGTH = 4096


def draw_all(folder: Path, keys: torch.Tensor) -> list[Path]:
    """
    Draws every figure, as `NAME-light.svg` and `NAME-dark.svg`.

    Args:
        folder (`Path`): Where the files go.
        keys (`torch.Tensor` of shape `[NUM_TOKENS, head_dim]`): Keys of one head, to be taken apart.
    """
    figures: dict[str, tuple[Callable[[], Figure], str | None]] = {
        "gear_parts": (lambda: draw_gear_parts(keys), None),
        "gear_bytes": (draw_gear_bytes, "fidelity_wikitext2_smollm2"),
        "infinigen_timeline": (draw_infinigen_timeline, None),
        "infinigen_rules": (draw_infinigen_rules, "infinigen_rules_smollm2"),
        "runahead_slices": (draw_runahead_slices, "runahead_smollm2"),
        "runahead_times": (draw_runahead_times, "runahead_smollm2"),
    }
    paths = []
    for name, (draw, result) in figures.items():
        for theme, colour in TEXT.items():
            own = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
            settings: dict[str, Any] = dict.fromkeys(own, colour)
            settings |= {"svg.hashsalt": name, "font.size": 11, "axes.facecolor": "none", "figure.facecolor": "none"}
            settings |= {"axes.spines.top": False, "axes.spines.right": False}
            with matplotlib.rc_context(settings):
                path = folder / f"{name}-{theme}.svg"
                # Without the date of drawing the same figure is the same file
                draw().savefig(path, metadata={"Date": None, "Source": None if result is None else source(result)})
                paths.append(path)
    return paths


def source(result: str) -> str:
    """The result that a figure shows, with a digest that distinguishes it from a newer one."""
    path = RESULTS / f"{result}.json"
    return f"{path.name} {sha256(path.read_bytes()).hexdigest()[:16]}"


def read_keys() -> torch.Tensor:
    """Keys of one head of SmolLM2, `[NUM_TOKENS, head_dim]`, after the rotary embedding."""
    from transformers import DynamicCache

    from kvcache_plugins.models.reference_model import load_model

    model, tokenizer = load_model("smollm2")
    token_ids = tokenizer((ROOT / "LICENSE").read_text(encoding="utf-8"), return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(token_ids[:, :NUM_TOKENS], past_key_values=cache)
    return cache.layers[LAYER].keys[0, HEAD]


def draw_gear_parts(keys: torch.Tensor) -> Figure:
    """Draws the part of one head's keys that is missing after each part of GEAR at 2 bits."""
    steps = {
        "2-bit codes": {"rank": 0, "sparsity": 0.0},
        "+ low rank 4": {"rank": 4, "sparsity": 0.0},
        "+ 2 % outliers": {"rank": 4, "sparsity": 0.02},
    }
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    panels = figure.subplots(1, 4, sharey=True)
    largest = float(keys.abs().quantile(0.99))
    missing = {name: keys - reconstruct(keys, **options) for name, options in steps.items()}
    # Errors are drawn on a scale of their own: on that of the keys they would hardly be seen
    scale = float(missing["2-bit codes"].abs().quantile(0.99))
    for axes, (name, states) in zip(panels, {"keys": keys, **missing}.items(), strict=True):
        limit = largest if name == "keys" else scale
        axes.imshow(states, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="none")
        error = float(states.norm() / keys.norm())
        axes.set_title("keys" if name == "keys" else f"{name}\nmissing: {100 * error:.1f} %", fontsize=11)
        axes.set_xlabel("channel")
        axes.set_xticks([0, 32, 63])
    panels[0].set_ylabel("token")
    return figure


def reconstruct(keys: torch.Tensor, *, rank: int, sparsity: float) -> torch.Tensor:
    """One head's keys, `[tokens, head_dim]`, compressed at 2 bits and made dense again."""
    config = GEARConfig(key_nbits=2, value_nbits=2, sparsity=sparsity, rank=rank, decode_rank=0)
    torch.manual_seed(42)
    states, _ = config.codec(keys.shape[1], keys.shape[1]).keys.encode(keys[None, None, None], is_prompt=True)
    return states.dequantize_tile(slice(0, 1), slice(0, keys.shape[0])).reshape(keys.shape)


def draw_gear_bytes() -> Figure:
    """Bytes held by part, and what they keep, from the measured table."""
    rows = {row["cache"]: row for row in read("fidelity_wikitext2_smollm2")["rows"]}
    names = ("kivi-2bit", "gear-l-2bit", "gear-2bit", "kcvt-4bit", "gear-l-4bit", "gear-4bit")
    parts = {"codes": BLUE, "scales": GREY, "low_rank": GREEN, "outliers": ORANGE}
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(names, 0.0)
    for part, colour in parts.items():
        for name in names:
            memory = rows[name]["memory_after_prefix"]
            width = memory["kv_percent"] * memory["parts"].get(part, 0) / memory["total_bytes"]
            label = part.replace("_", " ") if name == names[0] else None
            axes.barh(name, width, left=left[name], color=colour, label=label)
            left[name] += width
    for name in names:
        axes.text(left[name] + 0.4, name, f"KL {rows[name]['kl']:.3f}", va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set(xlabel="bytes held, % of a cache at 16 bits", xlim=(0, 46))
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def draw_infinigen_timeline() -> Figure:
    """A decode step: what is fetched while a layer computes."""
    figure = Figure(figsize=(6.6, 2.4), layout="constrained")
    axes = figure.subplots()
    for number in range(3):
        start = 4.0 * number
        layer = "i" if number == 0 else f"i + {number}"
        box(axes, start, 1.15, 2.0, f"attention\nlayer {layer}", BLUE)
        box(axes, start + 2.0, 1.15, 1.9, f"MLP\nlayer {layer}", GREY)
        following = f"i + {number + 1}"
        box(axes, start, 0.15, 1.15, "choose", GREEN)
        box(axes, start + 1.15, 0.15, 2.4, f"fetch tokens\nof layer {following}", ORANGE)
        if number:
            arrow = {"arrowstyle": "->", "color": ORANGE, "linewidth": 1.6}
            axes.annotate("", xy=(start + 0.1, 1.12), xytext=(start - 0.5, 0.78), arrowprops=arrow)
    axes.set(xlim=(-0.1, 12), ylim=(0, 2), xlabel="time")
    axes.set_yticks([0.5, 1.5], ["link to\nhost memory", "accelerator"])
    axes.set_xticks([])
    axes.spines["left"].set_visible(False)
    axes.tick_params(length=0)
    return figure


def box(axes: Axes, left: float, bottom: float, width: float, text: str, colour: str) -> None:
    """A bar of a timeline, with its text."""
    face = to_rgba(colour, 0.35)
    axes.add_patch(Rectangle((left, bottom), width - 0.05, 0.7, facecolor=face, edgecolor=colour))
    axes.text(left + width / 2 - 0.02, bottom + 0.35, text, ha="center", va="center", fontsize=8)


def draw_infinigen_rules() -> Figure:
    """Draws the bytes that rules of choosing fetch beside their KL to the dense cache, from the measured table."""
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    groups = {"min_weight": BLUE, "alpha": ORANGE}
    for row in read("infinigen_rules_smollm2")["rows"]:
        options = row["cache"].partition(":")[2] or "min_weight=0.5"
        rule, _, number = options.partition("=")
        if rule not in groups:
            continue
        fetched = 100 * row["stats"]["tokens_fetched"] / row["stats"]["tokens_fetchable"]
        axes.plot(fetched, row["kl"], "o", color=groups[rule], markersize=8)
        # The rules' points lie close together: their names on different sides keep apart
        offset, side = ((-5, -15), "right") if rule == "min_weight" else ((5, 6), "left")
        words = {"textcoords": "offset points", "fontsize": 10, "ha": side}
        axes.annotate(f"{rule} {number}", (fetched, row["kl"]), xytext=offset, **words)
    axes.set(xlabel="% of the tokens fetched", ylabel="KL to the dense cache, nats", xlim=(2, 12), ylim=(0, None))
    axes.margins(y=0.15)
    return figure


def draw_runahead_slices() -> Figure:
    """Which rank computes which part of a causal attention, with even slices and with planned ones."""
    ways = {row["method"]: row for row in runahead_rows()}
    figure = Figure(figsize=(6.8, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, way in zip(panels, ("even", "planned"), strict=True):
        begin, colours = 0, (BLUE, ORANGE)
        total = RUNAHEAD_LENGTH**2
        for rank, (length, colour) in enumerate(zip(ways[way]["lengths"], colours, strict=True)):
            end = begin + length
            corners = [(0, begin), (0, end), (end, end), (begin, begin)]
            axes.add_patch(Polygon(corners, facecolor=to_rgba(colour, 0.45), edgecolor=colour))
            share = (end**2 - begin**2) / total
            label = f"rank {rank}\n{length}, {100 * share:.0f} %"
            axes.text(60, begin + 0.76 * length, label, va="center", fontsize=10)
            begin = end
        axes.set(xlim=(0, RUNAHEAD_LENGTH), ylim=(RUNAHEAD_LENGTH, 0), xlabel="key", ylabel="query", title=way)
        axes.set_xticks([0, 2048, 4096])
        axes.set_yticks([0, 2048, 4096])
        axes.set_aspect("equal")
    return figure


def draw_runahead_times() -> Figure:
    """Seconds to the first token of each way, from the measured table."""
    rows = [row for row in runahead_rows() if not row["method"].startswith("shares")]
    colours = {"one rank": GREY, "TSP": PINK, "zig-zag": ORANGE, "even": GREEN, "planned": BLUE}
    figure = Figure(figsize=(6.4, 2.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        median = row["median_s"]
        spread = [[median - row["lower_quartile_s"]], [row["upper_quartile_s"] - median]]
        error = {"ecolor": GREY, "capsize": 3}
        axes.barh(row["method"], median, color=colours[row["method"]], xerr=np.array(spread), error_kw=error)
        label = f"{median:.1f} s, {row['speed_against_one_rank']:.2f} times"
        axes.text(row["upper_quartile_s"] + 0.4, row["method"], label, va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set(xlabel=f"seconds to the first token of {RUNAHEAD_LENGTH} tokens, 2 ranks", xlim=(0, 26))
    return figure


def runahead_rows() -> Iterator[Mapping[str, Any]]:
    """The measured ways of prefilling a prompt of `RUNAHEAD_LENGTH` tokens."""
    return (row for row in read("runahead_smollm2")["rows"] if row["length"] == RUNAHEAD_LENGTH)


def read(name: str) -> Mapping[str, Any]:
    """A result of `eval/results/`."""
    return read_result(RESULTS / f"{name}.json")


if __name__ == "__main__":
    draw_all(FOLDER, read_keys())
