"""The README's table: what caches hold, lose and cost, put together from results that were measured one by one.

    python -m kvcache_plugins.eval.tables.overview

reads the files named below from `eval/results/`, predicts the bytes of a bfloat16 model from its config alone, and
writes `eval/results/overview.json`, from which the table is rendered.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_plugins.advice.memory_prediction import predict_memory
from kvcache_plugins.console.run_report import provenance

from .markdown import make_markdown_table


RESULTS = Path("eval/results")
# Of the same windows of the same text; the first that has a cache is taken
FIDELITY = ("fidelity_presets_decoded_1024_smollm2.json",)
STEPS = "step_codes_4096_smollm2.json"
MODEL, CONTEXT = "smollm2", 4096
CACHES = {
    "dynamic": "Transformers' default",
    "quanto-4bit": "Transformers' `QuantizedCache`",
    "quanto-2bit": "Transformers' `QuantizedCache`",
    "kivi-4bit": "KIVI",
    "kivi-2bit": "KIVI",
    "gear-4bit": "GEAR as in its paper",
    "gear-k4v4-g32": "this package, nearest to dense",
    "gear": "this package's default",
    "gear-k4v3": "this package",
    "gear-k3v2": "this package, smallest",
}


def compile_overview(results: Path) -> dict[str, Any]:
    """
    A row for each cache: percent of a 16-bit cache, KL, speed beside `dynamic`.

    Raises:
        ValueError: if fidelity was not measured on the same windows, or not of a cache.
    """
    measured: dict[str, Mapping[str, Any]] = {"dynamic": {"kl": 0.0}}
    settings = []
    for name in FIDELITY:
        content = json.loads((results / name).read_text(encoding="utf-8"))
        settings.append(content["settings"])
        for row in content["rows"]:
            measured.setdefault(row["cache"], row)
    if any(each != settings[0] for each in settings):
        raise ValueError(f"{', '.join(FIDELITY)} were not measured in the same way")
    steps = json.loads((results / STEPS).read_text(encoding="utf-8"))
    speeds = {row["cache"]: row["speed_against_first"] for row in steps["rows"]}
    rows = []
    for cache, what in CACHES.items():
        # A name of its own for the default is another preset's
        known = next((name for name in (cache, *_same_as(cache)) if name in measured), None)
        if known is None:
            raise ValueError(f"no fidelity was measured of `{cache}`")
        held = predict_memory(MODEL, cache, CONTEXT, dtype="bfloat16", device="cpu")
        rows.append(
            {
                "cache": cache,
                "what": what,
                "kv_percent": held.kv_percent,
                "kl": measured[known]["kl"],
                "speed_against_dynamic": speeds.get(cache),
            }
        )
    sources = {"fidelity": ", ".join(FIDELITY), "steps": STEPS, "context": CONTEXT, "model": MODEL}
    return {"benchmark": "overview", **provenance(torch.device("cpu")), "settings": sources, "rows": rows}


def _same_as(cache: str) -> Sequence[str]:
    return ("gear-k4v4",) if cache == "gear" else ()


def render_overview(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "what it is", "% of 16 bits", "KL", "decode step, times as fast")
    cells = []
    for row in rows:
        speed = row["speed_against_dynamic"]
        shown = "-" if speed is None else f"{speed:.2f}"
        cells.append((f"`{row['cache']}`", row["what"], f"{row['kv_percent']:.1f}", f"{row['kl']:.4f}", shown))
    return make_markdown_table(head, cells)


def main() -> None:
    """Writes `eval/results/overview.json`."""
    path = RESULTS / "overview.json"
    path.write_text(json.dumps(compile_overview(RESULTS), indent=2) + "\n", encoding="utf-8")
    typer.echo(f"wrote {path}")


if __name__ == "__main__":
    typer.run(main)
