"""Commands as plain functions, alike in help, errors and exit codes.

The help of `kvcache-plugins` says what exit codes mean. An unexpected error keeps its traceback: it is a bug.

A command is a function: its signature declares options, and its docstring is the help. Help and completion import the
modules of all commands of a group, and Torch and Transformers take seconds to import: so such a module imports neither
at its top, and the function imports what it runs.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperGroup

from kvcache_plugins.lazy_imports import load

from .interrupts import INTERRUPTED
from .results import declare_result_options, write_results


# Exit codes
DONE = 0
FAILED = 1
USER_ERROR = 2
READER_GONE = 141
# Base of errors in click, or in the copy of click that newer releases of Typer have; both export only a subclass
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])
_WIDTH = 80


@contextmanager
def user_errors() -> Iterator[None]:
    """Report errors that a user can cause (a wrong option, a missing package or file) in one line, and exit with 2."""
    try:
        yield
    except BrokenPipeError:
        # No error: the reader has read enough
        raise
    except Exception as error:
        # The user can choose a smaller model, prompt or cache; the error cannot come if Torch is not imported
        torch = sys.modules.get("torch")
        caused = (ValueError, ImportError, OSError, NotImplementedError)
        if not isinstance(error, caused if torch is None else (*caused, torch.OutOfMemoryError)):
            raise
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(USER_ERROR) from error


class LazyGroup(TyperGroup):
    """Group of `lazy_commands` by name: `module:attribute` of a function or of a `typer.Typer`."""

    lazy_commands: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.lazy_commands and cmd_name not in self.commands:
            self.commands[cmd_name] = _load_command(cmd_name, self.lazy_commands[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer looks for a misspelt command among those that are imported
        if args and not args[0].startswith("-") and args[0] not in self.lazy_commands and not ctx.resilient_parsing:
            close = get_close_matches(args[0], self.lazy_commands, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # Click would cut summaries that fit
        commands = {name: self.get_command(ctx, name) for name in self.lazy_commands}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_WIDTH)) for name, command in commands.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Newer releases of click make it an error, with exit code 2
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(DONE)
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run a command line and raise `SystemExit`; without `standalone_mode`, do as Typer does."""
        # Torch reads it when it is loaded. Threads that spin while they wait make a busy machine many times slower
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        is_alone = options.get("standalone_mode", True)
        options["standalone_mode"] = False
        if not is_alone:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
            # Write the rest of the buffer here, where an error can still be caught
            sys.stdout.flush()
        except _ClickException as error:
            message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see `{context.command_path} --help`)"
            typer.echo(f"Error: {message.removesuffix('.')}{hint}", err=True)
            code = USER_ERROR
        except (BrokenPipeError, SystemExit) as error:
            # Typer raises `SystemExit` with code 1 when the reader of the output has closed it
            if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
                raise
            code = READER_GONE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        if code == INTERRUPTED:
            typer.echo("Interrupted", err=True)
        elif code == READER_GONE:
            # The interpreter flushes once more when it ends, and would print an error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(code or DONE)


def make_app(commands: Mapping[str, str], help_text: str) -> typer.Typer:
    """Make a `typer.Typer` of the `lazy_commands`, with the settings that all groups share."""
    group = cast("type[LazyGroup]", type("LazyGroup", (LazyGroup,), {"lazy_commands": commands}))
    settings = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    app = typer.Typer(cls=group, help=fold_examples(help_text), **settings)  # type: ignore[arg-type]
    # Without a callback, an app that has no commands of its own is an error in Typer
    app.callback()(lambda: None)
    return app


def fold_examples(text: str) -> str:
    """Fold indented lines of a help text that are too wide, before an option or a pipe, as a shell reads them."""

    def fold(line: str) -> str:
        place = max(line.rfind(mark, 9, _WIDTH - 4) for mark in (" --", " | "))
        is_folded = place > 0 and len(line) > _WIDTH - 2 and line.startswith("    ")
        return f"{line[:place]} \\\n{fold(' ' * 8 + line[place + 1 :])}" if is_folded else line

    return "\n".join(map(fold, inspect.cleandoc(text).splitlines()))


def _load_command(name: str, target: str) -> Any:
    """Import a function or an app, and return its command."""
    found = load(target)
    command = typer.main.get_command(found) if isinstance(found, typer.Typer) else _make_command(found)
    command.name = name
    return command


def _make_command(function: Callable[..., Any]) -> Any:
    """Make a command of a function; one that returns results also has `--out` and `--json`."""
    command = _read_options(function)
    if inspect.signature(function).return_annotation is not None:
        command.params.extend(_read_options(declare_result_options).params)
        command.callback = write_results(command.callback)
    command.callback = user_errors()(command.callback)
    return command


def _read_options(function: Callable[..., Any]) -> Any:
    """Make a command of a function's signature and docstring, as Typer does."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(help=fold_examples(function.__doc__ or ""))(function)
    return typer.main.get_command(app)
