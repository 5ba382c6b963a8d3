"""What the commands share: the model that options name, users' errors, and how results reach a terminal or a pipe.

Results go to standard output; progress and errors go to standard error, so that a pipe holds results alone.
"""

import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from kvcache_plugins.models.reference_model import load_model

from .command_group import USER_ERROR


# A pipe has no width to fit, so nothing is cut or folded there; every table fits 100 columns on its own.
PIPE_WIDTH = 160
MIN_NAME_WIDTH = 10

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Too large a model, prompt or cache is the user's matter as well
_USER_ERRORS = (ValueError, ImportError, OSError, NotImplementedError, torch.OutOfMemoryError)

Announce = Callable[[str], None]


def load_for_evaluation(
    name: str, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads the model and tokenizer that a command's options name.

    Args:
        name (`str`): A short name, a folder or a hub name, see `load_model`.
        dtype (`str`, *optional*): A key of `DTYPES`. Defaults to `float32` on CPU and `bfloat16` elsewhere.
        device (`str`, *optional*): Defaults to a CUDA device where there is one.
    """
    chosen = parse_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    parsed_dtype = parse_dtype(dtype or ("float32" if chosen.type == "cpu" else "bfloat16"))
    # Transformers would take it for a hub name and complain about its letters
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise ValueError(f"`model` is `{name}`, but there is no such folder")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load_model(name, dtype=parsed_dtype, device=chosen)


def parse_dtype(text: str) -> torch.dtype:
    """The dtype that a key of `DTYPES` names. Any other is a `ValueError`."""
    if text not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(f'`{each}`' for each in DTYPES)}, but got `{text}`")
    return DTYPES[text]


def parse_device(text: str) -> torch.device:
    """The device that `text` names. One that torch does not know or find is a `ValueError`."""
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ValueError(
            f"`device` must be one that torch knows, such as `cpu` or `cuda:0`, but got `{text}`"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` is `{text}`, but torch finds no CUDA device")
    return device


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a user can cause (a wrong option, a missing package or file) into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        # Nobody's error: the reader has what it wanted
        raise
    except _USER_ERRORS as error:
        open_console(stderr=True).print(f"Error: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        raise typer.Exit(USER_ERROR) from error


def with_user_errors(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, whose signature and help it keeps, with users' errors in one line: see `user_errors`."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        with user_errors():
            function(*args, **kwargs)

    return command


def open_console(stderr: bool = False) -> Console:
    """A console that is plain, and wide enough for every column, where there is no terminal."""
    console = _Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else _Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # Rich would end the process by itself, with exit code 1
        raise


def make_table(title: str, columns: Mapping[str, str], rows: Sequence[Sequence[str]]) -> Table:
    """
    A table without vertical lines, for terminals and pipes alike.

    Args:
        title (`str`): The line above the table.
        columns (`Mapping[str, str]`):
            What each column is, by heading: `name` (folded where it does not fit), `number` (to the right, never cut)
            or `text` (cut where it does not fit).
        rows (`Sequence[Sequence[str]]`): The cells.
    """
    # `Text`, so that brackets in generated text are not read as markup
    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading, kind in columns.items():
        table.add_column(
            heading,
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "name",
            overflow="fold" if kind == "name" else "ellipsis",
            min_width=MIN_NAME_WIDTH if kind == "name" else len(heading),
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        steps = itertools.count()
        yield lambda description: progress.update(task, description=description, completed=next(steps))


@contextmanager
def interrupts_are_ours() -> Iterator[None]:
    """
    Processes that are started inside ignore Ctrl-C, which a terminal sends to all of them: this one ends them.

    Otherwise each would print a traceback of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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
