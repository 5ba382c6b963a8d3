"""`python -m kvcache_plugins.contract`: the contract grid of registered caches, as Markdown."""

from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedModel

from kvcache_plugins.models.reference_model import load_model
from kvcache_plugins.registry import CacheEntry, create_cache, describe_caches

from .runner import CONTRACT, CheckResult, render_grid, run_contract, tiny_models
from .subject import ContractCheck, Tokenizer


TINY = "tiny"

app = typer.Typer(add_completion=False)


@app.command()
def main(
    model: Annotated[str, typer.Option(help=f"`{TINY}`, a reference model, or a name or path.")] = TINY,
    cache: Annotated[list[str] | None, typer.Option(help="Name or pattern, repeatable; by default all.")] = None,
    item: Annotated[list[str] | None, typer.Option(help="Item of the contract, repeatable; by default all.")] = None,
    details: Annotated[
        bool, typer.Option(help="List below the grid what raised and what failed, with the error.")
    ] = True,
) -> None:
    """Prints which items of the cache contract the registered caches keep: `yes`, `raises` or `FAILS`."""
    entries = _entries(cache or ["*"])
    checks = _checks(item or [])
    loaded, tokenizer = (tiny_models()["llama"], None) if model == TINY else load_model(model)
    results = _run(loaded, tokenizer, entries, checks)
    typer.echo(render_grid(results))
    for entry in entries:
        if not entry.is_available:
            typer.echo(f"\n`{entry.name}` was not run: it needs {entry.requires}.")
    if details:
        _print_details(results)


def _entries(patterns: list[str]) -> list[CacheEntry]:
    entries = {entry.name: entry for pattern in patterns for entry in describe_caches(pattern)}
    if not entries:
        raise typer.BadParameter(f"no registered cache matches {patterns}", param_hint="--cache")
    return list(entries.values())


def _checks(names: list[str]) -> list[ContractCheck]:
    known = [check.name for check in CONTRACT]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"unknown items {unknown}, known are {known}", param_hint="--item")
    return [check for check in CONTRACT if not names or check.name in names]


def _run(
    model: PreTrainedModel, tokenizer: Tokenizer, entries: list[CacheEntry], checks: list[ContractCheck]
) -> dict[str, list[CheckResult]]:
    available = [entry.name for entry in entries if entry.is_available]
    results = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(available) * len(checks))
        for name in available:
            progress.update(task, description=name)
            results[name] = run_contract(
                model,
                partial(create_cache, name, model),
                make_cache_for=partial(create_cache, name),
                tokenizer=tokenizer,
                checks=checks,
                on_result=lambda result: progress.advance(task),
            )
    return results


def _print_details(results: dict[str, list[CheckResult]]) -> None:
    for cache, found in results.items():
        for result in found:
            if result.status != "pass":
                typer.echo(f"\n- `{cache}`, {result.name}: {result.detail}")


if __name__ == "__main__":
    app()
