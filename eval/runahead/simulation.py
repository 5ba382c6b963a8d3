"""Time to first token of KV-Runahead and of TSP, simulated: for more ranks and other links than there are at hand.

Compute comes from the paper's timings of one GPU (table 3 of https://arxiv.org/abs/2405.05329), fitted for Llama 7B
and scaled by shapes for other models; a test holds it to the paper's measurements on several GPUs. The same simulation
predicts the measured runs of a file from those of one rank in it: so far can it be trusted.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.kv_runahead.planner import RECTANGLE, TRIANGLE, CostModel, Link, Timing, planned, predict_ttft

from .measure import TSP
from .tsp import predict_tsp_ttft


class Shapes(NamedTuple):
    """Shapes of a model that decide its cost: `ffn_weights` are those of a layer's feed-forward network."""

    num_layers: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    ffn_weights: int

    @property
    def num_weights(self) -> int:
        """Counts the weights of the linear layers of one layer."""
        width = self.num_heads * self.head_dim
        return width * (width + self._projected) + self.ffn_weights

    @property
    def _projected(self) -> int:
        return (self.num_heads + 2 * self.num_key_heads) * self.head_dim

    @property
    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of float16 keys and values of one token in one layer, and the layers."""
        return 2 * 2 * self.num_key_heads * self.head_dim, self.num_layers

    @property
    def projection_share(self) -> float:
        """Computes the share of the weights that stands before attention."""
        return self.num_heads * self.head_dim * self._projected / self.num_weights


MODELS = {
    "llama-7b": Shapes(32, 32, 32, 128, 3 * 4096 * 11008),
    "llama-13b": Shapes(40, 40, 40, 128, 3 * 5120 * 13824),
    "llama-30b": Shapes(60, 52, 52, 128, 3 * 6656 * 17920),
    "falcon-1b": Shapes(24, 32, 32, 64, 8 * 2048 * 2048),
    "falcon-7b": Shapes(32, 71, 1, 64, 8 * 4544 * 4544),
}
FITTED = "llama-7b"
# Table 3, one GPU: tokens and seconds
_ONE_GPU = {1024: 0.10, 2048: 0.24, 4096: 0.65, 8192: 1.95, 12288: 3.95}


def cost_of(model: str) -> CostModel:
    """
    Computes the cost of a model of the paper: Llama 7B fitted to timings of one GPU, others scaled from it.

    Linear layers are scaled by their weights; attention by its heads, not their channels: what the paper ran wrote
    every score to memory and read it again, and there is one a head.
    """
    timings = [Timing(length=length, seconds=seconds) for length, seconds in _ONE_GPU.items()]
    own, known = MODELS[model], MODELS[FITTED]
    fitted = CostModel.fit(timings, triangle=RECTANGLE)
    layers = own.num_layers / known.num_layers
    return CostModel(
        per_token=fitted.per_token * layers * own.num_weights / known.num_weights,
        per_pair=fitted.per_pair * layers * own.num_heads / known.num_heads,
        fixed=fitted.fixed * layers,
        triangle=RECTANGLE,
        projection_share=own.projection_share,
    )


def grid_row(model: str, length: int, num_ranks: int, link: Link) -> dict[str, Any]:
    """Simulates one rank, TSP, and KV-Runahead with as many of the ranks as it pays to use."""
    sizes, cost = MODELS[model].sizes, cost_of(model)
    lengths = planned(length, num_ranks, cost, link=link, bytes_per_token=sizes[0], num_layers=sizes[1])
    return {
        "model": model,
        "length": length,
        "num_ranks": num_ranks,
        "gb_s": link.bytes_per_second / 1e9,
        "one_rank_s": cost.seconds(float(length), 0.0),
        "tsp_s": predict_tsp_ttft(length, num_ranks, cost, link, *sizes),
        "runahead_s": predict_ttft(lengths, cost, link, *sizes),
        "lengths": lengths,
    }


def read_runs(path: Path) -> list[dict[str, Any]]:
    """
    Reads measured runs of a JSON file: objects `{lengths, num_ranks, seconds}` in a list, or in one under `rows`.

    Of what `bench runahead` wrote the runs of TSP are left out.

    Raises:
        ValueError: if it is none, or a run's slices are not as many as its ranks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`measured`: {path} is no JSON file: {error}") from error
    runs = content.get("rows") if isinstance(content, dict) else content
    if not isinstance(runs, list):
        raise ValueError(f"`measured`: {path} has to hold a list of objects with `lengths`, `num_ranks` and `seconds`")
    for run in runs:
        match run:
            case {"lengths": [*lengths], "num_ranks": int(count), "seconds": int() | float() as seconds} if (
                len(lengths) == count and seconds > 0 and all(isinstance(each, int) and each >= 1 for each in lengths)
            ):
                continue
        raise ValueError(
            f"`measured`: {path}: a run has to have `lengths` (an integer above 0 for each rank), `num_ranks` and "
            f"`seconds`, but one is {run}"
        )
    return [run for run in runs if run.get("method") != TSP]


def measured_rows(
    runs: Sequence[Mapping[str, Any]], link: Link, bytes_per_token: int, num_layers: int, triangle: float
) -> list[dict[str, Any]]:
    """Simulates measured runs of several ranks by a cost model that is fitted to those of one rank."""
    timings = [Timing(length=run["lengths"][0], seconds=run["seconds"]) for run in runs if run["num_ranks"] == 1]
    cost = CostModel.fit(timings, triangle=triangle)
    rows = []
    for run in runs:
        if run["num_ranks"] == 1:
            continue
        simulated = predict_ttft(run["lengths"], cost, link, bytes_per_token, num_layers)
        row = {"num_ranks": run["num_ranks"], "lengths": run["lengths"], "measured_s": run["seconds"]}
        against = simulated / run["seconds"]
        rows.append({**row, "simulated_s": simulated, "simulated_against_measured": against})
    if not rows:
        raise ValueError("`measured` has to hold a run of more than one rank, for something to compare with")
    return rows


@benchmark("runahead-simulation", "Seconds to the first token, simulated from timings of one device, not measured")
def simulate(
    model: Annotated[
        str | None, typer.Option(help="A model of the paper; by default the one that costs are fitted to.")
    ] = None,
    ranks: Annotated[list[int], typer.Option(help="Repeatable.", min=1)] = [2, 4, 8, 16, 32, 64],
    bandwidth: Annotated[list[float], typer.Option(help="GB/s (1e9 bytes) of a link; repeatable.")] = [300, 10, 1],
    length: Annotated[list[int], typer.Option(help="Tokens; repeatable.", min=1)] = [4096, 16384, 65536],
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
) -> Iterator[Found]:
    """Simulate the time to first token on many ranks.

    \b
    Examples:
        kvcache-plugins bench runahead-simulation
        kvcache-plugins bench runahead-simulation --ranks 8 --bandwidth 25 --shared --length 32768
        kvcache-plugins bench runahead-simulation --measured runs.json --bandwidth 2
    """
    model, triangle = model or FITTED, TRIANGLE if triangle is None else triangle
    if model not in MODELS:
        raise ValueError(f"`model` has to be one of {list(MODELS)} but got {model!r}")
    links = [Link(latency=latency_us * 1e-6, bytes_per_second=each * 1e9, shared=shared) for each in bandwidth]
    yield Settings(model=model, triangle=triangle)
    # Nothing depends on the machine that simulated
    yield Content(device="simulated, not measured")
    say("simulated from timings of one device, not measured")
    if measured is None:
        yield from (grid_row(model, tokens, count, link) for link in links for tokens in length for count in ranks)
        return
    if len(links) != 1:
        raise ValueError(f"`bandwidth` has to be the one of the `measured` runs but got {bandwidth}")
    rows = measured_rows(read_runs(measured), links[0], bytes_per_token, num_layers, triangle)
    yield from rows
    errors = [abs(row["simulated_against_measured"] - 1) for row in rows]
    typer.echo(f"off by {100 * statistics.median(errors):.1f} % (median), {100 * max(errors):.1f} % at most")
