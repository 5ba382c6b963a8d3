"""`kvcache-plugins eval sweep`: caches x models x measures, a JSON file for each, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.console.command_group import FAILED
from kvcache_plugins.console.json_output import JsonOption, free_stdout, print_json


if TYPE_CHECKING:
    from kvcache_plugins.eval.sweep import Run, Sweep


def main(
    config: Annotated[Path, typer.Argument(help="A YAML file: models, caches, measures and where results go.")],
    only: Annotated[str, typer.Option(help="Shell pattern of measure/model/cache, such as 'copa/*/gear*'.")] = "*",
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that have a result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure caches x models x tasks. Each has a JSON file. Interrupted, it goes on where it was.

    --json lists what was run, or with --dry-run would be: each with its file and, where it failed, its error, which
    makes exit code 1.

    \b
    Examples:
        kvcache-plugins eval sweep eval/sweeps/gear.yaml
        kvcache-plugins eval sweep eval/sweeps/gear.yaml --only 'copa/smollm2/gear-2bit' --again
    """
    from kvcache_plugins.console.progress import track_progress
    from kvcache_plugins.console.tables import print_line
    from kvcache_plugins.eval.sweep import Sweep, run_sweep

    sweep = Sweep.read(config)
    runs = sweep.pending(only, again)
    print_line(f"{len(runs)} of {len(sweep.runs)} runs to do, results in {sweep.out}", stderr=True)
    if dry_run:
        if as_json:
            print_json(_listing(sweep, [(run, None) for run in runs]))
            return
        for run in runs:
            typer.echo(run.label)
        return
    done: list[tuple[Run, str | None]] = []
    with free_stdout(as_json), track_progress(len(runs)) as announce:
        for run, error in run_sweep(sweep, runs, announce):
            done.append((run, error))
            if error is not None:
                print_line(f"{run.label} failed: {error}", stderr=True)
    if as_json:
        print_json(_listing(sweep, done))
    num_failed = sum(error is not None for _, error in done)
    if num_failed:
        print_line(f"{num_failed} runs failed; run the same again to retry them", stderr=True)
        raise typer.Exit(FAILED)


def _listing(sweep: Sweep, runs: list[tuple[Run, str | None]]) -> dict[str, object]:
    rows = [{"run": run.label, "file": str(sweep.out / run.file_name()), "error": error} for run, error in runs]
    return {"num_runs": len(sweep.runs), "runs": rows}
