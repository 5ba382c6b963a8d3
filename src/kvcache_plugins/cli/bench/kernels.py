"""`kvcache-plugins bench kernels`: options and help; what it does stands in `eval.benchmarks.kernels`."""

from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    context: Annotated[int, typer.Option(help="Tokens, a multiple of 64.", min=1)] = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 8,
    groups: Annotated[int, typer.Option(help="Query heads a key/value head.", min=1)] = 4,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 128,
    cache: Annotated[
        list[str] | None, typer.Option(help="A GEAR preset; repeatable; by default one of each kind.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of queries and dense states.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Times that each is timed.", min=3)] = 25,
) -> dict[str, Any]:
    """Time decode attention alone. From compressed storage, dense, and a copy, taking turns; checked first.

    \b
    Examples:
        kvcache-plugins bench kernels
        kvcache-plugins bench kernels --device cuda --dtype bfloat16 --batch-size 16 --context 32768 --out kernels.json
    """
    from kvcache_plugins.eval.benchmarks.kernels import benchmark_kernels

    return benchmark_kernels(
        context=context,
        batch_size=batch_size,
        num_heads=num_heads,
        groups=groups,
        head_dim=head_dim,
        cache=cache,
        dtype=dtype,
        device=device,
        num_threads=num_threads,
        rounds=rounds,
    )
