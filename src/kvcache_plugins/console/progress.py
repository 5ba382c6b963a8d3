"""Progress on standard error: a bar on a terminal, elsewhere a line whenever what is being done changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .tables import open_console


if TYPE_CHECKING:
    from rich.console import Console


Announce = Callable[[str], None]

_DRAWN: ContextVar[Progress | None] = ContextVar("_DRAWN", default=None)


@contextmanager
def track_progress(total: int) -> Iterator[Announce]:
    """
    Shows progress on standard error: a bar on a terminal, elsewhere a line whenever what is being done changes.

    Yields a function to call before each of the `total` steps, with what is being done.
    """
    console = open_console(stderr=True)
    if not console.is_terminal:
        yield _LineProgress(console)
        return
    with open_progress() as progress:
        task = progress.add_task("", total=total)
        steps = itertools.count()
        yield lambda description: progress.update(task, description=description, completed=next(steps))


@contextmanager
def open_progress() -> Iterator[Progress]:
    """Bars on standard error: those that are drawn already, if any, as a terminal has room for one display."""
    drawn = _DRAWN.get()
    if drawn is not None:
        yield drawn
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = open_console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        before = _DRAWN.set(progress)
        try:
            yield progress
        finally:
            _DRAWN.reset(before)


class _LineProgress:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.started = time.perf_counter()
        self.description = ""

    def __call__(self, description: str) -> None:
        if description != self.description:
            elapsed = time.perf_counter() - self.started
            self.console.print(f"[{elapsed:4.0f} s] {description}", markup=False)
        self.description = description
