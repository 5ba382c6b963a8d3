"""Help without arguments, errors in one line, and exit codes that mean something, alike for every command.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | done, but something failed: a cache of `compare`, a run of `eval sweep`, a check of `doctor` |
| 2 | the user's error: one line on standard error says which |
| 130 | interrupted by Ctrl-C |
| 141 | whoever read the output has gone, as after `| head` |

An error that nobody foresaw keeps its traceback: it is a bug.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import typer
from typer.core import TyperGroup

from .interrupts import INTERRUPTED


DONE, FAILED, USER_ERROR, READER_GONE = 0, 1, 2, 141

# Of click, or of the copy of click that newer releases of Typer carry; its subclass is the one that both export
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])


class CommandGroup(TyperGroup):
    """A group of commands that ends with the exit codes above; a group inside a group shows its help alike."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _reader_may_go():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _reader_may_go():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Newer releases of click take that for an error, with exit code 2
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(DONE)
        return super().parse_args(ctx, args)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line and raises `SystemExit`; without `standalone_mode` as Typer does."""
        options = {**extra, "complete_var": complete_var, "windows_expand_args": windows_expand_args}
        if not standalone_mode:
            return super().main(args, prog_name, standalone_mode=False, **options)
        try:
            code = super().main(args, prog_name, standalone_mode=False, **options)
            # What is still in the buffer would otherwise fail when nobody can catch it any more
            sys.stdout.flush()
        except _ClickException as error:
            code = _report_usage(error)
        except BrokenPipeError:
            code = READER_GONE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        if code == INTERRUPTED:
            typer.echo("Interrupted", err=True)
        if code == READER_GONE:
            _let_go_of_output()
        raise SystemExit(code or DONE)


@contextmanager
def _reader_may_go() -> Iterator[None]:
    # Typer would end the process by itself, with exit code 1
    try:
        yield
    except BrokenPipeError as error:
        raise typer.Exit(READER_GONE) from error


def _report_usage(error: Any) -> int:
    message = " ".join(str(error.format_message()).split())
    context = getattr(error, "ctx", None)
    hint = "" if context is None else f" (see `{context.command_path} --help`)"
    typer.echo(f"Error: {message.removesuffix('.')}{hint}", err=True)
    return USER_ERROR


def _let_go_of_output() -> None:
    # The interpreter flushes once more when it ends, and would complain
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
