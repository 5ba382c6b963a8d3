"""`kvcache-plugins bench runahead-simulation`: options and help; what it does stands in `eval.runahead.simulation`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.json_output import with_results


_RANKS = [2, 4, 8, 16, 32, 64]
_GB_S: list[float] = [300, 10, 1]
_LENGTHS = [4096, 16384, 65536]


@with_results
def main(
    model: Annotated[
        str | None, typer.Option(help="A model of the paper; by default the one that costs are fitted to.")
    ] = None,
    ranks: Annotated[list[int], typer.Option(help="Repeatable.", min=1)] = _RANKS,
    bandwidth: Annotated[list[float], typer.Option(help="GB/s (1e9 bytes) of a link; repeatable.")] = _GB_S,
    length: Annotated[list[int], typer.Option(help="Tokens of the context; repeatable.", min=1)] = _LENGTHS,
    latency_us: Annotated[float, typer.Option(help="Microseconds a message takes beside its bytes.")] = 10.0,
    shared: Annotated[bool, typer.Option("--shared", help="All ranks share one link.")] = False,
    measured: Annotated[
        Path | None, typer.Option(help="JSON list of {lengths, num_ranks, seconds} to simulate instead.")
    ] = None,
    num_layers: Annotated[int, typer.Option(help="Layers of the model that was measured.", min=1)] = 30,
    bytes_per_token: Annotated[
        int, typer.Option(help="Bytes of its keys and values, a token and layer.", min=1)
    ] = 1536,
    triangle: Annotated[
        float | None, typer.Option(help="Share of a slice's own square that was computed; PyTorch's by default.")
    ] = None,
) -> dict[str, Any]:
    """Simulate the time to first token on many ranks. It stands beside the paper's measurements, and is none.

    \b
    Examples:
        kvcache-plugins bench runahead-simulation
        kvcache-plugins bench runahead-simulation --ranks 8 --bandwidth 25 --shared --length 32768
        kvcache-plugins bench runahead-simulation --measured runs.json --bandwidth 2
    """
    from kvcache_plugins.eval.runahead.simulation import simulate

    return simulate(
        model=model,
        ranks=ranks,
        bandwidth=bandwidth,
        length=length,
        latency_us=latency_us,
        shared=shared,
        measured=measured,
        num_layers=num_layers,
        bytes_per_token=bytes_per_token,
        triangle=triangle,
    )
