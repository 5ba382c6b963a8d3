"""A group of commands of which only the one that is called is imported: help and completion import none.

Torch and Transformers take seconds to import. A group knows its commands by name, with one line of help each; the
modules of commands declare their options, and import what they need in the function that runs.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

import typer

from kvcache_plugins.lazy_imports import load

from .command_group import CommandGroup
from .errors import with_user_errors


class LazyCommand(NamedTuple):
    """
    A command that is not imported yet.

    Args:
        target (`str`): `module:attribute` of its function, or of a `typer.Typer` of its own.
        summary (`str`): what the group's help says of it; the beginning of its own help.
    """

    target: str
    summary: str


class LazyGroup(CommandGroup):
    """A group whose subclass names its commands. Users' errors in them become one line, see `user_errors`."""

    lazy_commands: ClassVar[Mapping[str, LazyCommand]] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.lazy_commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.lazy_commands:
            return None
        if cmd_name not in self.commands:
            self.commands[cmd_name] = _build(cmd_name, self.lazy_commands[cmd_name].target)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        # Typer looks for a misspelt command among those that are imported
        if args and not args[0].startswith("-") and args[0] not in self.lazy_commands and not ctx.resilient_parsing:
            close = get_close_matches(args[0], self.lazy_commands, n=1)
            ctx.fail(f"No such command {args[0]!r}." + (f" Did you mean {close[0]!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self.lazy_commands.items()])


def make_app(group: type[CommandGroup], help_text: str) -> typer.Typer:
    """A `typer.Typer` with the settings that all groups share."""
    app = typer.Typer(
        cls=group, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, help=help_text
    )
    # Without one Typer takes an app that has no commands of its own for an error
    app.callback()(_nothing)
    return app


def _nothing() -> None:
    pass


def _build(name: str, target: str) -> Any:
    found = load(target)
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(with_user_errors(function))
    command = typer.main.get_command(found)
    command.name = name
    return command
