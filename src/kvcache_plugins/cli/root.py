"""`kvcache-plugins` itself: its commands by name, in groups, and `--version`.

A benchmark declares its options where it measures, in `kvcache_plugins.eval`.
"""

from importlib import metadata
from typing import Annotated

import typer

from kvcache_plugins.console.commands import make_app


_HELP = """KV caches for Hugging Face Transformers that hold less, move less and start sooner.

Results go to standard output, with --json as one JSON document and nothing else; progress and errors go to
standard error.

\b
Exit codes:
    0    done
    1    done, but something failed: a cache of compare, a run of eval sweep,
         a check of doctor
    2    your error: one line says which
    130  interrupted
    141  the reader of the output has closed it, as `| head` does

\b
Examples:
    kvcache-plugins doctor
    kvcache-plugins list
    kvcache-plugins generate --cache transform --prompt "Once upon a time"
    kvcache-plugins serve smollm2 --cache transform --store prompts
    kvcache-plugins compare --prompt-file LICENSE --max-new-tokens 32
    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=transform --tasks kv_copa
    kvcache-plugins recommend --memory 100MB --context 8192
    kvcache-plugins bench kernels
"""

_BENCH_HELP = """Benchmarks of attention, decode steps, prompts and memory.

Each writes its numbers as JSON: to a file with --out, to standard output with --json (`gpu`: files in a folder).

\b
Examples:
    kvcache-plugins bench kernels
    kvcache-plugins bench step --cache dynamic --cache transform --text-file book.txt --json | jq .rows
"""

_STORE_HELP = """Show, check and clear the prompts that are kept.

`generate --store DIR`, `serve --store DIR` and `PromptStore` in Python keep them: in DIR, or in the user's cache
folder.

\b
Examples:
    kvcache-plugins store list
    kvcache-plugins store list --store prompts --json | jq '.prompts[].num_tokens'
    kvcache-plugins store verify --remove
"""


app = make_app(
    {
        "list": "kvcache_plugins.cli.advise:list_registered",
        "doctor": "kvcache_plugins.cli.advise:show_health",
        "models": "kvcache_plugins.eval.commands:survey_families",
        "generate": "kvcache_plugins.cli.generate:generate",
        "serve": "kvcache_plugins.cli.serve:main",
        "store": "kvcache_plugins.cli.root:store",
        "compare": "kvcache_plugins.cli.generate:compare",
        "calibrate": "kvcache_plugins.cli.calibrate:main",
        "plan": "kvcache_plugins.cli.plan:main",
        "recommend": "kvcache_plugins.cli.advise:recommend_caches",
        "bench": "kvcache_plugins.cli.root:bench",
        "eval": "kvcache_plugins.cli.evaluate:app",
    },
    _HELP,
)
bench = make_app(
    {
        "step": "kvcache_plugins.eval.benchmarks.commands:benchmark_steps",
        "batching": "kvcache_plugins.eval.benchmarks.commands:benchmark_batching",
        "kernels": "kvcache_plugins.eval.benchmarks.commands:benchmark_kernels",
        "memory": "kvcache_plugins.eval.benchmarks.commands:benchmark_memory",
        "prompts": "kvcache_plugins.eval.benchmarks.commands:benchmark_prompts",
        "machine-code": "kvcache_plugins.eval.benchmarks.commands:benchmark_machine_code",
        "gpu": "kvcache_plugins.eval.commands:run_on_gpu",
        "runahead": "kvcache_plugins.eval.commands:benchmark_runahead",
    },
    _BENCH_HELP,
)
store = make_app(
    {
        "list": "kvcache_plugins.cli.store:list_kept",
        "clear": "kvcache_plugins.cli.store:clear_kept",
        "verify": "kvcache_plugins.cli.store:verify",
    },
    _STORE_HELP,
)


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
    """Replace the group's own callback, which has no option."""
