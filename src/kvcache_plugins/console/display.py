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

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text


# A pipe has the width that COLUMNS says, or that of most terminals
PIPE_WIDTH = 80
MIN_NAME_WIDTH = 9
_QUOTED = re.compile("`[^`]*`")
# Stands for a space where no line may end
_NO_BREAK = "\0"
Announce = Callable[[str], None]


def open_console(stderr: bool = False) -> Console:
    """Opens a console, plain where there is no terminal."""
    console = _Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process by itself, with exit code 1
        raise


def print_line(text: str, *, stderr: bool = False, style: str | None = None) -> None:
    """Prints a line, folded between words to the console's width; what stands in backticks, to copy, stays whole."""
    console = open_console(stderr)
    indent = text[: len(text) - len(text.lstrip())]
    whole = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), text)
    folder = textwrap.TextWrapper(console.width, "", indent, break_long_words=False, break_on_hyphens=False)
    console.print(folder.fill(whole).replace(_NO_BREAK, " "), style=style, markup=False, soft_wrap=True)


def make_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Table:
    """Makes a table; columns are a `name` (folded), a `word` (whole), a `number` (right, whole) or `text` (cut)."""
    # `Text`, so that brackets in generated text are not read as markup
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    # Its edge is an empty line: before the first word of an output it would be all that `head -1` shows
    table.show_edge = bool(title)
    for place, (heading, kind) in enumerate(columns.items()):
        # A heading may be of several lines
        widest = max([*map(len, heading.splitlines()), *(len(row[place]) for row in rows if kind == "word")])
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


@contextmanager
def track_progress(total: int) -> Iterator[Announce]:
    """Yields a function to call before each of `total` steps: a bar on a terminal, else lines on standard error."""
    console = open_console(stderr=True)
    if not console.is_terminal:
        started, said = time.perf_counter(), [""]

        def announce(description: str) -> None:
            if description != said[-1]:
                said.append(description)
                console.print(f"[{time.perf_counter() - started:4.0f} s] {description}", markup=False, soft_wrap=True)

        yield announce
        return
    steps = itertools.count()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda description: progress.update(task, description=description, completed=next(steps))
