"""Time to first token of KV-Runahead beside TSP, a zig-zag and one rank alone, in the same processes, taking turns.

The time goes from a barrier of all ranks to the logits on the last one, which then also has the whole cache. Beside it
stands the time that the cost model and the link say, both measured apart from whole prefills.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.inputs import ModelOption, read_text
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.harness import spread
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.kv_runahead.planner import (
    CostModel,
    Link,
    PartitionTable,
    even,
    predict_ttft,
    predicted,
    resolve_partition,
)

from . import measure
from .measure import FOLDED, ONE_RANK, TSP, ModelFacts, Way, plan_slices
from .ranks import Ranks, Worker
from .tsp import predict_tsp_ttft


_WARM_UP_TOKENS = 256
# Runs of every slice that is timed for the plan
_PLAN_ROUNDS = 3


def parse_shares(text: str, world_size: int) -> tuple[float, ...]:
    """Parses shares of a prompt such as `0.6,0.4`; a `ValueError` if they are none, or more than there are ranks."""
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"`partition` has to hold shares with commas between them but is {text!r}") from error
    # The rest of what can be wrong with them does not depend on the length
    resolve_partition(shares, 1000, world_size)
    return shares


def load_table(worker: Worker, path: str) -> PartitionTable:
    """Loads a table of `kvcache-plugins plan`, checked against the model and number of ranks."""
    return PartitionTable.load(path, worker.model, worker.size)


def measure_ways(
    ranks: Ranks, token_ids: Sequence[int], ways: Mapping[str, Way], rounds: int, announce: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """
    Prefills one prompt in all ways, `ONE_RANK` the first, in rounds that go through them forwards and backwards in
    turn.

    Yields a row for each way: its seconds, slices, difference from one rank's logits, and what the ranks sent and how
    long they waited in the last round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    last: dict[str, list[Any]] = {}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            announce(f"{len(token_ids)} tokens, round {number + 1}: {name}")
            last[name] = ranks.call(measure.prefill, token_ids, ways[name])
            seconds[name].append(last[name][-1].seconds)
    alone = spread(seconds[ONE_RANK])["median_s"]
    for name, way in ways.items():
        timing, answers = spread(seconds[name]), last[name]
        lengths = (
            (len(token_ids),) if way == ONE_RANK else even(len(token_ids), ranks.size) if isinstance(way, str) else way
        )
        yield {
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
            "speed_against_one_rank": alone / timing["median_s"],
        }


def simulate(length: int, cost: CostModel, link: Link, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Yields seconds, and one rank's over those of all together (efficiency), of every way over equal links."""
    sizes = cost, link, facts.bytes_per_token, facts.num_layers
    for num_ranks in (2, 4, 8):
        plan = plan_slices(length, num_ranks, cost, link, facts)
        found = {"planned": float(predict_ttft(plan, *sizes))}
        for is_folded, is_ring in product((False, True), repeat=2):
            name = ("zig-zag" if is_folded else "even") + (", ring attention" if is_ring else ", all-gather")
            found[name] = predict_tsp_ttft(length, num_ranks, *sizes, is_folded=is_folded, is_ring=is_ring)
        for way, seconds in found.items():
            efficiency = float(cost.seconds(length, 0)) / (num_ranks * seconds)
            yield {"length": length, "num_ranks": num_ranks, "way": way, "seconds": seconds, "efficiency": efficiency}


@benchmark("runahead", "Seconds to the first token of {model}, medians of {rounds}")
def benchmark_runahead(
    text_file: Annotated[Path, typer.Option(help="A text of at least as many tokens as the longest --length.")],
    length: Annotated[list[int], typer.Option(help="Tokens of the prompt; repeatable.", min=1)] = [4096, 8192],
    model: ModelOption = "smollm2",
    world_size: Annotated[int, typer.Option(help="Ranks, all started on this machine's CPUs.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Runs of everything, taking turns.", min=3)] = 5,
    num_threads: Annotated[int, typer.Option(help="Of every rank.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    table: Annotated[Path | None, typer.Option(help="Of `kvcache-plugins plan`; else slices are measured.")] = None,
    partition: Annotated[list[str] | None, typer.Option(help="Shares such as 0.6,0.4; repeatable.")] = None,
) -> Iterator[Found]:
    """Time the first token of KV-Runahead, TSP, a zig-zag, one rank. All run on this machine and take turns.

    \b
    Examples:
        kvcache-plugins bench runahead --text-file book.txt
        kvcache-plugins bench runahead --text-file book.txt --length 8192 --partition 0.5,0.5 --partition 0.65,0.35
    """
    shares = [parse_shares(each, world_size) for each in partition or []]
    text, lengths = read_text(text_file, "text_file"), sorted(set(length))
    if lengths[0] < 16 * world_size:
        raise ValueError(f"`length` has to be at least {16 * world_size} for {world_size} ranks but got {lengths[0]}")
    say(f"starting {world_size} ranks")
    with Ranks(model, world_size, dtype=dtype, num_threads=num_threads) as ranks:
        token_ids = ranks.call(measure.encode, text)[0]
        if len(token_ids) < lengths[-1]:
            raise ValueError(f"the text has {len(token_ids)} tokens, but {lengths[-1]} are needed")
        facts = ranks.call(measure.describe_model)[0]
        yield Settings(machine=ranks.describe_machine(facts.dtype))
        short = token_ids[:_WARM_UP_TOKENS]
        for way in dict.fromkeys((ONE_RANK, TSP, FOLDED, even(len(short), world_size))):
            ranks.call(measure.prefill, short, way)
        known = None if table is None else ranks.call(load_table, str(table))[0]
        if known is not None:
            cost = known.cost
        else:
            timings = measure.time_slices(ranks, facts, lengths, _PLAN_ROUNDS)
            cost, worst = measure.fit_cost(timings, facts)
            yield Content(timings=[asdict(each) for each in timings], worst_error_of_fit=worst)
        link = measure.measure_link(ranks, facts, lengths[-1])
        if link is not None:
            say(f"link: {link.bytes_per_second / 1e9:.4f} GB/s, {1e6 * link.latency:.0f} us a message")
        yield Content(cost=None if cost is None else asdict(cost), link=None if link is None else asdict(link))
        if cost is not None and link is not None:
            yield Content(simulated=[row for each in lengths for row in simulate(each, cost, link, facts)])
        ways: dict[int, dict[str, Way]] = {each: {ONE_RANK: ONE_RANK} for each in lengths}
        for each, own in ways.items():
            if world_size > 1:
                plan = plan_slices(each, world_size, cost, link, facts) if known is None else predicted(each, known)
                own |= {TSP: TSP, FOLDED: FOLDED, "even": even(each, world_size), "planned": plan}
            for share in shares:
                name = "shares " + ",".join(f"{one:.3g}" for one in share)
                own[name] = resolve_partition(share, each, world_size)
        with track_progress(rounds * sum(map(len, ways.values()))) as announce:
            for each, own in ways.items():
                for row in measure_ways(ranks, token_ids[:each], own, rounds, announce):
                    if cost is not None and link is not None and row["num_ranks"] > 1:
                        sizes, name = (cost, link, facts.bytes_per_token, facts.num_layers), row["method"]
                        if name in (TSP, FOLDED):
                            row["predicted_s"] = predict_tsp_ttft(each, world_size, *sizes, is_folded=name == FOLDED)
                        else:
                            row["predicted_s"] = float(predict_ttft(row["lengths"], *sizes))
                    yield row
