"""`kvcache-plugins eval retrieval`: options and help; what it does stands in `eval.measures.retrieval`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    data_file: Annotated[Path, typer.Option(help="JSON lines of one of the two sets.")],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,...; repeatable; `dynamic` comes first.")],
    model: Annotated[str, typer.Option(help="A short name, a folder or a hub name.")] = "smollm2",
    questions: Annotated[int | None, typer.Option(help="The first so many; all by default.", min=1)] = None,
    records: Annotated[
        int | None, typer.Option(help="Lines or pairs left of each context; all by default.", min=1)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Questions decoded together.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default on CPU), bfloat16 or float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; by default a GPU where there is one.")] = None,
) -> dict[str, Any]:
    """Ask for one line, or one value, of a long context. Each cache is asked.

    \b
    Examples:
        kvcache-plugins eval retrieval --data-file 200_lines.jsonl --cache infinigen --cache h2o
    """
    from kvcache_plugins.eval.measures.retrieval_report import evaluate_retrieval

    return evaluate_retrieval(
        data_file=data_file,
        cache=cache,
        model=model,
        questions=questions,
        records=records,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
    )
