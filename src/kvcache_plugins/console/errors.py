"""Errors that a user can cause, as one line on standard error and exit code 2."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import typer

from .command_group import USER_ERROR


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a user can cause (a wrong option, a missing package or file) into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        # Nobody's error: the reader has what it wanted
        raise
    except _user_errors() as error:
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(USER_ERROR) from error


def _user_errors() -> tuple[type[Exception], ...]:
    # Too large a model, prompt or cache is the user's matter as well; without Torch there is none
    torch = sys.modules.get("torch")
    own = (ValueError, ImportError, OSError, NotImplementedError)
    return own if torch is None else (*own, torch.OutOfMemoryError)


def with_user_errors(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, whose signature and help it keeps, with users' errors in one line: see `user_errors`."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> None:
        with user_errors():
            function(*args, **kwargs)

    return command
