"""Commands of `kvcache-plugins` that stand on several rooms of `eval`: options, help and rows.

Help reads this module, so it imports nothing heavy at the top: a command imports what it runs.
"""

from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.display import track_progress

from .benchmark import benchmark
from .rows import Found, Settings


@benchmark("families")
def survey_families(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[list[str] | None, typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")] = None,
    bits: Annotated[float, typer.Option(help="Bits that caches of `--cache` are held to.", min=1, max=16)] = 2.0,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
) -> Iterator[Found]:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache, by default the presets that people get, is held
    against itself used in another way, and against DynamicCache: two turns, two prompts of unequal length, a prompt in
    chunks. It works, works and reads whole layers dense while decoding, refuses and says why, or FAILS.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.transform.status != "works")'
        kvcache-plugins models --out eval/results/families.json
    """
    from .families import PROMPT_LENGTH, cases_of, family_names, own_cases, try_families

    families = [name for name in family_names() if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(family_names())}")
    cases = cases_of(cache, bits) if cache else own_cases()
    yield Settings(families=pattern, caches=" ".join(cases), tokens=PROMPT_LENGTH)
    with track_progress(len(families)) as announce:
        yield from map(asdict, try_families(families, cases, announce, seconds))


def write_report(
    result: Annotated[Path, typer.Argument(help="A folder that a sweep has filled, or the JSON file of one result.")],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write; printed by default.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
) -> None:
    """Tables and figures of a result.

    There are figures of a sweep, of `bench step` and of `eval fidelity`. A sweep gives accuracy against bytes and
    perplexity against position, steps give time against context, `eval fidelity` divergence against bytes.

    \b
    Examples:
        kvcache-plugins eval report eval/results/gear --figures docs/figures
        kvcache-plugins eval report eval/results/step_short_smollm2.json --figures docs/figures
    """
    from .result_files import read_result
    from .tables import read_sweep, render_result

    if result.is_file() and result.suffix != ".json":
        raise ValueError(f"`result` has to be a folder or a .json file but is {result}")
    text = render_result(result.parent, result.stem if result.is_file() else result.name)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text, encoding="utf-8")
    if figures is None:
        return
    from .figures import draw_result, draw_sweep

    if result.is_dir():
        paths = draw_sweep(read_sweep(result), figures, result.name)
    else:
        paths = [draw_result(read_result(result), figures / f"{result.stem}.png")]
    for path in paths:
        typer.echo(f"drew {path}", err=True)


def run_on_gpu(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("eval/results"),
    limit: Annotated[float, typer.Option(help="Seconds that all of it may take.", min=1)] = 570.0,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the script; no GPU needed.")] = False,
    part: Annotated[str | None, typer.Option(help="One part only, in this process: checks, attention, ...")] = None,
) -> None:
    """Check and time all that wants a GPU. For the root of the repository, whose tests it runs.

    \b
    Examples:
        kvcache-plugins bench gpu
        kvcache-plugins bench gpu --part attention --out /tmp/results
        TRITON_INTERPRET=1 KVCACHE_PLUGINS_KERNELS=triton \\
            kvcache-plugins bench gpu --tiny --out /tmp/results
    """
    from .gpu import run_parts

    run_parts(out, limit, tiny, part)
