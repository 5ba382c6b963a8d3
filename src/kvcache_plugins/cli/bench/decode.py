"""`kvcache-plugins bench decode`: options and help; what it does stands in `eval.benchmarks.decode`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --prompt + --steps tokens.")],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="Tokens to decode.", min=1)] = 5000,
    bin_length: Annotated[int, typer.Option(help="Steps that one median is over.", min=3)] = 500,
    num_layers: Annotated[
        int | None, typer.Option(help="Keep the model's first layers only, to save time.", min=1)
    ] = None,
) -> dict[str, Any]:
    """Time every step of a long decode. Shows whether a cache copies its history again and again.

    \b
    Examples:
        kvcache-plugins bench decode --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench decode --cache gear-2bit --text-file book.txt --steps 500 --bin-length 100 --num-layers 2
    """
    from kvcache_plugins.eval.benchmarks.decode import benchmark_decode

    return benchmark_decode(
        cache=cache,
        text_file=text_file,
        model=model,
        prompt=prompt,
        steps=steps,
        bin_length=bin_length,
        num_layers=num_layers,
    )
