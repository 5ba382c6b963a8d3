"""Plan of `kvcache-plugins plan`: a table of partitions, from timed slices and the measured link."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from kvcache_plugins.console.display import open_console, print_line
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.tables import Column, number, print_markdown, table
from kvcache_plugins.kv_runahead.planner import CostModel, Link, Partition, PartitionTable, TableEntry, planned

from .grid_search import search_partition
from .measure import ModelFacts, measure_link, prefill, time_slices
from .ranks import Ranks
from .simulation import plan_over_link, predict_ttft


# First step of a search, as a divisor of an even slice: a plan is already near
_FIRST_STEP = 16
# Runs of every slice that is timed
_PLAN_ROUNDS = 3


def plan_table(
    ranks: Ranks, facts: ModelFacts, lengths: list[int], rounds: int = _PLAN_ROUNDS, *, search: bool = False
) -> PartitionTable:
    """Fit a cost model to slices, measure the link, and plan `lengths`, or search them by whole prefills."""
    timings = time_slices(ranks, facts, lengths, rounds)
    cost = CostModel.fit(timings, projection_share=facts.by_shapes.projection_share)
    link = measure_link(ranks, facts, lengths[-1])
    entries = []
    for length in lengths:
        slices, seconds = _plan(length, ranks.size, cost, link, facts)
        is_searched = search and len(slices) > 1
        if is_searched:
            slices, seconds = _search(ranks, facts, slices, rounds)
        ratios = tuple(each / length for each in slices)
        entries.append(TableEntry(length=length, ratios=ratios, seconds=seconds, measured=is_searched))
    origin = provenance(torch.device("cpu"))
    date, versions = origin["date"], origin["versions"]
    assert isinstance(date, str) and isinstance(versions, dict)
    return PartitionTable(
        model=facts.fingerprint,
        world_size=ranks.size,
        entries=tuple(entries),
        timings=tuple(timings),
        cost=cost,
        link=link,
        machine=ranks.describe_machine(facts.dtype),
        date=date,
        versions=versions,
    )


def _plan(
    length: int, num_ranks: int, cost: CostModel, link: Link | None, facts: ModelFacts
) -> tuple[Partition, float]:
    """Plan a partition, and predict its seconds."""
    if link is None:
        return planned(length, num_ranks, cost), cost.seconds(float(length), 0.0)
    slices = plan_over_link(length, num_ranks, cost, link, **facts.sizes())
    return slices, float(predict_ttft(slices, cost, link, **facts.sizes()))


def _search(ranks: Ranks, facts: ModelFacts, start: Partition, rounds: int) -> tuple[Partition, float]:
    """Search the best partition by whole prefills from a planned one, and return it with its seconds."""
    length = sum(start)
    console = open_console(stderr=True)
    token_ids = facts.random_tokens(length)

    def measure(partitions: Sequence[Partition]) -> Iterator[float]:
        for slices in partitions:
            seconds = statistics.median(ranks.call(prefill, token_ids, slices)[-1].seconds for _ in range(rounds))
            console.print(f"searching: {' + '.join(map(str, slices))} tokens take {seconds:.3f} s", markup=False)
            yield seconds

    return search_partition(start, measure, first_step=max(length // (_FIRST_STEP * len(start)), 1))


def worst_error(plan: PartitionTable) -> float:
    """Return the largest relative error of a table's cost model in the timings that it was fitted to."""
    cost = plan.cost
    assert cost is not None
    return max(abs(cost.seconds(each.length, each.prefix) / each.seconds - 1) for each in plan.timings)


def show_plan(plan: PartitionTable, facts: ModelFacts) -> None:
    """Print a table of partitions, with the cost model and the link that it is planned by."""
    cost, link = plan.cost, plan.link
    assert cost is not None
    rendered = table(
        number("tokens", "length", ""),
        Column("slices", lambda row: " + ".join(str(round(ratio * row["length"])) for ratio in row["ratios"])),
        Column("shares", lambda row: " ".join(f"{ratio:.3f}" for ratio in row["ratios"])),
        number("seconds", "seconds", ".3f"),
        Column("by", lambda row: "searched" if row["measured"] else "planned"),
        Column("one rank, predicted", lambda row: f"{cost.seconds(float(row['length']), 0.0):.3f}"),
    )(list(map(asdict, plan.entries)))
    print_markdown(rendered, f"{plan.world_size} ranks: seconds to the first token")
    print_line(
        f"a token {1e6 * cost.per_token:.1f} us, a query and key {1e9 * cost.per_pair:.2f} ns, fixed "
        f"{1e3 * cost.fixed:.1f} ms, share of a slice's own square {cost.triangle:.2f}; "
        f"off by {100 * worst_error(plan):.1f} % at most in what was timed"
    )
    if link is not None:
        print_line(
            f"link: {link.bytes_per_second / 1e9:.3f} GB/s, {1e6 * link.latency:.0f} us a message; "
            f"{facts.bytes_per_token} bytes a token and layer"
        )
