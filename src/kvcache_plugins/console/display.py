"""Consoles, tables and progress, for terminals and pipes alike.

Results go to standard output; progress and errors go to standard error, so that a pipe holds results alone.
"""

import itertools
import os
import re
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.text import Text


if TYPE_CHECKING:
    from rich.table import Table


# Width of a pipe without COLUMNS: that of most terminals
PIPE_WIDTH = 80
MIN_NAME_WIDTH = 9
_WIDEST = 1000
_QUOTED = re.compile("`[^`]*`")
# Placeholder of a space at which no line may end
_NO_BREAK = "\0"
Announce = Callable[[str], None]


def open_console(stderr: bool = False) -> Console:
    """Open a console, which is plain if there is no terminal."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process with exit code 1
        raise


def print_line(text: str, *, stderr: bool = False, style: str | None = None) -> None:
    """
    Print a line, wrapped between words to the console's width; a text in backticks, to be copied, is not wrapped.
    """
    console = open_console(stderr)
    indent = text[: len(text) - len(text.lstrip())]
    whole = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    folder = textwrap.TextWrapper(console.width, "", indent, break_long_words=False, break_on_hyphens=False)
    console.print(folder.fill(whole).replace(_NO_BREAK, " "), style=style, markup=False, soft_wrap=True)


def make_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> "Table":
    """
    Make a table. Columns are a `name` (wrapped), a `word` (not wrapped), a `number` (right-aligned, not wrapped) or a
    `text` (cut).
    """
    from rich.table import Table

    # `Text`, so that brackets in generated text are no markup
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.pad_edge = False
    # The edge is an empty line, and without a title `head -1` would show nothing else
    table.show_edge = bool(title)
    for index, (heading, kind) in enumerate(columns.items()):
        # A heading may have several lines
        widest = max([*map(len, heading.splitlines()), *(len(row[index]) for row in rows if kind == "word")])
        table.add_column(
            heading,
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "name",
            overflow="fold" if kind == "name" else "ellipsis",
            min_width=MIN_NAME_WIDTH if kind == "name" else widest,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def measure_table(console: Console, table: "Table") -> int:
    """Return the width of a table in which nothing is cut."""
    return console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum


@contextmanager
def track_progress(total: int) -> Iterator[Announce]:
    """
    Yield a function to call before each of `total` steps: on a terminal it moves a bar, elsewhere it prints a line to
    standard error.
    """
    console = open_console(stderr=True)
    if not console.is_terminal:
        started = time.perf_counter()
        printed = [""]

        def announce(description: str) -> None:
            if description != printed[-1]:
                printed.append(description)
                console.print(f"[{time.perf_counter() - started:4.0f} s] {description}", markup=False, soft_wrap=True)

        yield announce
        return
    from rich.progress import Progress

    steps = itertools.count()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda description: progress.update(task, description=description, completed=next(steps))
