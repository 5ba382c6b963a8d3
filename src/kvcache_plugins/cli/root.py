"""`kvcache-plugins` itself: its commands by name, and `--version`.

Results go to standard output, with `--json` as JSON; progress, timings and errors to standard error.
"""

from importlib import metadata
from typing import Annotated

import typer

from kvcache_plugins.console.lazy_group import LazyGroup, make_app


class RootGroup(LazyGroup):
    """Commands of `kvcache-plugins`."""

    lazy_commands = {
        "list": "kvcache_plugins.cli.list_caches:main",
        "doctor": "kvcache_plugins.cli.doctor:main",
        "models": "kvcache_plugins.eval.families:survey_families",
        "generate": "kvcache_plugins.cli.generate:main",
        "store": "kvcache_plugins.cli.store:app",
        "compare": "kvcache_plugins.cli.compare:main",
        "calibrate": "kvcache_plugins.cli.calibrate:main",
        "plan": "kvcache_plugins.cli.plan:main",
        "recommend": "kvcache_plugins.cli.recommend:main",
        "bench": "kvcache_plugins.cli.bench:app",
        "eval": "kvcache_plugins.cli.evaluate:app",
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
