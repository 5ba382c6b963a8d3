"""JSON for scripts, in one way for all commands: `--json` prints it, `--out` writes it to a file, both do both.

With `--json` standard output holds one JSON document and nothing else. What is said on the way (progress, the lines of
a benchmark as they come) goes to standard error.
"""

import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from .run_report import write_json


JSON_HELP = "Print JSON, and nothing else, on standard output."

JsonOption = Annotated[bool, typer.Option("--json", help=JSON_HELP)]
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


@contextmanager
def free_stdout(is_needed: bool) -> Iterator[None]:
    """Inside, what is printed goes to standard error, if standard output `is_needed` for JSON."""
    if not is_needed:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def with_results(function: Callable[..., Mapping[str, object]]) -> Callable[..., None]:
    """
    The command of a function that returns what it has found; options of the command, `--out` and `--json`, say where
    that goes.

    Raises:
        ValueError: before anything is computed, if `--out` is a folder; an `OSError` if it cannot be written.
    """

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
    """
    Sees to it that a file can be written, so that nothing is lost when it is: its folder is made, and it is opened.

    Raises:
        ValueError: if `path` is a folder, its folder cannot be made, or it cannot be written.
    """
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
