"""`kvcache-plugins bench compile`: options and help; what it does stands in `eval.benchmarks.compile`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --steps + 6 tokens.")],
    cache: Annotated[str, typer.Option(help="NAME or NAME:key=value,...: beside `StaticCache`.")] = "gear-2bit",
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 1024,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 20,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time decode steps of a model as it is and compiled. Caches take turns. On a CPU this needs a C++ compiler.

    \b
    Example:
        kvcache-plugins bench compile --text-file book.txt
    """
    from kvcache_plugins.eval.benchmarks.compile import benchmark_compile

    return benchmark_compile(
        text_file=text_file,
        cache=cache,
        model=model,
        context=context,
        steps=steps,
        num_threads=num_threads,
    )
