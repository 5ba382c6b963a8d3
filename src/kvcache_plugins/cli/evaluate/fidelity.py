"""`kvcache-plugins eval fidelity`: options and help; what it does stands in `eval.measures.fidelity`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="The text that windows are cut from.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,key=value; may be given several times.")],
    model: Annotated[str, typer.Option(help="A short name, a folder or a hub name.")] = "smollm2",
    windows: Annotated[int, typer.Option(help="Disjoint windows, spread evenly over the text.", min=1)] = 8,
    prefix: Annotated[int, typer.Option(help="Tokens that fill the cache, unscored.", min=1)] = 1024,
    scored: Annotated[int, typer.Option(help="Tokens scored through the filled cache.", min=1)] = 512,
    chunk: Annotated[
        int | None, typer.Option(help="Scored tokens a forward, 1 for decode; all by default.", min=1)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 42,
) -> dict[str, Any]:
    """Measure how far caches are from the dense cache on a text.

    That is perplexity, KL and agreement, against bytes held.

    "mean %" is what was held while tokens were scored, buffers included, if they are cut into chunks; "differs at" is
    the first scored token whose most likely one is not the dense cache's, the median over windows;
    "layer error" the largest relative error of a layer's attention output.

    \b
    Examples:
        kvcache-plugins eval fidelity --text-file wiki.test.raw --cache gear --cache kivi-4bit
        kvcache-plugins eval fidelity --text-file book.txt --windows 2 --chunk 1 \\
            --cache gear-2bit --cache gear-2bit:sparsity=0,rank=8 --out eval/results/rank.json
    """
    from kvcache_plugins.eval.measures.fidelity_report import evaluate_fidelity

    return evaluate_fidelity(
        text_file=text_file,
        cache=cache,
        model=model,
        windows=windows,
        prefix=prefix,
        scored=scored,
        chunk=chunk,
        dtype=dtype,
        device=device,
        seed=seed,
    )
