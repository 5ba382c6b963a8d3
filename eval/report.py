"""Reports of results: `kvcache-plugins eval report`, and the README's table and figure of all caches.

    python -m kvcache_plugins.eval.report

combines results: it reads the files named below from `eval/results/`, predicts bytes from a model's config alone,
writes `overview.json` there, from which the table is rendered, and draws `FIGURE`.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_plugins.advice.memory_prediction import predict_memory
from kvcache_plugins.console.results import provenance, write_json

from .result_files import read_result
from .tables import RESULTS


FIGURE = Path("docs/figures/fidelity_1024_smollm2.png")
# Figure: the same windows of the same text, 16 tokens a forward; the first file that has a cache counts
_PARTS = ("transform", "presets", "peers")
DECODED = tuple(f"fidelity_{part}_decoded_1024_smollm2.json" for part in _PARTS)
# Table: all caches on the same windows, one token a forward; steps from the first file that has a cache
FIDELITY = "fidelity_overview_smollm2.json"
STEPS = ("step_transform_4096_smollm2.json", "step_codes_4096_smollm2.json")
MODEL, CONTEXT = "smollm2", 4096
CACHES = {
    "transform": "`TransformCodingCache`, this package's method",
    "gear": "`GEARCache`, GEAR as in its paper",
    "infinigen": "`InfiniGenCache`; with a GPU 21 % on it, 93 % in host memory",
    "kivi-4bit": "KIVI",
    "quanto-4bit": "Transformers' `QuantizedCache`",
    "llamacpp-q8_0": "llama.cpp's type",
    "llamacpp-q4_0": "llama.cpp's type",
    "turboquant-4bit": "TurboQuant",
}
# Rare caches, and options of presets, are left out of the figure
_NOT_DRAWN = (
    *("per-token-*", "gear-l-*", "kcvt-*", "hqq-*", "quanto-*"),
    *("gear-k2*", "gear-k3*", "gear-k4v4*", "*:*"),
)


def merge_fidelity(results: Path, names: Sequence[str]) -> dict[str, Any]:
    """
    Merge results of `eval fidelity`, without missing files; a cache in several files counts in the first. Raise a
    `ValueError` if results have different settings.
    """
    found = [results / name for name in names if (results / name).is_file()]
    contents = [read_result(path) for path in found]
    # Options without a value, and those that older results lack, are equal; batches do not change results
    given = [{key: value for key, value in each["settings"].items() if value and key != "batch"} for each in contents]
    if any(each != given[0] for each in given):
        raise ValueError(f"{', '.join(names)} were not measured in the same way")
    rows: dict[str, Any] = {}
    for content in contents:
        for row in content["rows"]:
            rows.setdefault(row["cache"], row)
    return {"settings": contents[0]["settings"], "rows": list(rows.values()), "files": [path.name for path in found]}


def select_drawn(merged: dict[str, Any]) -> dict[str, Any]:
    """Return the rows that are drawn."""
    rows = [row for row in merged["rows"] if not any(fnmatchcase(row["cache"], each) for each in _NOT_DRAWN)]
    return {**merged, "rows": rows}


def compile_overview(results: Path) -> dict[str, Any]:
    """Return percent of 16 bits, KL while decoding, and speed against `dynamic` of each cache."""
    kl = {row["cache"]: row["kl"] for row in read_result(results / FIDELITY)["rows"]}
    speeds: dict[str, float] = {}
    for row in (row for name in STEPS for row in read_result(results / name)["rows"]):
        if row["context"] == CONTEXT:
            speeds.setdefault(row["cache"], row["speed_against_first"])
    rows = []
    for cache, what in CACHES.items():
        held = predict_memory(MODEL, cache, CONTEXT, dtype="bfloat16", device="cpu")
        row = {"cache": cache, "what": what, "kv_percent": held.kv_percent, "kl": kl[cache]}
        rows.append({**row, "speed_against_dynamic": speeds.get(cache)})
    sources = {"kl": FIDELITY, "steps": ", ".join(STEPS), "context": CONTEXT, "model": MODEL}
    return {"benchmark": "overview", **provenance(torch.device("cpu")), "settings": sources, "rows": rows}


def main() -> None:
    """Write `eval/results/overview.json`, and draw the figure."""
    from .figures import draw_result

    path = RESULTS / "overview.json"
    write_json(path, compile_overview(RESULTS))
    typer.echo(f"wrote {path}")
    typer.echo(f"drew {draw_result(select_drawn(merge_fidelity(RESULTS, DECODED)), FIGURE)}")


if __name__ == "__main__":
    typer.run(main)
