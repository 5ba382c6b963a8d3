"""`kvcache-plugins eval report`: any result of this package as a Markdown table, and what figures there are of it."""

import json
from pathlib import Path

import typer

from .tables.documents import render_result
from .tables.sweeps import read_sweep


def write_report(result: Path, out: Path | None, figures: Path | None) -> None:
    """Writes the tables of a result, and draws its figures into a folder if there is one to."""
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
