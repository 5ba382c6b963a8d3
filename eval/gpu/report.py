"""A run of `bench gpu`: results that are written row by row, within a time limit, and say what went wrong."""

import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer

from kvcache_plugins.console.results import provenance, write_json


class TimeIsUpError(Exception):
    """There is not enough time left for what was to come next."""


class TimeBox:
    """A limit of so many seconds, from now on, on what is still begun."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        # Seconds of the longest step so far
        self.longest = 0.0

    @property
    def left(self) -> float:
        """Seconds left, negative when time is up."""
        return self._end - time.monotonic()

    def require(self, margin: float = 1.5) -> None:
        """Raises a `TimeIsUpError` if less is left than `margin` times the longest step so far."""
        if self.left < margin * self.longest:
            raise TimeIsUpError

    @contextmanager
    def step(self, margin: float = 1.5) -> Iterator[None]:
        """Enters a step, if there is time for it."""
        self.require(margin)
        start = time.monotonic()
        yield
        self.longest = max(self.longest, time.monotonic() - start)

    def share(self, count: int) -> "TimeBox":
        """Makes the box of the first of `count` things that share what is left."""
        return TimeBox(self.left / count)


class PartialReport:
    """A result file of a kind, written anew after every change: a run that is cut short leaves what it has."""

    def __init__(self, path: Path, benchmark: str, device: torch.device, settings: Mapping[str, Any]) -> None:
        self.path, self.settings = path, dict(settings)
        self.rows: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []
        self._origin = {"benchmark": benchmark, **provenance(device)}
        self.save()

    def add(self, row: dict[str, Any], says: str = "") -> None:
        """Adds a row, and says it."""
        self.rows.append(row)
        self.save()
        if says:
            typer.echo(says)

    def add_timed(self, rows: list[dict[str, Any]]) -> None:
        """Adds rows of timings, and says their medians and quartiles."""
        for row in rows:
            lower, median, upper = (1e3 * row[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
            name = row.get("cache", row.get("name"))
            self.add(row, f"{name}: {median:.3f} ms ({lower:.3f} to {upper:.3f})")

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


@dataclass(frozen=True, slots=True)
class Run:
    """A part's run: where its files go, on which device it is, and its time."""

    out: Path
    device: torch.device
    box: TimeBox

    def report(self, name: str, kind: str, **settings: Any) -> PartialReport:
        """Opens the result `gpu_{name}.json`."""
        return PartialReport(self.out / f"gpu_{name}.json", kind, self.device, settings)
