"""`kvcache-plugins bench shapes`: options and help; what it does stands in `eval.benchmarks.shapes`."""

from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    part: Annotated[list[str], typer.Option(help="step or attention; repeatable.")] = ["step", "attention"],  # noqa: B006
    cache: Annotated[list[str], typer.Option(help="A GEAR preset, beside dynamic; repeatable.")] = [  # noqa: B006
        "gear-k4v3",
        "gear-t22",
    ],
    shape: Annotated[list[str], typer.Option(help="mha, gqa-3, gqa-4 or mqa; repeatable.")] = [  # noqa: B006
        "mha",
        "gqa-3",
        "gqa-4",
        "mqa",
    ],
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16 or float16; repeatable.")] = [  # noqa: B006
        "float32",
        "bfloat16",
    ],
    batch_size: Annotated[list[int], typer.Option(help="Sequences; repeatable.", min=1)] = [1, 8],  # noqa: B006
    num_threads: Annotated[list[int], typer.Option(help="Of the CPU; repeatable.", min=1)] = [1, 2],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [  # noqa: B006
        1,
        64,
        256,
        1024,
        4096,
        16384,
    ],
    rounds: Annotated[int, typer.Option(help="Times that each is timed in one place.", min=3)] = 20,
    seconds: Annotated[float, typer.Option(help="After these, three rounds are enough in one place.", min=0)] = 1.0,
    max_gigabytes: Annotated[float, typer.Option(help="Places where a dense cache takes more are left out.")] = 2.5,
    limit: Annotated[float, typer.Option(help="Seconds after which no further place is begun.", min=0)] = 3600.0,
) -> dict[str, Any]:
    """Time steps and attention over shapes. Heads, dtypes, batches, threads and contexts, each with each.

    Steps are those of small random models; caches are filled with states, not by reading. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench shapes --out shapes.json
        kvcache-plugins bench shapes --part step --shape mqa --dtype bfloat16 --context 4096 --cache gear
    """
    from kvcache_plugins.eval.benchmarks.shapes import benchmark_shapes

    return benchmark_shapes(
        part=part,
        cache=cache,
        shape=shape,
        dtype=dtype,
        batch_size=batch_size,
        num_threads=num_threads,
        context=context,
        rounds=rounds,
        seconds=seconds,
        max_gigabytes=max_gigabytes,
        limit=limit,
    )
