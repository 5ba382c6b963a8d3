"""`kvcache-plugins bench infinigen`: options and help; what it does stands in `eval.benchmarks.infinigen`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + 2 * --steps tokens.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable.")] = [  # noqa: B006
        "dynamic",
        "infinigen",
        "h2o:heavy_ratio=0.05,recent_ratio=0.05",
    ],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 8000,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time decode steps, and the parts of those of InfiniGen. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench infinigen --text-file book.txt
        kvcache-plugins bench infinigen --cache dynamic --cache infinigen:share=0.05 --text-file book.txt
    """
    from kvcache_plugins.eval.benchmarks.infinigen import benchmark_infinigen

    return benchmark_infinigen(
        text_file=text_file,
        cache=cache,
        model=model,
        context=context,
        steps=steps,
        num_threads=num_threads,
    )
