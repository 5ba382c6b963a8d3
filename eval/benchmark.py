"""A benchmark: a function whose signature declares the options of its command, which yields the rows of its result.

    @benchmark("step")
    def benchmark_steps(cache: CachesOption, text_file: ..., steps: ... = 40) -> Iterator[Found]:
        yield Settings(dtype="float32")
        yield {"cache": ..., "median_s": ...}

The decorator checks caches before anything is loaded, sets threads, prints the table that `tables` has of the kind,
and returns what `--json` and `--out` write: commit, date, device, versions, settings and rows.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch
import typer

from kvcache_plugins.console.results import provenance
from kvcache_plugins.registry import check_caches

from .rows import Content, Failure, Found, Settings
from .tables import RENDERERS, print_markdown


Options = ParamSpec("Options")


def say(text: str) -> None:
    """Says on standard error what is done."""
    typer.echo(text, err=True)


def benchmark(
    kind: str, title: str = ""
) -> Callable[[Callable[Options, Iterator[Found]]], Callable[Options, dict[str, Any]]]:
    """
    Makes a command's function of one that yields its rows.

    Args:
        kind (`str`): The kind of the result, by which its table is found.
        title (`str`, *optional*): Of the table in a terminal, formatted with the settings.
    """

    def decorate(function: Callable[Options, Iterator[Found]]) -> Callable[Options, dict[str, Any]]:
        signature = inspect.signature(function)

        @wraps(function)
        def run(*args: Options.args, **options: Options.kwargs) -> dict[str, Any]:
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            given = bound.arguments
            if given.get("cache"):
                caches = given["cache"]
                check_caches([caches] if isinstance(caches, str) else caches)
            threads = given.get("num_threads")
            if isinstance(threads, int) and "world_size" not in given:
                torch.set_num_threads(threads)
            result = Result(kind, {key: _plain(value) for key, value in given.items() if key != "cache"})
            for found in function(*args, **options):
                result.take(found)
            result.show(title)
            return result.content()

        return run

    return decorate


def _plain(value: object) -> object:
    return value.name if isinstance(value, Path) else value


@dataclass(slots=True)
class Result:
    """The rows and settings of a benchmark while it runs."""

    kind: str
    settings: dict[str, Any]
    more: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)

    def take(self, found: Found) -> None:
        """Takes what a benchmark yields."""
        if isinstance(found, Failure):
            say(f"no row: {found.what} ({found.reason})")
            self.failures.append(found._asdict())
        elif isinstance(found, Settings):
            self.settings |= found
        elif isinstance(found, Content):
            self.more |= found
        else:
            self.rows.append(dict(found))

    def show(self, title: str) -> None:
        """Prints the rows as a table."""
        if self.rows:
            print_markdown(RENDERERS[self.kind](self.rows), title.format_map({"device": "", **self.settings}))

    def content(self) -> dict[str, Any]:
        """Makes what is written as JSON."""
        more = dict(self.more)
        device = more.pop("device", torch.device("cpu"))
        origin = provenance(device if isinstance(device, torch.device) else torch.device("cpu"))
        if isinstance(device, str):
            origin["device"] = device
        origin["versions"] = {**origin["versions"], **more.pop("versions", {})}  # type: ignore[dict-item]
        failures = {"failures": self.failures} if self.failures else {}
        return {"benchmark": self.kind, **origin, "settings": self.settings, **more, "rows": self.rows, **failures}


def loaded_settings(network: Any) -> Iterator[Found]:
    """Yields the dtype and the device of a model that was loaded."""
    yield Settings(dtype=str(network.dtype).removeprefix("torch."))
    yield Content(device=network.device)
