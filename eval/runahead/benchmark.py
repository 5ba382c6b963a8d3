"""Time to first token of KV-Runahead beside TSP and beside one rank alone, all in the same processes, taking turns.

The time goes from a barrier of all ranks to the logits on the last one, which then also has the whole cache. With
`--throttle` the ranks talk through network namespaces, first at the full speed of virtual cables, then throttled.

    kvcache-plugins bench runahead --length 4096 --length 8192 --text-file FILE
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.command_line import make_table, open_console, track_progress
from kvcache_plugins.console.json_output import with_results
from kvcache_plugins.console.run_report import provenance
from kvcache_plugins.eval.harness.timing import spread
from kvcache_plugins.kv_runahead.cost import CostModel
from kvcache_plugins.kv_runahead.measurements import Link
from kvcache_plugins.kv_runahead.partition import predicted, resolve_partition
from kvcache_plugins.kv_runahead.slices import even
from kvcache_plugins.kv_runahead.table import PartitionTable

from .isolated_network import IsolatedNetwork
from .measure import (
    FULL,
    ONE_RANK,
    THROTTLED,
    TSP,
    ModelFacts,
    Way,
    describe_model,
    encode,
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


def parse_shares(text: str, world_size: int) -> tuple[float, ...]:
    """
    Shares of a prompt that an option such as `0.6,0.4` names.

    Raises:
        ValueError: if they are no numbers, or more than there are ranks.
    """
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"`partition` has to hold shares with commas between them but is {text!r}") from error
    # The rest of what can be wrong with them does not depend on the length
    resolve_partition(shares, 1000, world_size)
    return shares


def parse_sweep(text: str | None, world_size: int) -> list[tuple[float, ...]]:
    """Partitions for two ranks whose first shares an option such as `0.5,0.6,0.7` names."""
    if text is None:
        return []
    if world_size != 2:
        raise ValueError(f"`sweep` is over the first of two shares, but `world_size` is {world_size}")
    try:
        firsts = [float(each) for each in text.split(",")]
    except ValueError as error:
        raise ValueError(f"`sweep` has to hold shares with commas between them but is {text!r}") from error
    return [parse_shares(f"{first},{1 - first}", world_size) for first in firsts]


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


class _Benchmark:
    """What the measurements of one call have in common."""

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


def _show(rows: Sequence[Mapping[str, Any]], title: str) -> None:
    headings = ("tokens", "seconds", "quartiles", "against one rank", "against full link", "logits differ", "MB sent")
    cells = [
        [
            row["method"],
            " + ".join(map(str, row["lengths"])),
            row["link"],
            str(row["length"]),
            f"{row['median_s']:.3f}",
            f"{row['lower_quartile_s']:.3f}-{row['upper_quartile_s']:.3f}",
            f"{row['speed_against_one_rank']:.2f}x",
            f"{row['seconds_against_full']:.3f}" if "seconds_against_full" in row else "-",
            f"{row['logits_difference']:.1e}",
            f"{row['bytes_sent'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    columns = {"method": "name", "slices": "name", "link": "name", **dict.fromkeys(headings, "number")}
    open_console().print(make_table(title, columns, cells))


@with_results
def main(
    text_file: Annotated[Path, typer.Option(help="A text of at least as many tokens as the longest --length.")],
    length: Annotated[list[int], typer.Option(help="Tokens of the prompt; repeatable.")] = [4096, 8192],  # noqa: B006
    model: Annotated[str, typer.Option(help="Short name, folder or hub name.")] = "smollm2",
    world_size: Annotated[int, typer.Option(help="Ranks, all started on this machine's CPUs.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Runs of everything, taking turns.", min=3)] = 5,
    num_threads: Annotated[int, typer.Option(help="Of every rank.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    table: Annotated[Path | None, typer.Option(help="Of `kvcache-plugins plan`; else slices are measured.")] = None,
    plan_rounds: Annotated[int, typer.Option(help="Runs of every slice measured for the plan.", min=1)] = 3,
    partition: Annotated[list[str] | None, typer.Option(help="Shares such as 0.6,0.4; repeatable.")] = None,
    sweep: Annotated[str | None, typer.Option(help="First shares for two ranks, such as 0.5,0.6,0.7.")] = None,
    throttle: Annotated[
        float | None, typer.Option(help="Bytes a second of every link, or, below 1, share of what it has. Needs root.")
    ] = None,
) -> dict[str, Any]:
    """Time to first token of one rank alone, of TSP and of KV-Runahead, on ranks of this machine that take turns.

    \b
    Examples:
        kvcache-plugins bench runahead --text-file book.txt
        kvcache-plugins bench runahead --text-file book.txt --length 8192 --sweep 0.5,0.55,0.6,0.65,0.7,0.75
        kvcache-plugins bench runahead --text-file book.txt --length 4096 --throttle 0.1 --out throttled.json
    """
    shares = [parse_shares(each, world_size) for each in partition or []] + parse_sweep(sweep, world_size)
    text, lengths = text_file.read_text(encoding="utf-8"), sorted(set(length))
    if lengths[0] < 16 * world_size:
        raise ValueError(f"`length` has to be at least {16 * world_size} for {world_size} ranks but got {lengths[0]}")
    if throttle is not None and not (0 < throttle < math.inf and world_size > 1):
        raise ValueError(f"`throttle` has to be above 0, and needs two ranks, but is {throttle:g} for {world_size}")
    with ExitStack() as stack:
        network = None if throttle is None else stack.enter_context(IsolatedNetwork(world_size))
        typer.echo(f"starting {world_size} ranks", err=True)
        namespaces = None if network is None else network.namespaces
        ranks = stack.enter_context(
            Ranks(model, world_size, dtype=dtype, num_threads=num_threads, namespaces=namespaces)
        )
        token_ids = ranks.call(encode, text)[0]
        if len(token_ids) < lengths[-1]:
            raise ValueError(f"the text has {len(token_ids)} tokens, but {lengths[-1]} are needed")
        benchmark = _Benchmark(ranks, lengths, rounds, shares)
        benchmark.prepare(token_ids, table, plan_rounds)
        link = benchmark.measure_link(FULL)
        benchmark.run(token_ids, link, FULL)
        if network is not None and throttle is not None and link is not None:
            network.throttle(throttle * link.bytes_per_second if throttle < 1 else throttle)
            benchmark.run(token_ids, benchmark.measure_link(THROTTLED), THROTTLED)
            compare_links(benchmark.rows)
    _show(benchmark.rows, f"{model}: seconds to the first token, medians of {rounds}")
    settings = {"model": model, "world_size": world_size, "rounds": rounds, "text_file": text_file.name}
    settings |= {"machine": ranks.describe_machine(benchmark.facts.dtype), "throttle": throttle}
    settings |= {"table": None if table is None else table.name}
    cost = None if benchmark.cost is None else asdict(benchmark.cost)
    content = {"benchmark": "runahead", **provenance(torch.device("cpu")), "settings": settings, "cost": cost}
    return {**content, **benchmark.found, "rows": benchmark.rows}
