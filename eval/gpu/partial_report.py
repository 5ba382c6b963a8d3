"""A result that is written row by row, within a time limit, and that keeps account of what went wrong."""

import time
import traceback
from pathlib import Path
from types import TracebackType
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

    def attempt(self, what: str) -> "Attempt":
        """A context in which an error becomes a failure of `what`, and what comes after goes on."""
        return Attempt(self, what)

    def save(self) -> None:
        """Writes the file as things stand."""
        content = {**self._origin, "settings": self.settings, "rows": self.rows, "failures": self.failures}
        write_json(self.path, content)


class Attempt:
    """
    Turns any error inside into a failure in a report.

    Any: time on a GPU machine is lent, and a kernel, a driver or a peer's cache can raise whatever it likes. What was
    measured before and what can be measured after is worth having all the same; nothing is passed over in silence.
    """

    def __init__(self, report: PartialReport, what: str) -> None:
        self._report, self._what = report, what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        if isinstance(error, TimeIsUpError):
            self._report.fail(self._what, "skipped: time")
            return True
        place = traceback.extract_tb(trace)[-1]
        text = " ".join(str(error).split())
        where = f"{Path(place.filename).name}:{place.lineno}"
        self._report.fail(self._what, f"{type(error).__name__}: {text[:500]} ({where})")
        return True
