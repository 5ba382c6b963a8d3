"""`kvcache-plugins models`: which decoder families of the installed Transformers a cache works on."""

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.json_output import JsonOption, OutOption, prepare_file, print_json


def main(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME or NAME:key=value,key=value; repeatable. By default GEAR at 8 bits, InfiniGen that fetches "
            "everything and H2O that keeps everything."
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache is held against DynamicCache: one prompt and a
    second turn, and two prompts of unequal length. It works, works and reads whole layers dense while decoding,
    refuses and says why, or fails. Prints Markdown.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.gear.status != "works")'
        kvcache-plugins models --out eval/results/families.json
    """
    from kvcache_plugins.registry import check_caches

    specs = check_caches(cache or [])
    if out is not None:
        prepare_file(out)
    import torch

    from kvcache_plugins.console.progress import track_progress
    from kvcache_plugins.console.run_report import provenance
    from kvcache_plugins.contract.families.cases import cases_of, own_cases
    from kvcache_plugins.contract.families.survey import family_names, try_families
    from kvcache_plugins.contract.families.table import render_families, result_rows

    families = [name for name in family_names() if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(family_names())}")
    cases = cases_of(specs) if specs else own_cases()
    with track_progress(len(families)) as announce:
        rows = result_rows(try_families(families, cases, announce, seconds))
    content = {
        "benchmark": "families",
        **provenance(torch.device("cpu")),
        "settings": {"families": pattern, "caches": " ".join(cases)},
        "rows": rows,
    }
    _write(content, out, as_json, render_families(rows))


def _write(content: dict[str, object], out: Path | None, as_json: bool, text: str) -> None:
    from kvcache_plugins.console.run_report import write_json

    if out is not None:
        write_json(out, content)
    if as_json:
        print_json(content)
    else:
        typer.echo(text)
