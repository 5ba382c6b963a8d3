"""`kvcache-plugins eval perplexity`: options and help; what it does stands in `eval.measures.perplexity`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable; `dynamic` comes first.")],
    model: Annotated[str, typer.Option(help="A short name, a folder or a hub name.")] = "smollm2",
    length: Annotated[int, typer.Option(help="Tokens scored in each window.", min=2)] = 2048,
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 1,
    chunk: Annotated[int, typer.Option(help="Tokens a forward; 1 is decode.", min=1)] = 1,
    stretch: Annotated[int, typer.Option(help="Tokens over which scores are averaged.", min=1)] = 256,
    dtype: Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
) -> dict[str, Any]:
    """Perplexity against position. Texts are decoded through each cache from the first token on.

    \b
    Examples:
        kvcache-plugins eval perplexity --text-file book.txt --cache gear --cache kivi-4bit --chunk 64
    """
    from kvcache_plugins.eval.measures.perplexity_report import evaluate_perplexity

    return evaluate_perplexity(
        text_file=text_file,
        cache=cache,
        model=model,
        length=length,
        windows=windows,
        chunk=chunk,
        stretch=stretch,
        dtype=dtype,
        device=device,
    )
