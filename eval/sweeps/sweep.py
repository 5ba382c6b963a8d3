"""`kvcache-plugins eval sweep CONFIG.yaml`: caches x models x measures, a JSON file for each, resumable.

    models: [smollm2]
    caches: [dynamic, gear-2bit, "gear-2bit:rank=8"]
    out: results/small
    measures:
      copa: {task: kv_copa, limit: 200}
      book: {fidelity: {text_file: book.txt, windows: 4, prefix: 1024, scored: 256}}
      drift: {perplexity: {text_file: book.txt, length: 2048, chunk: 64}}
      pairs: {retrieval: {data_file: pairs.jsonl, records: 10, questions: 24}}

Paths are relative to the file and may name environment variables. A run that has its JSON file is not repeated; one
that is interrupted leaves none.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvcache_plugins.console.command_group import FAILED
from kvcache_plugins.console.command_line import load_for_evaluation, open_console, track_progress
from kvcache_plugins.console.json_output import JsonOption, free_stdout, print_json
from kvcache_plugins.console.run_report import provenance, write_json
from kvcache_plugins.eval.harness.caches import CACHE_FAILURES
from kvcache_plugins.registry import check_cache, parse_cache_spec

from .measures import MEASURES, measure


_FIELDS = {"models", "caches", "out", "measures", "dtype", "device"}
# What a cache may raise without taking the other runs with it
_FAILURES = (*CACHE_FAILURES, ImportError, OSError)


@dataclass(frozen=True, kw_only=True)
class Run:
    """
    One cell of a sweep.

    Args:
        model, cache (`str`): As commands take them.
        name (`str`): The measure's name in the file.
        kind (`str`): What is measured: a key of `MEASURES`.
        options (`Mapping[str, Any]`): The measure's options.
        dtype, device (`str`, *optional*): As commands take them.
    """

    model: str
    cache: str
    name: str
    kind: str
    options: Mapping[str, Any]
    dtype: str | None = None
    device: str | None = None

    @property
    def label(self) -> str:
        """What `--only` is held against."""
        return f"{self.name}/{self.model}/{self.cache}"

    def settings(self) -> dict[str, Any]:
        """All that the result depends on."""
        return asdict(self)

    def file_name(self) -> str:
        """A name that differs whenever a setting does."""
        digest = hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()[:8]
        words = (self.name, Path(self.model).name, self.cache)
        slug = "-".join("".join(c if c.isalnum() or c in "-." else "_" for c in word) for word in words)
        return f"{slug}-{digest}.json"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """
    A sweep's file.

    Args:
        runs (`tuple[Run, ...]`): Its cells, model by model.
        out (`Path`): Folder of the results.
        base (`Path`): Folder that paths of the measures are relative to.
    """

    runs: tuple[Run, ...]
    out: Path
    base: Path

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """Reads a YAML file. What is missing, unknown or wrong in it is a `ValueError` that names it."""
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"{path}: a sweep has the fields {', '.join(sorted(_FIELDS))}")
        unknown, missing = content.keys() - _FIELDS, {"models", "caches", "out", "measures"} - content.keys()
        if unknown or missing:
            named = ", ".join(f"`{name}`" for name in sorted(unknown or missing))
            what = "unknown" if unknown else "missing"
            raise ValueError(f"{path}: {what} {named}. Known: {', '.join(sorted(_FIELDS))}")
        for spec in content["caches"]:
            name, options = parse_cache_spec(spec)
            check_cache(name, **options)
        measures = {name: _parse_measure(name, fields) for name, fields in content["measures"].items()}
        runs = tuple(
            Run(
                model=model,
                cache=cache,
                name=name,
                kind=kind,
                options=options,
                dtype=content.get("dtype"),
                device=content.get("device"),
            )
            for model in content["models"]
            for name, (kind, options) in measures.items()
            for cache in content["caches"]
        )
        return cls(runs=runs, out=path.parent / content["out"], base=path.parent)

    def pending(self, only: str = "*", again: bool = False) -> list[Run]:
        """Runs whose labels match, without those that have a result."""
        chosen = [run for run in self.runs if fnmatchcase(run.label, only)]
        if not chosen:
            labels = ", ".join(run.label for run in self.runs[:3])
            raise ValueError(f"`only` is `{only}`, which matches no run. There are, for instance, {labels}")
        return [run for run in chosen if again or not (self.out / run.file_name()).is_file()]


def _parse_measure(name: str, fields: Any) -> tuple[str, dict[str, Any]]:
    kinds = [kind for kind in MEASURES if isinstance(fields, dict) and kind in fields]
    if len(kinds) != 1:
        raise ValueError(f"measure `{name}` has to have one of {', '.join(MEASURES)}, but has {fields}")
    (kind,) = kinds
    rest = {key: value for key, value in fields.items() if key != kind}
    if kind == "task":
        return kind, {"task": fields[kind], **rest}
    if rest or not isinstance(fields[kind], dict):
        raise ValueError(f"measure `{name}`: the options of `{kind}` stand in it, as `{kind}: {{key: value}}`")
    return kind, fields[kind]


def run_sweep(sweep: Sweep, runs: list[Run], announce: Callable[[str], None]) -> Iterator[tuple[Run, str | None]]:
    """
    Runs what is given, loading each model once.

    Args:
        sweep (`Sweep`): Where results go.
        runs (`list[Run]`): Model by model.
        announce (`Callable[[str], None]`): Called before every run with what is done and how long all will take.

    Yields:
        Each run when it is done, with its error if it failed.
    """
    loaded: tuple[str, PreTrainedModel, PreTrainedTokenizerBase] | None = None
    start = time.perf_counter()
    for number, run in enumerate(runs):
        left = (time.perf_counter() - start) / number * (len(runs) - number) / 60 if number else None
        hint = "" if left is None else f", about {left:.0f} min left"
        announce(f"{number + 1} of {len(runs)}: {run.label}{hint}")
        if loaded is None or loaded[0] != run.model:
            # The last model goes before the next one comes
            loaded = None
            loaded = (run.model, *load_for_evaluation(run.model, run.dtype, run.device))
        _, model, tokenizer = loaded
        started = time.perf_counter()
        try:
            found = measure(run.kind, model, tokenizer, run.cache, run.options, sweep.base)
        except _FAILURES as error:
            yield run, f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        seconds = time.perf_counter() - started
        content = {"benchmark": "sweep", **provenance(model.device), "settings": run.settings(), "seconds": seconds}
        path = sweep.out / run.file_name()
        # Renamed when it is whole, so that an interruption never leaves half a result
        partial = path.with_suffix(".partial")
        write_json(partial, {**content, **found})
        os.replace(partial, path)
        yield run, None


def main(
    config: Annotated[Path, typer.Argument(help="A YAML file: models, caches, measures and where results go.")],
    only: Annotated[str, typer.Option(help="Shell pattern of measure/model/cache, such as 'copa/*/gear*'.")] = "*",
    again: Annotated[bool, typer.Option("--again", help="Repeat runs that have a result.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure caches x models x tasks, one JSON file each. Interrupted, it goes on where it was.

    --json lists what was run, or with --dry-run would be: each with its file and, where it failed, its error, which
    makes exit code 1.

    \b
    Examples:
        kvcache-plugins eval sweep eval/sweeps/gear.yaml
        kvcache-plugins eval sweep eval/sweeps/gear.yaml --only 'copa/smollm2/gear-2bit' --again
    """
    sweep = Sweep.read(config)
    runs = sweep.pending(only, again)
    console = open_console(stderr=True)
    console.print(f"{len(runs)} of {len(sweep.runs)} runs to do, results in {sweep.out}", markup=False)
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
                console.print(f"{run.label} failed: {error}", markup=False, soft_wrap=True)
    if as_json:
        print_json(_listing(sweep, done))
    num_failed = sum(error is not None for _, error in done)
    if num_failed:
        console.print(f"{num_failed} runs failed; run the same again to retry them", markup=False)
        raise typer.Exit(FAILED)


def _listing(sweep: Sweep, runs: list[tuple[Run, str | None]]) -> dict[str, object]:
    rows = [{"run": run.label, "file": str(sweep.out / run.file_name()), "error": error} for run, error in runs]
    return {"num_runs": len(sweep.runs), "runs": rows}
