"""Consoles and tables, for terminals and pipes alike.

Results go to standard output; progress and errors go to standard error, so that a pipe holds results alone.
"""

import os
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


# A pipe has no width to fit unless COLUMNS says one, so nothing is cut or folded there
PIPE_WIDTH = 160
MIN_NAME_WIDTH = 10


def open_console(stderr: bool = False) -> Console:
    """A console that is plain, and wide enough for every column, where there is no terminal."""
    console = _Console(stderr=stderr, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return _Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process by itself, with exit code 1
        raise


def print_line(text: str, *, stderr: bool = False) -> None:
    """A line as it is, however long."""
    open_console(stderr).print(text, markup=False, soft_wrap=True)


def make_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Table:
    """
    A table without vertical lines, for terminals and pipes alike.

    Args:
        title (`str`): The line above the table; none if empty.
        columns (`Mapping[str, str]`):
            What each column is, by heading: `name` (folded where it does not fit), `number` (to the right, never cut)
            or `text` (cut where it does not fit).
        rows (`Sequence[Sequence[str]]`): The cells.
    """
    # `Text`, so that brackets in generated text are not read as markup
    table = Table(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    table.padding, table.pad_edge = (0, 1, 0, 0), False
    # Its edge is an empty line: before the first word of an output it would be all that `head -1` shows
    table.show_edge = bool(title)
    for heading, kind in columns.items():
        table.add_column(
            heading,
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "name",
            overflow="fold" if kind == "name" else "ellipsis",
            min_width=MIN_NAME_WIDTH if kind == "name" else max(map(len, heading.splitlines())),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
