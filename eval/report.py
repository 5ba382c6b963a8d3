"""`kvcache-plugins eval report`: any result of this package as a Markdown table, and what figures there are of it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .tables.documents import render_result
from .tables.sweeps import read_sweep


def write_report(
    result: Annotated[Path, typer.Argument(help="A folder that a sweep has filled, or the JSON file of one result.")],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write; printed by default.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
) -> None:
    """Tables and figures of a result.

    There are figures of a sweep, of `bench step`, of `bench llama-cpp` and of `eval fidelity`. A sweep gives accuracy
    against bytes, perplexity against position and memory by part; benchmarks of steps give time against context;
    `eval fidelity` divergence from the dense cache against bytes.

    \b
    Examples:
        kvcache-plugins eval report eval/results/gear --figures docs/figures
        kvcache-plugins eval report eval/results/step_smollm2_cpu.json --figures docs/figures
    """
    if result.is_file() and result.suffix != ".json":
        raise ValueError(f"`result` has to be a folder or a .json file but is {result}")
    text = render_result(result.parent, result.stem if result.is_file() else result.name)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text, encoding="utf-8")
    if figures is None:
        return
    from .tables.figures import draw_result, draw_sweep

    if result.is_dir():
        paths = draw_sweep(read_sweep(result), figures, result.name)
    else:
        paths = [draw_result(json.loads(result.read_text(encoding="utf-8")), figures / f"{result.stem}.png")]
    for path in paths:
        typer.echo(f"drew {path}", err=True)
