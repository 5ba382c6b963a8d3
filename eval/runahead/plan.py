"""`kvcache-plugins plan`: measures slices and links between ranks, and writes the table that `runahead_prefill` takes.

The ranks run on this machine's CPUs. What takes long is the slices; a few of them, first and last ones of each length,
fix a cost model of four numbers, and partitions follow from that. A search by whole prefills is the slow alternative.
"""

import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.command_line import make_table, open_console, track_progress, user_errors
from kvcache_plugins.console.json_output import JsonOption, print_json
from kvcache_plugins.console.run_report import provenance
from kvcache_plugins.kv_runahead.cost import CostModel
from kvcache_plugins.kv_runahead.grid_search import searched
from kvcache_plugins.kv_runahead.measurements import Link, Timing
from kvcache_plugins.kv_runahead.table import PartitionTable, TableEntry
from kvcache_plugins.kv_runahead.time_to_first_token import predict_ttft

from .measure import (
    ModelFacts,
    describe_model,
    fit_cost,
    measure_link,
    plan_slices,
    prefill,
    random_tokens,
    slices_to_time,
    time_slices,
    worst_error,
)
from .rank_processes import Ranks


# The first step of a search, in shares of an even slice: what is planned is near already
_FIRST_STEP = 16


def parse_lengths(text: str, world_size: int) -> list[int]:
    """
    Lengths that an option such as `4096,8192` names.

    Raises:
        ValueError: if they are no whole numbers, or a context is too short to be cut.
    """
    try:
        lengths = sorted({int(each) for each in text.split(",")})
    except ValueError as error:
        raise ValueError(f"`lengths` have to be numbers with commas between them but are {text!r}") from error
    # Below this slices are so short that timings would not tell one from another
    least = 16 * world_size
    if lengths[0] < least:
        raise ValueError(f"`lengths` have to be at least {least} for {world_size} ranks but one is {lengths[0]}")
    return lengths


def plan_table(
    ranks: Ranks,
    facts: ModelFacts,
    lengths: list[int],
    timings: list[Timing],
    *,
    rounds: int,
    search: bool,
) -> PartitionTable:
    """
    Fits a cost model, measures the link between ranks, and plans.

    Args:
        ranks (`Ranks`): the ranks to plan for.
        facts (`ModelFacts`): of their model.
        lengths (`list[int]`): tokens of the contexts.
        timings (`list[Timing]`): of slices of these lengths, see `slices_to_time`.
        rounds (`int`): runs of every partition of a search.
        search (`bool`): whether partitions are searched by whole prefills.
    """
    cost = fit_cost(timings, facts)
    link = None if ranks.size == 1 else measure_link(ranks, facts, lengths[-1])
    entries = []
    for length in lengths:
        slices = plan_slices(length, ranks.size, cost, link, facts)
        seconds = _predicted(slices, cost, link, facts)
        if search and len(slices) > 1:
            slices, seconds = _search(ranks, facts, slices, rounds)
        ratios = tuple(each / length for each in slices)
        entries.append(TableEntry(length=length, ratios=ratios, seconds=seconds, measured=search and len(slices) > 1))
    origin: Any = provenance(torch.device("cpu"))
    return PartitionTable(
        model=facts.fingerprint,
        world_size=ranks.size,
        entries=tuple(entries),
        timings=tuple(timings),
        cost=cost,
        link=link,
        machine=ranks.describe_machine(facts.dtype),
        date=origin["date"],
        versions=origin["versions"],
    )


def _predicted(slices: tuple[int, ...], cost: CostModel, link: Link | None, facts: ModelFacts) -> float:
    if link is None:
        return cost.seconds(float(sum(slices)), 0.0)
    return predict_ttft(slices, cost, link, facts.bytes_per_token, facts.num_layers)


def _search(ranks: Ranks, facts: ModelFacts, start: tuple[int, ...], rounds: int) -> tuple[tuple[int, ...], float]:
    """The best partition found by whole prefills from a planned one, and its seconds."""
    length, console = sum(start), open_console(stderr=True)
    token_ids = random_tokens(facts, length)
    seconds: dict[tuple[int, ...], float] = {}

    def measure(slices: tuple[int, ...]) -> float:
        runs = [ranks.call(prefill, token_ids, slices)[-1].seconds for _ in range(rounds)]
        seconds[slices] = statistics.median(runs)
        text = " + ".join(map(str, slices))
        console.print(f"searching: {text} tokens take {seconds[slices]:.3f} s", markup=False)
        return seconds[slices]

    first_step = max(length // (_FIRST_STEP * len(start)), 1)
    best = searched(length, len(start), measure, start=start, first_step=first_step)
    return best, seconds[best]


def show_plan(table: PartitionTable, error: float, facts: ModelFacts) -> None:
    """Prints a table of partitions, and what it is founded on."""
    cost, link, console = table.cost, table.link, open_console()
    assert cost is not None
    cells = [
        [
            str(entry.length),
            " + ".join(str(round(ratio * entry.length)) for ratio in entry.ratios),
            " ".join(f"{ratio:.3f}" for ratio in entry.ratios),
            f"{entry.seconds:.3f}",
            "searched" if entry.measured else "planned",
            f"{cost.seconds(float(entry.length), 0.0):.3f}",
        ]
        for entry in table.entries
    ]
    columns = {"tokens": "number", "slices": "name", "shares": "name", "seconds": "number", "by": "name"}
    title = f"{table.world_size} ranks: seconds to the first token"
    console.print(make_table(title, {**columns, "one rank, predicted": "number"}, cells))
    console.print(
        f"a token {1e6 * cost.per_token:.1f} us, a query and key {1e9 * cost.per_pair:.2f} ns, fixed "
        f"{1e3 * cost.fixed:.1f} ms, share of a slice's own square {cost.triangle:.2f}; "
        f"off by {100 * error:.1f} % at most in what was timed",
        markup=False,
        soft_wrap=True,
    )
    if link is not None:
        console.print(
            f"link: {link.bytes_per_second / 1e9:.3f} GB/s, {1e6 * link.latency:.0f} us a message; "
            f"{facts.bytes_per_token} bytes a token and layer",
            markup=False,
            soft_wrap=True,
        )


def main(
    world_size: Annotated[int, typer.Option(help="Ranks to plan for, all started on this machine's CPUs.", min=1)],
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts, such as 4096,8192.")],
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write, for `runahead_prefill(..., partition=...)`.")
    ] = None,
    model: Annotated[str, typer.Option(help="`smollm2`, `gemma3-270m`, a folder or a hub name.")] = "smollm2",
    search: Annotated[
        bool, typer.Option("--search", help="Search around what is planned, by whole prefills.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Runs that a median is over.", min=1)] = 3,
    num_threads: Annotated[int, typer.Option(help="Of every rank.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model on this machine, and plan which slice of a prompt each rank of KV-Runahead prefills.

    "by" says whether seconds were predicted (planned) or measured (searched). Fewer slices than ranks: the first
    ranks stay idle, as that is faster. Elsewhere, or for another model or number of ranks, make another table.

    \b
    Examples:
        kvcache-plugins plan --world-size 2 --lengths 4096,8192 --out table.json
        kvcache-plugins plan --model gemma3-270m --world-size 4 --lengths 2048,4096 --search --out table.json
        kvcache-plugins plan --world-size 2 --lengths 4096 --json | jq .entries
    """
    with user_errors():
        parsed = parse_lengths(lengths, world_size)
        if out is None and not as_json:
            raise ValueError("Give `--out`, `--json` or both, or the table would be lost")
        if out is not None and not out.absolute().parent.is_dir():
            raise ValueError(f"`out`: there is no folder {out.absolute().parent}")
        open_console(stderr=True).print(f"starting {world_size} ranks", markup=False)
        with Ranks(model, world_size, dtype=dtype, num_threads=num_threads) as ranks:
            facts: ModelFacts = ranks.call(describe_model)[0]
            slices = slices_to_time(parsed, world_size, facts.by_shapes)
            with track_progress(rounds * len(slices)) as announce:
                timings = time_slices(ranks, facts, slices, rounds, announce)
            table = plan_table(ranks, facts, parsed, timings, rounds=rounds, search=search)
        if out is not None:
            table.save(out)
    if as_json:
        print_json(table.document())
        return
    assert table.cost is not None
    show_plan(table, worst_error(table.timings, table.cost), facts)
