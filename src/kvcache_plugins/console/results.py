"""JSON of all commands: `--json` prints it, and `--out` writes it to a file.

With `--json` standard output holds one JSON document and nothing else; progress and lines of a benchmark go to
standard error. Every evaluation records where its numbers come from: see `provenance`.
"""

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
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.files.atomic import new_file

from .inputs import JsonOption


if TYPE_CHECKING:
    import torch

    from kvcache_plugins.reports.memory import MemoryReport


OutOption = Annotated[Path | None, typer.Option(help="JSON file to write.")]


def print_json(content: Mapping[str, object]) -> None:
    """Print a JSON document. Infinity and NaN, which JSON does not have, become `null`."""
    typer.echo(json.dumps(_finite(content), indent=2, allow_nan=False, default=str))


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write an indented JSON file, completely or not at all, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    if path.exists() and not path.is_file():
        # A device, such as standard output
        path.write_text(text, encoding="utf-8")
        return
    with new_file(path) as file:
        file.write(text.encode())


@contextmanager
def free_stdout(is_needed: bool) -> Iterator[None]:
    """Redirect standard output to standard error, if standard output `is_needed` for JSON."""
    with redirect_stdout(sys.stderr if is_needed else sys.stdout):
        yield


def declare_result_options(out: OutOption = None, as_json: JsonOption = False) -> None:
    """Declare the options that `write_results` takes."""


def write_results(function: Callable[..., Mapping[str, object]]) -> Callable[..., None]:
    """Make a function that takes `out` and `as_json` too, and writes the results that `function` returns."""

    @wraps(function)
    def command(*, out: str | None, as_json: bool, **options: object) -> None:
        path = None if out is None else Path(out)
        if path is not None:
            prepare_file(path)
        with free_stdout(as_json):
            content = function(**options)
        if path is not None:
            write_json(path, content)
        if as_json:
            print_json(content)

    return command


def prepare_file(path: Path) -> None:
    """Make the folder of a file; raise a `ValueError` if the file cannot be written, before anything is computed."""
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
    """Return the commit, date, device and versions behind a number."""
    import torch

    where = f"{platform.machine()} CPU, {torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    # Triton compiles the kernels of a GPU
    names = ("torch", "transformers", *(["triton"] if device.type == "cuda" else []))
    versions = {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}
    return {
        "commit": find_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else where,
        "versions": {**versions, "kvcache_plugins": metadata.version("kvcache-plugins")},
    }


def find_commit() -> str | None:
    """Return the checkout's commit, marked if files differ, or `KVCACHE_PLUGINS_COMMIT` for an installed package."""
    here = Path(__file__).resolve()
    # An installed package may be inside another repository, whose commit says nothing about it
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        given = os.environ.get("KVCACHE_PLUGINS_COMMIT")
        return f"{given} (told)" if given else None
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
    """Return the fields of a `MemoryReport` for a JSON file."""
    names = ("total_bytes", "dense_bytes", "parts", "devices", "kv_percent", "shared", "kv_percent_with_shared")
    return {name: getattr(memory, name) for name in (*names, "compression_ratio", "bits_per_value")}
