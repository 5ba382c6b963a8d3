"""`kvcache-plugins bench runahead`: options and help; what it does stands in `eval.runahead.benchmark`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of at least as many tokens as the longest --length.")],
    length: Annotated[list[int], typer.Option(help="Tokens of the prompt; repeatable.", min=1)] = [4096, 8192],  # noqa: B006
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    world_size: Annotated[int, typer.Option(help="Ranks, all started on this machine's CPUs.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Runs of everything, taking turns.", min=3)] = 5,
    num_threads: Annotated[int, typer.Option(help="Of every rank.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    table: Annotated[Path | None, typer.Option(help="Of `kvcache-plugins plan`; else slices are measured.")] = None,
    plan_rounds: Annotated[int, typer.Option(help="Runs of every slice measured for the plan.", min=1)] = 3,
    partition: Annotated[list[str] | None, typer.Option(help="Shares such as 0.6,0.4; repeatable.")] = None,
    sweep: Annotated[str | None, typer.Option(help="First shares for two ranks, such as 0.5,0.6,0.7.")] = None,
    throttle: Annotated[
        float | None, typer.Option(help="Bytes a second of every link, or, below 1, share of what it has. Needs root.")
    ] = None,
) -> dict[str, Any]:
    """Time to first token of KV-Runahead, TSP and one rank. All run on ranks of this machine and take turns.

    \b
    Examples:
        kvcache-plugins bench runahead --text-file book.txt
        kvcache-plugins bench runahead --text-file book.txt --length 8192 --sweep 0.5,0.55,0.6,0.65,0.7,0.75
        kvcache-plugins bench runahead --text-file book.txt --length 4096 --throttle 0.1 --out throttled.json
    """
    from kvcache_plugins.eval.runahead.benchmark import benchmark_runahead

    return benchmark_runahead(
        text_file=text_file,
        length=length,
        model=model,
        world_size=world_size,
        rounds=rounds,
        num_threads=num_threads,
        dtype=dtype,
        table=table,
        plan_rounds=plan_rounds,
        partition=partition,
        sweep=sweep,
        throttle=throttle,
    )
