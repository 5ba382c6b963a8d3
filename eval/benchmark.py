"""Benchmarks: functions that yield rows of a result, and whose signatures declare the options of a command.

    @benchmark("step")
    def benchmark_steps(cache: CachesOption, text_file: ..., steps: ... = 40) -> Iterator[Found]:
        yield Settings(dtype="float32")
        yield {"cache": ..., "median_s": ...}

The decorator checks caches before anything is loaded, sets threads, prints the table of the kind in `tables`, and
returns the content of the JSON file: commit, date, device, versions, settings and rows. With `--resume` the file is
written after every row.

Help reads this module, so it imports nothing heavy at the top.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import typer

from kvcache_plugins.console.results import provenance, write_json
from kvcache_plugins.registry import check_caches

from .rows import Content, Failure, Found, KnownRows, Settings


Options = ParamSpec("Options")


def say(text: str) -> None:
    """Print a line of progress on standard error."""
    typer.echo(text, err=True)


def benchmark(
    kind: str, title: str = "", *, with_dense: bool = False, in_inference_mode: bool = False
) -> Callable[[Callable[Options, Iterator[Found]]], Callable[Options, dict[str, Any]]]:
    """
    Make a command of a function that yields rows.

    Args:
        kind (`str`): name of the table in `tables` that shows the rows.
        title (`str`): title of the table, with names of settings in braces.
        with_dense (`bool`): measure the dense cache too, as the first one.
        in_inference_mode (`bool`): run the function in PyTorch's inference mode.
    """

    def decorate(function: Callable[Options, Iterator[Found]]) -> Callable[Options, dict[str, Any]]:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args: Options.args, **options: Options.kwargs) -> dict[str, Any]:
            import torch

            from .harness import REFERENCE

            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = bound.arguments
            if given.get("cache"):
                check_caches(given["cache"])
                given["cache"] = list(dict.fromkeys([*[REFERENCE] * with_dense, *given["cache"]]))
            threads, before = given.get("num_threads"), torch.get_num_threads()
            if isinstance(threads, int) and "world_size" not in given:
                torch.set_num_threads(threads)
            plain = {key: value.name if isinstance(value, Path) else value for key, value in given.items()}
            settings = {key: value for key, value in plain.items() if key not in ("cache", "resume")}
            result = Result(kind, settings, given.get("resume"))
            mode = torch.inference_mode() if in_inference_mode else nullcontext()
            try:
                with mode:
                    for found in function(*bound.args, **bound.kwargs):
                        result.take(found)
                result.show(title)
                return result.content()
            finally:
                # The process may go on, as notebooks do
                torch.set_num_threads(before)

        return run

    return decorate


class TimeIsUpError(Exception):
    """Error of a step for which too little time is left."""


@dataclass(slots=True)
class Result:
    """Rows and settings of a running benchmark. With a `path` the file is written at every change."""

    kind: str
    settings: dict[str, Any]
    path: Path | None = None
    more: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)

    def take(self, found: Found) -> None:
        """Add a row, failure, settings or content that a benchmark yields."""
        if isinstance(found, Failure):
            self.fail(*found)
        elif isinstance(found, KnownRows):
            self.rows += found
        elif isinstance(found, Settings):
            self.settings |= found
        elif isinstance(found, Content):
            self.more |= found
        else:
            self.add(dict(found))

    def add(self, row: dict[str, Any], says: str = "") -> None:
        """Add a row, and print a line about it."""
        self.rows.append(row)
        self.save()
        if says:
            say(says)

    def fail(self, what: str, reason: str) -> None:
        """Record the reason why a row is missing."""
        say(f"no row: {what} ({reason})")
        self.failures.append({"what": what, "reason": reason})
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """
        Record any error inside the block as a failure of `what`, and continue. Kernels, drivers and other projects'
        caches may raise errors of any kind, which must not lose other rows.
        """
        try:
            yield
        except TimeIsUpError:
            self.fail(what, "skipped: time")
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text, where = " ".join(str(error).split()), f"{Path(place.filename).name}:{place.lineno}"
            self.fail(what, f"{type(error).__name__}: {text[:500]} ({where})")

    def save(self) -> None:
        """Write the file, if there is one."""
        if self.path is not None:
            write_json(self.path, {"failures": [], **self.content()})

    def show(self, title: str) -> None:
        """Print the rows as a table."""
        from .tables import RENDERERS, print_markdown

        if self.rows:
            print_markdown(RENDERERS[self.kind](self.rows), title.format_map({"device": "", **self.settings}))

    def content(self) -> dict[str, Any]:
        """Return the content of the JSON document."""
        import torch

        more = dict(self.more)
        device = more.pop("device", torch.device("cpu"))
        known = device if isinstance(device, torch.device) else torch.device("cpu")
        origin = {"benchmark": self.kind, **provenance(known), **({} if device is known else {"device": device})}
        failures = {"failures": self.failures} if self.failures else {}
        return {**origin, "settings": self.settings, **more, "rows": self.rows, **failures}


def loaded_settings(network: Any) -> Iterator[Found]:
    """Yield the dtype and the device of a model that was loaded."""
    yield Settings(dtype=str(network.dtype).removeprefix("torch."))
    yield Content(device=network.device)
