"""`kvcache-plugins bench step`: options and help; what it does stands in `eval.benchmarks.step`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable; first: the measure.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --context, or --read, + --steps tokens.")],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [4096],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; on CPUs float32.")] = None,
    read: Annotated[int | None, typer.Option(help="Tokens whose states are repeated up to --context.", min=64)] = None,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time whole decode steps of a model. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench step --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench step --cache dynamic --cache quanto-4bit --context 1024 --text-file book.txt --out s.json
        kvcache-plugins bench step --cache dynamic --cache gear --context 65536 --read 4096 --text-file book.txt
    """
    from kvcache_plugins.eval.benchmarks.step import benchmark_steps

    return benchmark_steps(
        cache=cache,
        text_file=text_file,
        model=model,
        context=context,
        steps=steps,
        num_threads=num_threads,
        dtype=dtype,
        read=read,
    )
