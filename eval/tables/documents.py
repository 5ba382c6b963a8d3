"""Renders the tables of README.md and docs from the JSON files of `eval/results/`, between markers.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. NAME is a file of `eval/results/` without its suffix;
the file's shape decides the columns. A Markdown file of that name (the contract's grid) is taken as it is; a folder of
that name holds the results of a sweep.

    python -m kvcache_plugins.eval.tables.documents README.md
"""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from .benchmark_tables import (
    render_decode,
    render_kernels,
    render_machine_code,
    render_memory,
    render_prediction,
    render_prefix,
    render_prompts,
    render_step,
)
from .families import render_families
from .gpu_tables import render_batch, render_offloading
from .llama_cpp_tables import render_llama_cpp
from .markdown import render_fidelity
from .measure_tables import render_lm_eval, render_perplexity, render_repeated_tokens, render_retrieval
from .overview import render_overview
from .runahead_tables import render_runahead, render_simulation
from .shape_tables import render_shapes
from .store_tables import render_pool, render_store
from .sweeps import render_sweep


RESULTS = Path("eval/results")
_MARKED = re.compile(r"(<!-- table: (?P<name>[\w.-]+) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)


def render(text: str, results: Path) -> str:
    """`text` with the body of every marked table made anew. A missing result file raises a `ValueError`."""
    return _MARKED.sub(lambda match: f"{match[1]}{render_result(results, match['name'])}{match[4]}", text)


def render_result(results: Path, name: str) -> str:
    """The Markdown table of one result."""
    markdown, data = results / f"{name}.md", results / f"{name}.json"
    if (results / name).is_dir():
        return render_sweep(results / name)
    if markdown.is_file():
        return markdown.read_text(encoding="utf-8")
    if not data.is_file():
        raise ValueError(f"there is no {name}.json or {name}.md in {results}")
    content = json.loads(data.read_text(encoding="utf-8"))
    kind = content.get("benchmark", "fidelity")
    tables = {
        "fidelity": render_fidelity,
        "families": render_families,
        "memory": render_memory,
        "decode": render_decode,
        "kernels": render_kernels,
        "machine-code": render_machine_code,
        "step": render_step,
        "shapes": render_shapes,
        "llama-cpp": render_llama_cpp,
        "prefix": render_prefix,
        "prompts": render_prompts,
        "store": render_store,
        "pool": render_pool,
        "batch": render_batch,
        "prediction": render_prediction,
        "retrieval": render_retrieval,
        "offloading": render_offloading,
        "overview": render_overview,
        "perplexity": render_perplexity,
        "lm-eval": render_lm_eval,
        "repeated-tokens": render_repeated_tokens,
        "runahead": render_runahead,
        "runahead-simulation": render_simulation,
    }
    table = tables[kind](content["rows"])
    failures = "".join(f"\nNo row: {each['what']} ({each['reason']}).\n" for each in content.get("failures", []))
    versions = ", ".join(f"{package} {version}" for package, version in content["versions"].items())
    settings = ", ".join(f"{key} {value}" for key, value in content["settings"].items() if value is not None)
    origin = f"commit {content['commit']}, {content['date'][:10]}, {content['device']}"
    source = f"`{data.name}`: {origin}; {versions}; {settings}."
    return f"{table}{failures}\n{source}\n"


def main(files: Annotated[list[Path], typer.Argument(help="Markdown files whose tables to render.")]) -> None:
    """Renders the marked tables of Markdown files in place, from eval/results."""
    for file in files:
        file.write_text(render(file.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
        typer.echo(f"rendered {file}")


if __name__ == "__main__":
    typer.run(main)
