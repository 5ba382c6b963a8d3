"""Time to first token of KV-Runahead and of TSP, simulated: for more ranks and other links than there are at hand.

Compute comes from the paper's timings of one GPU, see `runahead_paper`; what the paper measured on several GPUs stands
beside what is simulated. The same simulation predicts the measured runs of a file from those of one rank in it: so far
can it be trusted on a machine.

    kvcache-plugins bench runahead-simulation --ranks 2 --ranks 8 --bandwidth 10
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.display import make_table, open_console
from kvcache_plugins.console.results import provenance
from kvcache_plugins.kv_runahead.planner import TRIANGLE, CostModel, Link, Timing, planned, predict_ttft

from .measure import THROTTLED, TSP
from .paper import FITTED, MODELS, cost_of, paper_rows
from .tsp import predict_tsp_ttft


# Below it launching kernels, not computing, is what the paper's GPUs spent their time with
_MIN_COMPARED = 4096


def grid_row(model: str, length: int, num_ranks: int, link: Link) -> dict[str, Any]:
    """Simulated seconds of one rank, of TSP and of KV-Runahead with as many of the ranks as it pays to use."""
    shapes, cost = MODELS[model], cost_of(model)
    sizes = (shapes.bytes_per_token, shapes.num_layers)
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
    Measured runs of a JSON file: objects `{lengths, num_ranks, seconds}` in a list, or in one under `rows`.

    Of what `bench runahead` wrote, the runs of TSP and those over a throttled link are left out: neither is what is
    simulated.

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
    return [run for run in runs if run.get("method") != TSP and run.get("link") != THROTTLED]


def measured_rows(
    runs: Sequence[Mapping[str, Any]], link: Link, bytes_per_token: int, num_layers: int, triangle: float
) -> list[dict[str, Any]]:
    """Measured runs of several ranks beside their simulation, whose cost model is fitted to those of one rank."""
    timings = [Timing(length=run["lengths"][0], seconds=run["seconds"]) for run in runs if run["num_ranks"] == 1]
    cost = CostModel.fit(timings, triangle=triangle)
    rows = []
    for run in runs:
        if run["num_ranks"] == 1:
            continue
        simulated = predict_ttft(run["lengths"], cost, link, bytes_per_token, num_layers)
        against = simulated / run["seconds"]
        rows.append(
            {
                "num_ranks": run["num_ranks"],
                "lengths": run["lengths"],
                "measured_s": run["seconds"],
                "simulated_s": simulated,
                "simulated_against_measured": against,
            }
        )
    if not rows:
        raise ValueError("`measured` has to hold a run of more than one rank, for something to compare with")
    return rows


def _show(title: str, columns: Mapping[str, str], cells: Sequence[Sequence[str]]) -> None:
    open_console().print(make_table(title, columns, cells))


def _show_grid(rows: Sequence[Mapping[str, Any]], model: str, bandwidth: float) -> None:
    headings = ("tokens", "ranks", "one rank", "TSP", "KV-Runahead", "ranks used", "against TSP", "against one rank")
    cells = [
        [
            str(row["length"]),
            str(row["num_ranks"]),
            f"{row['one_rank_s']:.3f}",
            f"{row['tsp_s']:.3f}",
            f"{row['runahead_s']:.3f}",
            str(len(row["lengths"])),
            f"{row['tsp_s'] / row['runahead_s']:.2f}",
            f"{row['one_rank_s'] / row['runahead_s']:.2f}",
        ]
        for row in rows
        if row["gb_s"] == bandwidth
    ]
    title = f"{model}, {bandwidth:g} GB/s: seconds to the first token, simulated"
    _show(title, dict.fromkeys(headings, "number"), cells)


def _show_paper(rows: Sequence[Mapping[str, Any]]) -> None:
    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    headings = (
        "tokens",
        "GPUs",
        "GB/s",
        "paper TSP",
        "TSP",
        "ratio",
        "paper KVR",
        "KVR",
        "ratio ",
        "KVR as at 300 GB/s",
    )
    cells = [
        [
            row["model"],
            *(str(row["length"]), str(row["num_ranks"]), f"{row['gb_s']:g}"),
            *(number(row[key]) for key in ("paper_tsp_s", "tsp_s", "tsp_against_paper")),
            *(number(row[key]) for key in ("paper_runahead_s", "runahead_s", "runahead_against_paper", "unadapted_s")),
        ]
        for row in rows
    ]
    title = "Beside the paper's tables 1 and 3: seconds, and simulated over measured by the paper"
    _show(title, {"model": "name", **dict.fromkeys(headings, "number")}, cells)
    compared = [row for row in rows if row["table"] == 1 and row["length"] >= _MIN_COMPARED]
    for name, key in (("TSP", "tsp_against_paper"), ("KV-Runahead", "runahead_against_paper")):
        ratios = sorted(row[key] for row in compared)
        typer.echo(
            f"table 1 from {_MIN_COMPARED} tokens, {name}: simulated over the paper's {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )


def _show_measured(rows: Sequence[Mapping[str, Any]]) -> None:
    headings = ("ranks", "measured", "simulated", "ratio")
    cells = [
        [
            " ".join(str(length) for length in row["lengths"]),
            str(row["num_ranks"]),
            f"{row['measured_s']:.3f}",
            f"{row['simulated_s']:.3f}",
            f"{row['simulated_against_measured']:.3f}",
        ]
        for row in rows
    ]
    _show(
        "Measured runs and their simulation, seconds", {"slices": "name", **dict.fromkeys(headings, "number")}, cells
    )
    errors = [abs(row["simulated_against_measured"] - 1) for row in rows]
    typer.echo(f"off by {100 * statistics.median(errors):.1f} % (median), {100 * max(errors):.1f} % at most")


def simulate(
    model: Annotated[
        str | None, typer.Option(help="A model of the paper; by default the one that costs are fitted to.")
    ] = None,
    ranks: Annotated[list[int], typer.Option(help="Repeatable.", min=1)] = [2, 4, 8, 16, 32, 64],
    bandwidth: Annotated[list[float], typer.Option(help="GB/s (1e9 bytes) of a link; repeatable.")] = [300, 10, 1],
    length: Annotated[list[int], typer.Option(help="Tokens of the context; repeatable.", min=1)] = [
        4096,
        16384,
        65536,
    ],
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
    model, triangle = model or FITTED, TRIANGLE if triangle is None else triangle
    if model not in MODELS:
        raise ValueError(f"`model` has to be one of {list(MODELS)} but got {model!r}")
    links = [Link(latency=latency_us * 1e-6, bytes_per_second=each * 1e9, shared=shared) for each in bandwidth]
    settings: dict[str, object] = {"bandwidth_gb_s": bandwidth, "latency_us": latency_us, "shared": shared}
    # Nothing depends on the machine that simulated
    origin = {**provenance(torch.device("cpu")), "device": "simulated, not measured"}
    content: dict[str, object] = {"benchmark": "runahead-simulation", **origin}
    typer.echo("simulated from timings of one device, not measured")
    if measured is not None:
        if len(links) != 1:
            raise ValueError(f"`bandwidth` has to be the one of the `measured` runs but got {bandwidth}")
        settings |= {"num_layers": num_layers, "bytes_per_token": bytes_per_token, "triangle": triangle}
        rows = measured_rows(read_runs(measured), links[0], bytes_per_token, num_layers, triangle)
        _show_measured(rows)
        content |= {"settings": {**settings, "measured": measured.name}, "rows": rows}
    else:
        rows = []
        for link in links:
            rows += [grid_row(model, tokens, count, link) for tokens in length for count in ranks]
            _show_grid(rows, model, link.bytes_per_second / 1e9)
        paper = paper_rows()
        _show_paper(paper)
        content |= {"settings": {**settings, "model": model}, "rows": rows, "paper_rows": paper}
    return content
