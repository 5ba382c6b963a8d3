"""A group of commands of which only the one that runs is imported: help and completion import none.

Torch and Transformers take seconds to import. A command is a plain function, anywhere: its signature declares options,
its docstring is the help, and its module imports at the top what it needs. For help a group reads the function's
source.
"""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar

import typer

from kvcache_plugins.lazy_imports import load

from .command_group import CommandGroup
from .errors import with_user_errors
from .json_output import with_results


_WIDTH = 80


class LazyGroup(CommandGroup):
    """
    A group whose subclass names its commands. Users' errors in them become one line, see `user_errors`.

    Attributes:
        lazy_commands (`Mapping[str, str]`):
            `module:attribute` of each command's function, or of a `typer.Typer`, whose module is imported for help
            too. A function that returns its results gets `--out` and `--json`, see `with_results`.
    """

    lazy_commands: ClassVar[Mapping[str, str]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.lazy_commands:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _build(cmd_name, self.lazy_commands[cmd_name])
        return self.commands[cmd_name]

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


def make_app(group: type[CommandGroup], help_text: str) -> typer.Typer:
    """Makes a `typer.Typer` with the settings that all groups share."""
    app = typer.Typer(
        cls=group, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=help_text
    )
    # Without one Typer takes an app that has no commands of its own for an error
    app.callback()(_nothing)
    return app


def _nothing() -> None:
    pass


def _build(name: str, target: str) -> Any:
    function = read_function(target)
    if function is None:
        found = load(target)
    else:
        if inspect.signature(function).return_annotation is not None:
            function = with_results(function)
        found = typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(with_user_errors(function))
    command = typer.main.get_command(found)
    command.name = name
    return command


def read_function(target: str) -> Callable[..., Any] | None:
    """
    Reads signature and docstring of a function from its module's source, of which nothing runs but what they name.

    Args:
        target (`str`): `module:name`.

    Returns:
        `Callable` or `None`: Imports the module and calls the function, once it is called. `None` if `name` is not
        defined as a function there.
    """
    module, _, name = target.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(f"there is no module {module}")
    statements: dict[str, ast.stmt] = {}
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        statements |= dict.fromkeys(_defined_names(statement), statement)
    found = statements.get(name)
    if not isinstance(found, ast.FunctionDef):
        return None
    found.decorator_list, found.body = [], [ast.Expr(ast.Constant(ast.get_docstring(found, clean=False) or ""))]
    namespace: dict[str, Any] = {"__name__": module, "__package__": module.rpartition(".")[0]}

    def run(statement: ast.stmt) -> None:
        for node in ast.walk(statement):
            read = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""
            if read in statements and read not in namespace:
                run(_only(statements[read], read))
        code = ast.Module(body=[ast.fix_missing_locations(statement)], type_ignores=[])
        exec(compile(code, spec.origin or module, "exec", dont_inherit=True), namespace)

    run(found)
    stub = namespace[name]

    @wraps(stub)
    def function(*args: Any, **options: Any) -> Any:
        return load(target)(*args, **options)

    return function


def _defined_names(statement: ast.stmt) -> list[str]:
    """Lists the names that an import, a definition or an assignment at the top of a module defines."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    stored = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
    return [node.id for node in stored if isinstance(node.ctx, ast.Store)] if isinstance(statement, ast.Assign) else []


def _only(statement: ast.stmt, name: str) -> ast.stmt:
    """Cuts an import down to `name`."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        names = [alias for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name]
        return type(statement)(**{**vars(statement), "names": names})
    return statement
