"""`kvcache-plugins` itself: its commands by name, and `--version`.

Results go to standard output, with `--json` as JSON; progress, timings and errors to standard error.
"""

from importlib import metadata
from typing import Annotated

import typer

from kvcache_plugins.console.lazy_group import LazyCommand, LazyGroup, make_app


class RootGroup(LazyGroup):
    """What `kvcache-plugins` is followed by."""

    lazy_commands = {
        "list": LazyCommand("kvcache_plugins.cli.list_caches:main", "List the caches that --cache takes."),
        "doctor": LazyCommand(
            "kvcache_plugins.cli.doctor:main", "Show versions, devices, kernels and models, and what is missing."
        ),
        "models": LazyCommand(
            "kvcache_plugins.cli.models:main", "Try caches on a tiny random model of every decoder family."
        ),
        "generate": LazyCommand("kvcache_plugins.cli.generate:main", "Continue a prompt through a cache."),
        "store": LazyCommand("kvcache_plugins.cli.store:app", "Show, check and clear the prompts that are kept."),
        "compare": LazyCommand("kvcache_plugins.cli.compare:main", "Run several caches on one prompt, side by side."),
        "calibrate": LazyCommand(
            "kvcache_plugins.cli.calibrate:main", "Calibrate InfiniGen or GEAR's transform coding."
        ),
        "plan": LazyCommand("kvcache_plugins.cli.plan:main", "Plan the slices of a prompt for KV-Runahead's ranks."),
        "recommend": LazyCommand("kvcache_plugins.cli.recommend:main", "Tell which caches fit a memory budget."),
        "bench": LazyCommand(
            "kvcache_plugins.cli.bench:app", "Benchmarks of attention, decode steps, memory and prefixes."
        ),
        "eval": LazyCommand("kvcache_plugins.cli.evaluate:app", "Evaluation with the cache in the loop."),
    }


_HELP = """KV caches for Hugging Face Transformers that hold less, move less and start sooner.

Results go to standard output, with --json as one JSON document and nothing else; progress and errors go to
standard error.

\b
Exit codes:
    0    done
    1    done, but something failed: a cache of compare, a run of eval sweep, a check of doctor
    2    your error: one line says which
    130  interrupted
    141  whoever read the output has gone, as after `| head`

\b
Examples:
    kvcache-plugins doctor
    kvcache-plugins list
    kvcache-plugins generate --cache gear --prompt "Once upon a time"
    kvcache-plugins compare --prompt-file LICENSE --max-new-tokens 32
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear --tasks copa
    kvcache-plugins recommend --memory 100MB --context 8192
    kvcache-plugins bench kernels
"""

app = make_app(RootGroup, _HELP)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvcache-plugins {metadata.version('kvcache-plugins')}")
        raise typer.Exit()


@app.callback()
def kvcache_plugins(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Takes the place of the group's own, which has no option."""
