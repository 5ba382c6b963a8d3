"""A result that is written row by row, within a time limit, and that keeps account of what went wrong."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_plugins.console.results import provenance, write_json


class TimeIsUpError(Exception):
    """There is not enough time left for what was to come next."""


class TimeBox:
    """
    A limit on what is still begun.

    Args:
        seconds (`float`): from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, negative when time is up."""
        return self._end - time.monotonic()

    @property
    def is_up(self) -> bool:
        return self.left <= 0

    def require(self, seconds: float) -> None:
        """Raises a `TimeIsUpError` if fewer than `seconds` are left."""
        if self.left < seconds:
            raise TimeIsUpError


class PartialReport:
    """
    A result file, written anew after every change: a run that is cut short leaves what it has.

    Args:
        path (`Path`): the JSON file.
        benchmark (`str`): the kind, which decides how a table is made of it.
        device (`torch.device`): where it was measured.
        settings (`dict[str, object]`): what it was measured with.
    """

    def __init__(self, path: Path, benchmark: str, device: torch.device, settings: dict[str, object]) -> None:
        self.path, self.settings = path, settings
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self._origin = {"benchmark": benchmark, **provenance(device)}
        self.save()

    def add(self, row: dict[str, Any]) -> None:
        """Adds a row."""
        self.rows.append(row)
        self.save()

    def fail(self, what: str, reason: str) -> None:
        """Notes what there is no row of, and why."""
        typer.echo(f"  {what}: {reason}")
        self.failures.append({"what": what, "reason": reason})
        self.save()

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """
        Turns any error inside into a failure of `what`; what comes after goes on.

        Any: time on a GPU machine is lent, and a kernel, a driver or a peer's cache can raise whatever it likes. What
        was measured before and can be measured after is worth having all the same; nothing is passed over in silence.
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
        """Writes the file as things stand."""
        content = {**self._origin, "settings": self.settings, "rows": self.rows, "failures": self.failures}
        write_json(self.path, content)
