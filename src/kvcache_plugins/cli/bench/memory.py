"""`kvcache-plugins bench memory`: options and help; what it does stands in `eval.benchmarks.memory`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --context tokens.")],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 4096,
) -> dict[str, Any]:
    """Measure the memory of decoding. What caches hold, a step allocates beside them, and a process takes; on Linux.

    \b
    Examples:
        kvcache-plugins bench memory --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench memory --cache gear-2bit:rank=8 --context 1024 --text-file book.txt --out memory.json
    """
    from kvcache_plugins.eval.benchmarks.memory import benchmark_memory

    return benchmark_memory(
        cache=cache,
        text_file=text_file,
        model=model,
        context=context,
    )
