"""JSON for scripts, in one way for all commands: `--json` prints it, `--out` writes it to a file, both do both.

With `--json` standard output holds one JSON document and nothing else. What is said on the way (progress, the lines of
a benchmark as they come) goes to standard error. Every evaluation says where its numbers come from: see `provenance`.
"""

import inspect
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from datetime import datetime, timezone
from functools import wraps
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .inputs import JsonOption


if TYPE_CHECKING:
    import torch

    from kvcache_plugins.reports.memory import MemoryReport


OutOption = Annotated[Path | None, typer.Option(help="JSON file to write.")]


def print_json(content: Mapping[str, object]) -> None:
    """Prints a JSON document. JSON has no infinity and no NaN: they are `null`."""
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False, default=str))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes an indented JSON file, its folder made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@contextmanager
def free_stdout(is_needed: bool) -> Iterator[None]:
    """Sends what is printed inside to standard error, if standard output `is_needed` for JSON."""
    with redirect_stdout(sys.stderr if is_needed else sys.stdout):
        yield


def with_results(function: Callable[..., Mapping[str, object]]) -> Callable[..., None]:
    """Makes the command of a function that returns its results, which go where `--out` and `--json` say."""

    @wraps(function)
    def command(*args: Any, out: Path | None = None, as_json: bool = False, **kwargs: Any) -> None:
        if out is not None:
            prepare_file(out)
        with free_stdout(as_json):
            content = function(*args, **kwargs)
        if out is not None:
            write_json(out, content)
        if as_json:
            print_json(content)

    signature = inspect.signature(function, eval_str=True)
    added = {"out": (OutOption, None), "as_json": (JsonOption, False)}
    kind = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(name, kind, default=value, annotation=hint) for name, (hint, value) in added.items()]
    # What Typer reads options from
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *more], return_annotation=None
    )
    return command


def prepare_file(path: Path) -> None:
    """Sees to it that a file can be written, its folder made, before anything is computed; else a `ValueError`."""
    if path.is_dir():
        raise ValueError(f"`out` is to be a file, but {path} is a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`out`: the folder {path.parent} cannot be made ({error.strerror})") from error
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise ValueError(f"`out`: {path} cannot be written ({error.strerror})") from error
    # A command that fails leaves no empty file behind
    if is_new:
        path.unlink()


def provenance(device: "torch.device") -> dict[str, object]:
    """Describes where a number comes from: commit, date, device and versions."""
    import torch

    where = f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    # What compiles the kernels of a GPU
    names = ("torch", "transformers", *(["triton"] if device.type == "cuda" else []))
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
    return {
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else where,
        "versions": {**versions, "kvcache_plugins": metadata.version("kvcache-plugins")},
    }


def _commit() -> str | None:
    """Finds the checkout's commit, marked if files differ; of an installed package `KVCACHE_PLUGINS_COMMIT`."""
    here = Path(__file__).resolve()
    # An installed package may lie in a folder of some other repository, whose commit would say nothing about it
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        told = os.environ.get("KVCACHE_PLUGINS_COMMIT")
        return f"{told} (told)" if told else None
    commit = _git(here.parent, "rev-parse", "--short=12", "HEAD")
    has_changes = bool(_git(here.parent, "status", "--porcelain", "--untracked-files=no"))
    return f"{commit}-modified" if commit and has_changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return finished.stdout.strip()


def memory_fields(memory: "MemoryReport") -> dict[str, object]:
    """Lists the fields of a `MemoryReport` for a JSON file."""
    names = ("total_bytes", "dense_bytes", "parts", "devices", "kv_percent", "shared", "kv_percent_with_shared")
    return {name: getattr(memory, name) for name in (*names, "compression_ratio", "bits_per_value")}
