"""The README's table and figure: what caches hold, lose and cost, put together from results that were measured apart.

    python -m kvcache_plugins.eval.tables.overview

reads the files named below from `eval/results/`, predicts the bytes of a bfloat16 model from its config alone, writes
`eval/results/overview.json`, from which the table is rendered, and draws `docs/figures/fidelity_1024_smollm2.png`.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_plugins.advice.memory_prediction import predict_memory
from kvcache_plugins.console.results import provenance

from .markdown import make_markdown_table


RESULTS = Path("eval/results")
FIGURE = Path("docs/figures/fidelity_1024_smollm2.png")
# Of the same windows of the same text; the first that has a cache is taken, and what was not measured yet left out
PROMPT = (
    "fidelity_presets_1024_smollm2.json",
    "fidelity_transform_1024_smollm2.json",
    "fidelity_transform_calibrated_1024_smollm2.json",
    "fidelity_peers_1024_smollm2.json",
    "fidelity_wikitext2_smollm2.json",
)
DECODED = (
    "fidelity_transform_decoded_1024_smollm2.json",
    "fidelity_trellis_decoded_1024_smollm2.json",
    "fidelity_presets_decoded_1024_smollm2.json",
    "fidelity_peers_decoded_1024_smollm2.json",
)
STEPS = "step_transform_4096_smollm2.json"
MODEL, CONTEXT = "smollm2", 4096
CACHES = {
    "dynamic": "Transformers' default",
    "llamacpp-q8_0": "llama.cpp's type",
    "llamacpp-q4_0": "llama.cpp's type",
    "turboquant-4bit": "TurboQuant",
    "quanto-4bit": "Transformers' `QuantizedCache`",
    "kivi-4bit": "KIVI",
    "gear-4bit": "GEAR as in its paper",
    "gear-t30": "this package, nearest to dense",
    "gear-t25": "this package's default, `gear`",
    "gear-t22": "this package",
    "gear-t16": "this package, smallest",
    "gear-c16": "this package, calibrated",
}
# Parts of GEAR alone, which nobody takes, and what would make the figure a thicket
_NOT_DRAWN = ("per-token-*", "gear-l-*", "kcvt-*", "*trellis", "*:*")


def merge_fidelity(results: Path, names: Sequence[str]) -> dict[str, Any]:
    """
    Results of `eval fidelity` as one; of a cache that several have the first counts, and files that are not there are
    left out.

    Raises:
        ValueError: if they were not measured in the same way.
    """
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in _there(results, names)]
    if any(each["settings"] != contents[0]["settings"] for each in contents):
        raise ValueError(f"{', '.join(names)} were not measured in the same way")
    rows: dict[str, Any] = {}
    for content in contents:
        for row in content["rows"]:
            rows.setdefault(row["cache"], row)
    return {"settings": contents[0]["settings"], "rows": list(rows.values())}


def select_drawn(merged: dict[str, Any]) -> dict[str, Any]:
    """Results without the rows that are in tables alone."""
    rows = [row for row in merged["rows"] if not any(fnmatchcase(row["cache"], each) for each in _NOT_DRAWN)]
    return {**merged, "rows": rows}


def _there(results: Path, names: Sequence[str]) -> list[Path]:
    return [results / name for name in names if (results / name).is_file()]


def compile_overview(results: Path) -> dict[str, Any]:
    """
    A row for each cache that was measured: percent of a 16-bit cache, KL behind a prompt and while decoding, speed
    beside `dynamic`.
    """
    prompt, decoded = (
        {"dynamic": 0.0, **{row["cache"]: row["kl"] for row in merge_fidelity(results, names)["rows"]}}
        for names in (PROMPT, DECODED)
    )
    steps = json.loads((results / STEPS).read_text(encoding="utf-8"))
    speeds = {row["cache"]: row["speed_against_first"] for row in steps["rows"] if row["context"] == CONTEXT}
    rows = []
    for cache, what in CACHES.items():
        if cache not in prompt:
            continue
        held = predict_memory(MODEL, cache, CONTEXT, dtype="bfloat16", device="cpu")
        rows.append(
            {
                "cache": cache,
                "what": what,
                "kv_percent": held.kv_percent,
                "kv_percent_with_shared": held.kv_percent_with_shared,
                "kl": prompt[cache],
                "kl_decoded": decoded.get(cache),
                "speed_against_dynamic": speeds.get(cache),
            }
        )
    found = (", ".join(path.name for path in _there(results, names)) for names in (PROMPT, DECODED))
    sources: dict[str, Any] = dict(zip(("prompt", "decoded"), found, strict=True))
    sources |= {"steps": STEPS, "context": CONTEXT, "model": MODEL}
    return {"benchmark": "overview", **provenance(torch.device("cpu")), "settings": sources, "rows": rows}


def render_overview(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ("cache", "what it is", "% of 16 bits", "KL", "KL, decoded", "decode step, times as fast")
    cells = []
    for row in rows:
        shown = [
            "-" if row[name] is None else f"{row[name]:.{digits}f}"
            for name, digits in (("kl", 4), ("kl_decoded", 4), ("speed_against_dynamic", 2))
        ]
        percent = f"{row['kv_percent']:.1f}"
        if row["kv_percent_with_shared"] > row["kv_percent"]:
            percent += f" ({row['kv_percent_with_shared']:.1f})"
        cells.append((f"`{row['cache']}`", row["what"], percent, *shown))
    return make_markdown_table(head, cells)


def main() -> None:
    """Writes `eval/results/overview.json` and draws the figure."""
    from .figures import draw_result

    path = RESULTS / "overview.json"
    path.write_text(json.dumps(compile_overview(RESULTS), indent=2) + "\n", encoding="utf-8")
    typer.echo(f"wrote {path}")
    typer.echo(f"drew {draw_result(select_drawn(merge_fidelity(RESULTS, PROMPT)), FIGURE)}")


if __name__ == "__main__":
    typer.run(main)
