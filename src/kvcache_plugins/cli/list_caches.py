"""`kvcache-plugins list`: what the registry knows, without Torch or Transformers but to ask for a GPU."""

from typing import Annotated

import typer

from kvcache_plugins.console.json_output import JsonOption, print_json
from kvcache_plugins.registry import CacheEntry, describe_caches, list_caches


def main(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of names, such as 'gear*'.")] = "*",
    as_json: JsonOption = False,
) -> None:
    """List the caches that --cache takes.

    What each name stands for, and whether what it needs is installed.

    \b
    Examples:
        kvcache-plugins list
        kvcache-plugins list 'gear*'
        kvcache-plugins list --json | jq -r '.caches[] | select(.is_available) | .name'
    """
    entries = describe_caches(pattern)
    if not entries:
        raise ValueError(f"No cache matches `{pattern}`. Known caches: {', '.join(list_caches())}")
    if as_json:
        print_json({"caches": [_entry_fields(entry) for entry in entries]})
        return
    from kvcache_plugins.console.tables import make_table, open_console

    columns = {"cache": "name", "what it is": "name", "options": "name", "needs": "name"}
    open_console().print(make_table("", columns, [_entry_cells(entry) for entry in entries]))


def _entry_fields(entry: CacheEntry) -> dict[str, object]:
    fields = {name: getattr(entry, name) for name in ("name", "summary", "requires", "is_available")}
    return {**fields, "options": dict(entry.options)}


def _entry_cells(entry: CacheEntry) -> tuple[str, ...]:
    options = " ".join(f"{name}={value}" for name, value in entry.options.items())
    needs = "-" if entry.requires is None else f"{entry.requires}: {'found' if entry.is_available else 'missing'}"
    return entry.name, entry.summary, options or "-", needs
