"""`kvcache-plugins bench pool`: options and help; what it does stands in `eval.benchmarks.pool`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of at least --read + --steps tokens.")],
    folder: Annotated[Path, typer.Option(help="Where pools on disk are.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... with a pool; repeatable.")] = [  # noqa: B006
        "infinigen",
        "infinigen-gear",
    ],
    place: Annotated[list[str], typer.Option(help="memory or disk; repeatable; they take turns.")] = [  # noqa: B006
        "memory",
        "disk",
    ],
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [32768],  # noqa: B006
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    read: Annotated[int, typer.Option(help="Tokens whose states are repeated.", min=64)] = 4096,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 16,
    memory_limit: Annotated[
        str | None, typer.Option(help='Of the whole process with its files, as "3GB"; by a cgroup.')
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time decode steps with a pool in memory and on disk.

    The context is filled with the states of a text, repeated: no prefill of that length is run. What a small host
    would do is seen with --place disk and --memory-limit.

    \b
    Examples:
        kvcache-plugins bench pool --text-file book.txt --folder /var/tmp --context 32768 --context 131072
        kvcache-plugins bench pool --text-file book.txt --folder /var/tmp --place disk --memory-limit 3GB
    """
    from kvcache_plugins.eval.benchmarks.pool import benchmark_pool

    return benchmark_pool(
        text_file=text_file,
        folder=folder,
        cache=cache,
        place=place,
        context=context,
        model=model,
        dtype=dtype,
        read=read,
        steps=steps,
        limit=memory_limit,
        num_threads=num_threads,
    )
