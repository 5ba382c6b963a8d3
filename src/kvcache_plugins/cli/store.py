"""`kvcache-plugins store`: the prompts that are kept in a folder, shown, checked and cleared."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.commands import FAILED
from kvcache_plugins.console.display import make_table, open_console, print_line
from kvcache_plugins.console.inputs import JsonOption
from kvcache_plugins.console.results import print_json


_SHOWN = 12

StoreOption = Annotated[Path | None, typer.Option(help="The folder; by default in the user's cache folder.")]


def list_kept(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List the prompts that are kept.

    A prompt that is the beginning of another one is not listed; bytes that several share count in each.

    \b
    Examples:
        kvcache-plugins store list
        kvcache-plugins store list --store prompts --json
    """
    from kvcache_plugins.prompt_store.maintenance import list_prompts
    from kvcache_plugins.prompt_store.store import default_folder

    prompts = list_prompts(store or default_folder())
    if as_json:
        print_json({"prompts": prompts})
        return
    columns = {"key": "text", "model": "name", "tokens": "number", "MB": "number", "used": "text"}
    rows = []
    for each in prompts:
        used = datetime.fromtimestamp(each["used_at"], timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        sizes = str(each["num_tokens"]), f"{each['num_bytes'] / 1e6:.1f}"
        rows.append((each["key"][:_SHOWN], each["model_name"], *sizes, used))
    open_console().print(make_table("", columns, rows))


def clear_kept(store: StoreOption = None) -> None:
    """Remove all prompts but those in use.

    \b
    Examples:
        kvcache-plugins store clear --store prompts
    """
    from kvcache_plugins.prompt_store.maintenance import clear
    from kvcache_plugins.prompt_store.store import default_folder

    count, num_bytes = clear(store or default_folder())
    print_line(f"{count} blocks removed, {num_bytes / 1e6:.1f} MB")


def verify(
    store: StoreOption = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the files that are damaged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read every file and name those that are damaged.

    Exit code 1 if there are any. Damaged files do no harm: a prompt that needs one is read again from there.

    JSON: damaged (why, by file) and removed.

    \b
    Examples:
        kvcache-plugins store verify
        kvcache-plugins store verify --store prompts --remove
    """
    from kvcache_plugins.prompt_store.maintenance import find_damaged
    from kvcache_plugins.prompt_store.store import default_folder

    damaged = find_damaged(store or default_folder(), remove=remove)
    if as_json:
        print_json({"damaged": {str(path): reason for path, reason in damaged.items()}, "removed": remove})
    else:
        for reason in damaged.values():
            print_line(reason)
        print_line(f"{len(damaged)} damaged files{' removed' if remove and damaged else ''}")
    if damaged:
        raise typer.Exit(FAILED)
