"""`kvcache-plugins bench prefix`: options and help; what it does stands in `eval.benchmarks.prefix`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of --prefix + --continuations * --new-tokens tokens.")],
    cache: Annotated[list[str], typer.Option(help="A GEAR cache: NAME or NAME:key=value,... ; repeatable.")] = [  # noqa: B006
        "gear-k4v3"
    ],
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    prefix: Annotated[int, typer.Option(help="Tokens that all continuations begin with.", min=1)] = 8000,
    continuations: Annotated[int, typer.Option(help="How many.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each, fed in one forward.", min=1)] = 8,
    prefill_rounds: Annotated[int, typer.Option(help="How often the prefix is prefilled again.", min=1)] = 3,
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
) -> dict[str, Any]:
    """Compare ways to continue one prefix many times.

    They are reading it again, deepcopy, forks, and forks of a saved cache.

    The dense copies are all held at once: 16 of 8000 tokens of SmolLM2 take 6 GB in float32.

    \b
    Examples:
        kvcache-plugins bench prefix --text-file book.txt --out prefix.json
        kvcache-plugins bench prefix --text-file book.txt --prefix 1000 --continuations 4 --cache gear-2bit
    """
    from kvcache_plugins.eval.benchmarks.prefix import benchmark_prefix

    return benchmark_prefix(
        text_file=text_file,
        cache=cache,
        model=model,
        prefix=prefix,
        continuations=continuations,
        new_tokens=new_tokens,
        prefill_rounds=prefill_rounds,
        num_threads=num_threads,
    )
