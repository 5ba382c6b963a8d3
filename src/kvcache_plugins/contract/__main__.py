"""`python -m kvcache_plugins.contract`: the contract's grid of registered caches, as Markdown."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.models.reference_model import load_model
from kvcache_plugins.registry import create_cache, describe_caches

from .runner import CONTRACT, CheckResult, render_grid, run_contract, tiny_models


TINY = "tiny"


def main(
    model: Annotated[str, typer.Option(help=f"`{TINY}`, a reference model, or a name or path.")] = TINY,
    cache: Annotated[list[str] | None, typer.Option(help="Name or pattern, repeatable; by default all.")] = None,
) -> None:
    """Print the contract's results for the registered caches: `yes`, `raises` or `FAILS`, and the errors."""
    entries = {entry.name: entry for pattern in cache or ["*"] for entry in describe_caches(pattern)}
    if not entries:
        raise typer.BadParameter(f"no registered cache matches {cache}", param_hint="--cache")
    loaded = tiny_models()["llama"] if model == TINY else load_model(model)[0]
    results = {}
    available = [name for name, entry in entries.items() if entry.is_available]
    with track_progress(len(available) * len(CONTRACT)) as announce:
        for name in available:
            results[name] = run_contract(
                loaded,
                partial(create_cache, name, loaded),
                make_cache_for=partial(create_cache, name),
                on_result=partial(_announce_item, announce, name),
            )
    typer.echo(render_grid(results))
    for name, entry in entries.items():
        if not entry.is_available:
            typer.echo(f"\n`{name}` was not run: it needs {entry.requires}.")
        for result in results.get(name, ()):
            if result.status != "pass":
                typer.echo(f"\n- `{name}`, {result.name}: {result.detail}")


def _announce_item(announce: Callable[[str], None], name: str, result: CheckResult) -> None:
    announce(name)


if __name__ == "__main__":
    typer.run(main)
