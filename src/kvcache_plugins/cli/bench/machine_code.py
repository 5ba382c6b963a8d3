"""`kvcache-plugins bench machine-code`: options and help; it is done in `eval.benchmarks.machine_code`."""

from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    cache: Annotated[list[str] | None, typer.Option(help="A GEAR preset; repeatable; by default all.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Channels of a head; repeatable; by default 128, of rows 64 too.", min=1)
    ] = None,
    query_heads: Annotated[list[int], typer.Option(help="Query heads of a key/value head; repeatable.", min=1)] = [4],  # noqa: B006
    capability: Annotated[int, typer.Option(help="Compute capability: 80, 86, 90.", min=80)] = 90,
) -> dict[str, Any]:
    """Count the machine code of decode attention and of coding.

    It is compiled for a GPU that need not be there: nothing is timed.

    \b
    Examples:
        kvcache-plugins bench machine-code
        kvcache-plugins bench machine-code --cache gear-k4v4 --head-dim 64 --head-dim 128 --capability 80
    """
    from kvcache_plugins.eval.benchmarks.machine_code import benchmark_machine_code

    return benchmark_machine_code(cache=cache, head_dim=head_dim, query_heads=query_heads, capability=capability)
