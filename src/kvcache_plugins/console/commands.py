"""Commands as plain functions, alike in help, errors and exit codes; help and completion import none of them.

The help of `kvcache-plugins` says what exit codes mean. An error that nobody foresaw keeps its traceback: it is a bug.

Torch and Transformers take seconds to import. A command is a function, anywhere: its signature declares options, its
docstring is the help, and its module imports at the top what it needs. For help a group reads the function's source.
"""

import ast
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, cast

import typer
from typer.core import TyperGroup

from kvcache_plugins.lazy_imports import load

from .interrupts import INTERRUPTED
from .results import with_results


DONE, FAILED, USER_ERROR, READER_GONE = 0, 1, 2, 141
# Of click, or of the copy of click that newer releases of Typer carry; its subclass is the one that both export
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])
_WIDTH = 80


@contextmanager
def user_errors() -> Iterator[None]:
    """Turns what a user can cause (a wrong option, a missing package or file) into one line and exit code 2."""
    try:
        yield
    except BrokenPipeError:
        # Nobody's error: the reader has what it wanted
        raise
    except Exception as error:
        # Too large a model, prompt or cache is the user's matter as well; without Torch there is none
        torch = sys.modules.get("torch")
        caused = (ValueError, ImportError, OSError, NotImplementedError)
        if not isinstance(error, caused if torch is None else (*caused, torch.OutOfMemoryError)):
            raise
        typer.echo(f"Error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(USER_ERROR) from error


class LazyGroup(TyperGroup):
    """Groups `lazy_commands` by name, `module:attribute` of a function, see `with_results`, or of a `typer.Typer`."""

    lazy_commands: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in self.lazy_commands and cmd_name not in self.commands:
            self.commands[cmd_name] = _build(cmd_name, self.lazy_commands[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer looks for a misspelt command among those that are imported
        if args and not args[0].startswith("-") and args[0] not in self.lazy_commands and not ctx.resilient_parsing:
            close = get_close_matches(args[0], self.lazy_commands, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # Click would cut what fits
        commands = {name: self.get_command(ctx, name) for name in self.lazy_commands}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(_WIDTH)) for name, command in commands.items()])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # Newer releases of click take that for an error, with exit code 2
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(DONE)
        return super().parse_args(ctx, args)

    def main(self, *args: Any, **options: Any) -> Any:
        """Runs a command line and raises `SystemExit`; without `standalone_mode` as Typer does."""
        # Read when Torch is loaded. Threads that spin while they wait make a busy machine many times slower
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        is_alone, options["standalone_mode"] = options.get("standalone_mode", True), False
        if not is_alone:
            return super().main(*args, **options)
        try:
            code = super().main(*args, **options)
            # What is still in the buffer would otherwise fail when nobody can catch it any more
            sys.stdout.flush()
        except _ClickException as error:
            message = " ".join(str(error.format_message()).split())  # type: ignore[attr-defined]
            context = getattr(error, "ctx", None)
            hint = "" if context is None else f" (see `{context.command_path} --help`)"
            typer.echo(f"Error: {message.removesuffix('.')}{hint}", err=True)
            code = USER_ERROR
        except (BrokenPipeError, SystemExit) as error:
            # Typer ends the process by itself, with exit code 1, when whoever read has gone
            if not isinstance(error.__context__ if isinstance(error, SystemExit) else error, BrokenPipeError):
                raise
            code = READER_GONE
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        if code == INTERRUPTED:
            typer.echo("Interrupted", err=True)
        elif code == READER_GONE:
            # The interpreter flushes once more when it ends, and would complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(code or DONE)


def make_app(commands: Mapping[str, str], help_text: str) -> typer.Typer:
    """Makes a `typer.Typer` of the `lazy_commands` with the settings that all groups share."""
    group = cast("type[LazyGroup]", type("LazyGroup", (LazyGroup,), {"lazy_commands": commands}))
    settings = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
    app = typer.Typer(cls=group, help=fold_examples(help_text), **settings)  # type: ignore[arg-type]
    # Without one Typer takes an app that has no commands of its own for an error
    app.callback()(lambda: None)
    return app


def fold_examples(text: str) -> str:
    """Folds indented lines of a help text that are too wide, before an option or a pipe, as a shell reads them."""

    def fold(line: str) -> str:
        place = max(line.rfind(mark, 9, _WIDTH - 4) for mark in (" --", " | "))
        is_folded = place > 0 and len(line) > _WIDTH - 2 and line.startswith("    ")
        return f"{line[:place]} \\\n{fold(' ' * 8 + line[place + 1 :])}" if is_folded else line

    return "\n".join(map(fold, inspect.cleandoc(text).splitlines()))


def _build(name: str, target: str) -> Any:
    function = read_function(target)
    if function is None:
        found = load(target)
    else:
        function.__doc__ = fold_examples(function.__doc__ or "")
        if inspect.signature(function).return_annotation is not None:
            function = with_results(function)
        found = typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(user_errors()(function))
    command = typer.main.get_command(found)
    command.name = name
    return command


def read_function(target: str) -> Callable[..., Any] | None:
    """Makes a function, of signature and docstring in the source of `module:name`, that calls it; `None` if none."""
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {module}")
    statements: dict[str, ast.stmt] = {}
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        statements |= _definitions(statement)
    found = statements.get(name)
    if not isinstance(found, ast.FunctionDef):
        return None
    found.decorator_list, found.body = [], [ast.Expr(ast.Constant(ast.get_docstring(found, clean=False) or ""))]
    namespace: dict[str, Any] = {"__name__": module, "__package__": module.rpartition(".")[0]}

    def run(statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            read = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""
            if read in statements and read not in namespace:
                run(statements[read])
        code = ast.Module(body=[ast.fix_missing_locations(statement)], type_ignores=[])
        exec(compile(code, spec.origin or module, "exec", dont_inherit=True), namespace)

    run(found)

    @wraps(namespace[name])
    def function(*args: Any, **options: Any) -> Any:
        return load(target)(*args, **options)

    return function


def _definitions(statement: ast.stmt) -> dict[str, ast.stmt]:
    """Lists what a statement defines by name, each import by itself."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = {alias.asname or alias.name.partition(".")[0]: alias for alias in statement.names}
        return {name: type(statement)(**{**vars(statement), "names": [alias]}) for name, alias in names.items()}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name: statement}
    nodes = (node for node in ast.walk(statement) if isinstance(statement, ast.Assign) and isinstance(node, ast.Name))
    return {node.id: statement for node in nodes if isinstance(node.ctx, ast.Store)}
