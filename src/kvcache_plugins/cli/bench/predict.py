"""`kvcache-plugins bench predict`: options and help; what it does stands in `eval.benchmarks.prediction`."""

from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


@with_results
def main(
    bandwidth: Annotated[float, typer.Option(help="GB/s (1e9 bytes) that reading is assumed to reach.")],
    shape: Annotated[list[str], typer.Option(help="BATCHxTOKENS; repeatable.")] = ["16x32768"],  # noqa: B006
    cache: Annotated[
        list[str] | None, typer.Option(help="`dynamic` or a GEAR preset; repeatable; by default one of each kind.")
    ] = None,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="Of dense and exact states.")] = "bfloat16",
) -> dict[str, Any]:
    """Predict attention times from bytes. The least time of one layer at a stated bandwidth; not a measurement.

    \b
    Examples:
        kvcache-plugins bench predict --bandwidth 4300
        kvcache-plugins bench predict --bandwidth 900 --shape 1x4096 --shape 8x4096 --cache gear-2bit
    """
    from kvcache_plugins.eval.benchmarks.prediction import benchmark_prediction

    return benchmark_prediction(
        bandwidth=bandwidth,
        shape=shape,
        cache=cache,
        num_heads=num_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
