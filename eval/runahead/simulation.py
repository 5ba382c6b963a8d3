"""Time to first token of KV-Runahead and of TSP, simulated: for more ranks and other links than there are at hand.

Compute comes from the paper's timings of one GPU (tables 1 and 3 of https://arxiv.org/abs/2405.05329), fitted for
Llama 7B and scaled by shapes for other models; its measurements on several GPUs stand beside what is simulated. The
same simulation predicts the measured runs of a file from those of one rank in it: so far can it be trusted.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.eval.tables import Table, name, number, print_markdown
from kvcache_plugins.kv_runahead.planner import RECTANGLE, TRIANGLE, CostModel, Link, Timing, planned, predict_ttft

from .measure import THROTTLED, TSP
from .tsp import predict_tsp_ttft


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """
    Shapes of a model that decide its cost.

    Attributes:
        num_layers (`int`): layers.
        num_heads (`int`): query heads.
        width (`int`): channels of all query heads together.
        key_width (`int`): channels of all key heads together, as many as of the value heads.
        num_weights (`int`): of the linear layers of one layer.
    """

    num_layers: int
    num_heads: int
    width: int
    key_width: int
    num_weights: int

    @property
    def bytes_per_token(self) -> int:
        """Counts the bytes of float16 keys and values of one token in one layer."""
        return 2 * 2 * self.key_width

    @property
    def projection_share(self) -> float:
        return self.width * (self.width + 2 * self.key_width) / self.num_weights


def _llama(num_layers: int, num_heads: int, ffn_width: int) -> Shapes:
    width = 128 * num_heads
    weights = 4 * width * width + 3 * width * ffn_width
    return Shapes(num_layers=num_layers, num_heads=num_heads, width=width, key_width=width, num_weights=weights)


def _falcon(num_layers: int, num_heads: int, num_key_heads: int) -> Shapes:
    width, key_width = 64 * num_heads, 64 * num_key_heads
    weights = 2 * width * width + 2 * width * key_width + 8 * width * width
    return Shapes(num_layers=num_layers, num_heads=num_heads, width=width, key_width=key_width, num_weights=weights)


MODELS = {
    "llama-7b": _llama(32, 32, 11008),
    "llama-13b": _llama(40, 40, 13824),
    "llama-30b": _llama(60, 52, 17920),
    "falcon-1b": _falcon(24, 32, 32),
    "falcon-7b": _falcon(32, 71, 1),
}
FITTED = "llama-7b"
# Table 3, one GPU: tokens and seconds
_ONE_GPU = {1024: 0.10, 2048: 0.24, 4096: 0.65, 8192: 1.95, 12288: 3.95}
# Table 1, at 300 GB/s: tokens, then seconds of TSP and KVR-S on 4 GPUs and of both on 8
_TABLE_1 = {
    "llama-7b": {
        1024: (0.107, 0.097, 0.117, 0.098),
        2048: (0.111, 0.100, 0.117, 0.103),
        4096: (0.20, 0.17, 0.12, 0.11),
        8192: (0.54, 0.41, 0.30, 0.22),
        12288: (1.06, 0.76, 0.57, 0.41),
        16384: (1.76, 1.24, 0.92, 0.65),
    },
    "llama-13b": {
        1024: (0.140, 0.126, 0.150, 0.129),
        2048: (0.143, 0.131, 0.153, 0.131),
        4096: (0.32, 0.29, 0.19, 0.16),
        8192: (0.87, 0.68, 0.49, 0.36),
        12288: (1.71, 1.25, 0.91, 0.66),
        16384: (2.89, 2.05, 1.46, 1.05),
    },
    "llama-30b": {1024: (0.21, 0.20, 0.23, 0.19), 2048: (0.28, 0.26, 0.24, 0.20)},
    "falcon-1b": {
        1024: (0.073, 0.061, 0.081, 0.066),
        2048: (0.067, 0.060, 0.079, 0.065),
        4096: (0.09, 0.07, 0.08, 0.06),
        8192: (0.25, 0.19, 0.15, 0.10),
    },
    "falcon-7b": {
        1024: (0.107, 0.095, 0.119, 0.096),
        2048: (0.117, 0.103, 0.118, 0.099),
        4096: (0.28, 0.21, 0.18, 0.12),
        8192: (0.78, 0.54, 0.47, 0.29),
    },
}
_FAST = 300.0
# Table 3, Llama 7B: GB/s, then tokens, then seconds of KVR on 2 and on 4 GPUs
_TABLE_3 = {
    10.0: {1024: (0.10, 0.10), 2048: (0.16, 0.19), 4096: (0.38, 0.36), 8192: (0.99, 0.72), 12288: (1.82, 1.15)},
    1.0: {1024: (0.11, 0.19), 2048: (0.21, 0.35), 4096: (0.84, 0.93), 8192: (1.31, 2.06), 12288: (2.28, 2.30)},
}


def cost_of(model: str) -> CostModel:
    """
    Computes the cost of a model of the paper: Llama 7B fitted to timings of one GPU, others scaled from it.

    Linear layers are scaled by their weights; attention by its heads, not their channels: what the paper ran wrote
    every score to memory and read it again, and there is one a head.
    """
    timings = [Timing(length=length, seconds=seconds) for length, seconds in _ONE_GPU.items()]
    own, known = MODELS[model], MODELS[FITTED]
    fitted = CostModel.fit(timings, triangle=RECTANGLE)
    return CostModel(
        per_token=fitted.per_token * own.num_layers * own.num_weights / (known.num_layers * known.num_weights),
        per_pair=fitted.per_pair * own.num_layers * own.num_heads / (known.num_layers * known.num_heads),
        fixed=fitted.fixed * own.num_layers / known.num_layers,
        triangle=RECTANGLE,
        projection_share=own.projection_share,
    )


def paper_rows() -> list[dict[str, Any]]:
    """
    Simulates seconds beside the paper's, all ranks used.

    Below 300 GB/s direct transfers between GPUs were switched off, so the link is taken as shared by all; and
    beside the partition planned for that link stands the one planned for the fast link.
    """
    rows = []
    for model, by_length in _TABLE_1.items():
        for length, (tsp_4, runahead_4, tsp_8, runahead_8) in by_length.items():
            for num_ranks, tsp, runahead in ((4, tsp_4, runahead_4), (8, tsp_8, runahead_8)):
                rows.append(_paper_row(1, model, length, num_ranks, _FAST, runahead, tsp))
    for bandwidth, by_tokens in _TABLE_3.items():
        for length, of_ranks in by_tokens.items():
            for num_ranks, runahead in zip((2, 4), of_ranks, strict=True):
                rows.append(_paper_row(3, FITTED, length, num_ranks, bandwidth, runahead, None))
    return rows


def _paper_row(
    table: int, model: str, length: int, num_ranks: int, bandwidth: float, paper: float, paper_tsp: float | None
) -> dict[str, Any]:
    shapes, cost = MODELS[model], cost_of(model)
    sizes = (shapes.bytes_per_token, shapes.num_layers)
    link = Link(bytes_per_second=bandwidth * 1e9, shared=bandwidth < _FAST)

    def plan(planned_for: Link) -> tuple[int, ...]:
        own: dict[str, Any] = {"bytes_per_token": sizes[0], "num_layers": sizes[1], "allow_fewer": False}
        return planned(length, num_ranks, cost, link=planned_for, **own)

    unadapted = plan(Link(bytes_per_second=_FAST * 1e9))
    seconds = {
        "runahead_s": predict_ttft(plan(link) if bandwidth < _FAST else unadapted, cost, link, *sizes),
        "unadapted_s": predict_ttft(unadapted, cost, link, *sizes),
    }
    tsp = predict_tsp_ttft(length, num_ranks, cost, link, *sizes)
    return {
        "table": table,
        "model": model,
        "length": length,
        "num_ranks": num_ranks,
        "gb_s": bandwidth,
        "paper_tsp_s": paper_tsp,
        "tsp_s": tsp,
        "tsp_against_paper": None if paper_tsp is None else tsp / paper_tsp,
        "paper_runahead_s": paper,
        **seconds,
        "runahead_against_paper": seconds["runahead_s"] / paper,
        "unadapted_against_paper": seconds["unadapted_s"] / paper,
    }


# Below it launching kernels, not computing, is what the paper's GPUs spent their time with
_MIN_COMPARED = 4096


def grid_row(model: str, length: int, num_ranks: int, link: Link) -> dict[str, Any]:
    """Simulates one rank, TSP, and KV-Runahead with as many of the ranks as it pays to use."""
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
    Reads measured runs of a JSON file: objects `{lengths, num_ranks, seconds}` in a list, or in one under `rows`.

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
    """Simulates measured runs of several ranks by a cost model that is fitted to those of one rank."""
    timings = [Timing(length=run["lengths"][0], seconds=run["seconds"]) for run in runs if run["num_ranks"] == 1]
    cost = CostModel.fit(timings, triangle=triangle)
    rows = []
    for run in runs:
        if run["num_ranks"] == 1:
            continue
        simulated = predict_ttft(run["lengths"], cost, link, bytes_per_token, num_layers)
        against = simulated / run["seconds"]
        row = {"num_ranks": run["num_ranks"], "lengths": run["lengths"], "measured_s": run["seconds"]}
        rows.append({**row, "simulated_s": simulated, "simulated_against_measured": against})
    if not rows:
        raise ValueError("`measured` has to hold a run of more than one rank, for something to compare with")
    return rows


PAPER = Table(
    name("model"),
    number("tokens", "length", ""),
    number("GPUs", "num_ranks", ""),
    number("GB/s", "gb_s", "g"),
    number("paper TSP", "paper_tsp_s", ".3f", missing=""),
    number("TSP", "tsp_s", ".3f"),
    number("of the paper's", "tsp_against_paper", ".3f", missing=""),
    number("paper KVR", "paper_runahead_s", ".3f"),
    number("KVR", "runahead_s", ".3f"),
    number("of its paper's", "runahead_against_paper", ".3f"),
    number("KVR as at 300 GB/s", "unadapted_s", ".3f"),
)


def show_paper(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the paper's measurements and their simulation."""
    print_markdown(PAPER(rows), "Beside the paper's tables 1 and 3: seconds, and simulated over measured by the paper")
    compared = [row for row in rows if row["table"] == 1 and row["length"] >= _MIN_COMPARED]
    for method, key in (("TSP", "tsp_against_paper"), ("KV-Runahead", "runahead_against_paper")):
        ratios = sorted(row[key] for row in compared)
        typer.echo(
            f"table 1 from {_MIN_COMPARED} tokens, {method}: simulated over the paper's {ratios[0]:.2f} to "
            f"{ratios[-1]:.2f}, median {statistics.median(ratios):.2f}"
        )


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
    yield Settings(model=model, triangle=triangle)
    # Nothing depends on the machine that simulated
    yield Content(device="simulated, not measured")
    say("simulated from timings of one device, not measured")
    if measured is not None:
        if len(links) != 1:
            raise ValueError(f"`bandwidth` has to be the one of the `measured` runs but got {bandwidth}")
        rows = measured_rows(read_runs(measured), links[0], bytes_per_token, num_layers, triangle)
        yield from rows
        errors = [abs(row["simulated_against_measured"] - 1) for row in rows]
        typer.echo(f"off by {100 * statistics.median(errors):.1f} % (median), {100 * max(errors):.1f} % at most")
        return
    for link in links:
        for tokens in length:
            for count in ranks:
                yield grid_row(model, tokens, count, link)
    paper = paper_rows()
    show_paper(paper)
    yield Content(paper_rows=paper)
