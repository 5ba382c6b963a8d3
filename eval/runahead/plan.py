"""`kvcache-plugins plan`: measures slices and links between ranks, and writes the table that `runahead_prefill` takes.

The ranks run on this machine's CPUs. What takes long is the slices; a few of them, first and last ones of each length,
fix a cost model of four numbers, and partitions follow from that. A search by whole prefills is the slow alternative.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvcache_plugins.console.display import make_table, open_console, print_line
from kvcache_plugins.console.results import provenance
from kvcache_plugins.kv_runahead.planner import (
    CostModel,
    Link,
    PartitionTable,
    TableEntry,
    Timing,
    predict_ttft,
    searched,
)

from .measure import (
    ModelFacts,
    fit_cost,
    measure_link,
    plan_slices,
    prefill,
    random_tokens,
)
from .rank_processes import Ranks


# The first step of a search, in shares of an even slice: what is planned is near already
_FIRST_STEP = 16


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

    def measure(partitions: Sequence[tuple[int, ...]]) -> Iterator[float]:
        for slices in partitions:
            runs = [ranks.call(prefill, token_ids, slices)[-1].seconds for _ in range(rounds)]
            seconds = statistics.median(runs)
            text = " + ".join(map(str, slices))
            console.print(f"searching: {text} tokens take {seconds:.3f} s", markup=False)
            yield seconds

    return searched(start, measure, first_step=max(length // (_FIRST_STEP * len(start)), 1))


def show_plan(table: PartitionTable, error: float, facts: ModelFacts) -> None:
    """Prints a table of partitions, and what it is founded on."""
    cost, link = table.cost, table.link
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
    open_console().print(make_table(title, {**columns, "one rank, predicted": "number"}, cells))
    print_line(
        f"a token {1e6 * cost.per_token:.1f} us, a query and key {1e9 * cost.per_pair:.2f} ns, fixed "
        f"{1e3 * cost.fixed:.1f} ms, share of a slice's own square {cost.triangle:.2f}; "
        f"off by {100 * error:.1f} % at most in what was timed"
    )
    if link is not None:
        print_line(
            f"link: {link.bytes_per_second / 1e9:.3f} GB/s, {1e6 * link.latency:.0f} us a message; "
            f"{facts.bytes_per_token} bytes a token and layer"
        )
