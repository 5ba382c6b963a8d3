"""`kvcache-plugins bench prompts`: options and help; what it does stands in `eval.benchmarks.prompts`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


_NEW_TOKENS, _CHUNKS = [17, 128, 512, 2048], [512]


@with_results
def main(
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... ; repeatable; first: the measure.")],
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --new-tokens tokens.")],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 4096,
    new_tokens: Annotated[list[int], typer.Option(help="Tokens that follow it; repeatable.", min=1)] = _NEW_TOKENS,
    chunk: Annotated[list[int], typer.Option(help="Chunks that it is read in; repeatable.", min=1)] = _CHUNKS,
    rounds: Annotated[int, typer.Option(help="Rounds that a median is over.", min=1)] = 3,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; on CPUs float32.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Time prompts, chunks of them, and tokens behind them. What coding them takes is timed too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache gear --context 8192 --chunk 512 --text-file book.txt
    """
    from kvcache_plugins.eval.benchmarks.prompts import benchmark_prompts

    return benchmark_prompts(
        cache=cache,
        text_file=text_file,
        model=model,
        context=context,
        new_tokens=new_tokens,
        chunk=chunk,
        rounds=rounds,
        num_threads=num_threads,
        dtype=dtype,
    )
