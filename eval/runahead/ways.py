"""Ways to prefill a prompt, compared over a link: one rank alone, TSP, and KV-Runahead in several partitions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.eval.harness.timing import spread
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, even, predicted, resolve_partition

from .measure import (
    FULL,
    ONE_RANK,
    THROTTLED,
    TSP,
    ModelFacts,
    Way,
    describe_model,
    fit_cost,
    measure_link,
    plan_slices,
    prefill,
    slices_to_time,
    time_slices,
    worst_error,
)
from .rank_processes import Ranks, Worker


_WARM_UP_TOKENS = 256


def load_table(worker: Worker, path: str) -> PartitionTable:
    """A table of `kvcache-plugins plan`, checked against the model and number of ranks."""
    return PartitionTable.load(path, worker.model, worker.size)


def ways_to_prefill(
    length: int, num_ranks: int, plans: Mapping[str, tuple[int, ...]], shares: Sequence[tuple[float, ...]]
) -> dict[str, Way]:
    """Every way that is compared for a length, by name."""
    ways: dict[str, Way] = {ONE_RANK: ONE_RANK}
    if num_ranks > 1:
        ways |= {TSP: TSP, "even": even(length, num_ranks), **plans}
    for each in shares:
        ways["shares " + ",".join(f"{share:.3g}" for share in each)] = resolve_partition(each, length, num_ranks)
    return ways


def measure_ways(
    ranks: Ranks,
    token_ids: Sequence[int],
    ways: Mapping[str, Way],
    rounds: int,
    announce: Callable[[str], None],
) -> list[dict[str, Any]]:
    """
    Prefills one prompt in all ways, in rounds that go through them forwards and backwards in turn.

    Args:
        ranks (`Ranks`): the ranks.
        token_ids (`Sequence[int]`): the prompt.
        ways (`Mapping[str, Way]`): what is compared; `ONE_RANK` comes first.
        rounds (`int`): three at least.
        announce (`Callable[[str], None]`): called before every prefill with what is done.

    Returns:
        `list[dict[str, Any]]`: a row for each way: its seconds, slices, difference from one rank's logits, and what
        the ranks sent and how long they waited in the last round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, list[Any]] = {}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            announce(f"{len(token_ids)} tokens, round {number + 1}: {name}")
            last[name] = ranks.call(prefill, token_ids, ways[name])
            seconds[name].append(last[name][-1].seconds)
    rows = []
    for name, way in ways.items():
        timing = spread(seconds[name])
        answers = last[name]
        lengths = {ONE_RANK: (len(token_ids),), TSP: even(len(token_ids), ranks.size)}.get(name, way)
        rows.append(
            {
                "length": len(token_ids),
                "method": name,
                "lengths": lengths,
                "num_ranks": len(lengths),
                "seconds": timing["median_s"],
                **timing,
                "rounds_s": seconds[name],
                "logits_difference": answers[-1].difference,
                "bytes_sent": sum(int(each.stats.get("bytes_sent", 0)) for each in answers),
                "seconds_waited": [each.stats.get("seconds_waited", 0.0) for each in answers],
            }
        )
    for row in rows:
        row["speed_against_one_rank"] = rows[0]["seconds"] / row["seconds"]
    return rows


class LinkComparison:
    """Settings that the measurements of one call have in common."""

    def __init__(self, ranks: Ranks, lengths: list[int], rounds: int, shares: list[tuple[float, ...]]):
        self.ranks, self.lengths, self.rounds, self.shares = ranks, lengths, rounds, shares
        self.facts: ModelFacts = ranks.call(describe_model)[0]
        self.cost: CostModel | None = None
        self.table: PartitionTable | None = None
        # Slices of each length, as planned for the first link
        self.first_plans: dict[int, tuple[int, ...]] = {}
        self.found: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def prepare(self, token_ids: list[int], table: Path | None, plan_rounds: int) -> None:
        """Warms up all that is measured, and gets a cost model: of a table, or by measuring slices."""
        short = token_ids[:_WARM_UP_TOKENS]
        for way in dict.fromkeys((ONE_RANK, TSP, even(len(short), self.ranks.size))):
            self.ranks.call(prefill, short, way)
        if table is not None:
            self.table = self.ranks.call(load_table, str(table))[0]
            self.cost = self.table.cost
            return
        slices = slices_to_time(self.lengths, self.ranks.size, self.facts.by_shapes)
        with track_progress(plan_rounds * len(slices)) as announce:
            timings = time_slices(self.ranks, self.facts, slices, plan_rounds, announce)
        self.cost = fit_cost(timings, self.facts)
        self.found["timings"] = [asdict(timing) for timing in timings]
        self.found["worst_error_of_fit"] = worst_error(timings, self.cost)

    def measure_link(self, name: str) -> Link | None:
        """The link between ranks, also noted for the file; none where there is one rank."""
        if self.ranks.size == 1:
            return None
        link = measure_link(self.ranks, self.facts, max(self.lengths))
        self.found.setdefault("links", {})[name] = asdict(link)
        typer.echo(
            f"{name} link: {link.bytes_per_second / 1e9:.4f} GB/s, {1e6 * link.latency:.0f} us a message", err=True
        )
        return link

    def run(self, token_ids: list[int], link: Link | None, name: str) -> None:
        """Measures all lengths over a link and adds the rows."""
        ways = {}
        for length in self.lengths:
            plans = {"planned": self._plan(length, link)} if self.ranks.size > 1 else {}
            if length in self.first_plans:
                plans["planned for full"] = self.first_plans[length]
            elif plans:
                self.first_plans[length] = plans["planned"]
            ways[length] = ways_to_prefill(length, self.ranks.size, plans, self.shares)
        with track_progress(self.rounds * sum(map(len, ways.values()))) as announce:
            for length in self.lengths:
                rows = measure_ways(self.ranks, token_ids[:length], ways[length], self.rounds, announce)
                self.rows += [{"link": name, **row} for row in rows]

    def _plan(self, length: int, link: Link | None) -> tuple[int, ...]:
        # A table holds for the link that it was measured with
        if self.table is not None and (self.cost is None or not self.first_plans.get(length)):
            return predicted(length, self.table)
        assert self.cost is not None
        return plan_slices(length, self.ranks.size, self.cost, link, self.facts)


def compare_links(rows: list[dict[str, Any]]) -> None:
    """Notes in the rows of the throttled link how many times as long they took as over the full one."""
    full = {(row["length"], row["method"]): row for row in rows if row["link"] == FULL}
    for row in rows:
        if row["link"] == THROTTLED:
            method = "planned" if row["method"] == "planned for full" else row["method"]
            row["seconds_against_full"] = row["seconds"] / full[row["length"], method]["seconds"]
