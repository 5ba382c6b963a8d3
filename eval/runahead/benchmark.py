"""Benchmark of KV-Runahead: `kvcache-plugins bench runahead`.

Whole prefills are timed from a barrier of all ranks to the logits on the last one, which then also has the whole
cache, and shown beside the times that cost model and link predict.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
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
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, even, predicted, resolve_partition

from .measure import (
    FOLDED,
    ONE_RANK,
    TSP,
    ModelFacts,
    Prefill,
    Way,
    describe_model,
    encode,
    load_table,
    measure_link,
    prefill,
)
from .plan import plan_table, worst_error
from .ranks import Ranks
from .simulation import plan_over_link, predict_ttft
from .tsp import predict_tsp_ttft


_WARM_UP_TOKENS = 256


def parse_shares(text: str, world_size: int) -> tuple[float, ...]:
    """Parse shares of a prompt such as `0.6,0.4`; a `ValueError` for anything else, or for more shares than ranks."""
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"`partition` has to hold shares with commas between them but is {text!r}") from error
    # Other errors do not depend on the length
    resolve_partition(shares, 1000, world_size)
    return shares


def make_row(name: str, way: Way, runs: Sequence[list[Prefill]], token_ids: Sequence[int]) -> dict[str, Any]:
    """Make the row of a way: its slices, the seconds of its `runs`, and the stats of the last one."""
    answers = runs[-1]
    seconds = [each[-1].seconds for each in runs]
    num_ranks = 1 if way == ONE_RANK else len(answers)
    lengths = even(len(token_ids), num_ranks) if isinstance(way, str) else way
    timing = spread(seconds)
    return {
        "length": len(token_ids),
        "method": name,
        "lengths": lengths,
        "num_ranks": len(lengths),
        "seconds": timing["median_s"],
        **timing,
        "rounds_s": seconds,
        "logits_difference": answers[-1].difference,
        "bytes_sent": sum(int(each.stats.get("bytes_sent", 0)) for each in answers),
        "seconds_waited": [each.stats.get("seconds_waited", 0.0) for each in answers],
    }


def simulate(length: int, cost: CostModel, link: Link, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Yield the seconds of every way over equal links, and its efficiency: seconds of one rank over those of all."""
    sizes = facts.sizes()
    for num_ranks in (2, 4, 8):
        plan = plan_over_link(length, num_ranks, cost, link, **sizes)
        found = {"planned": float(predict_ttft(plan, cost, link, **sizes))}
        for is_folded, is_ring in product((False, True), repeat=2):
            name = ("zig-zag" if is_folded else "even") + (", ring attention" if is_ring else ", all-gather")
            found[name] = predict_tsp_ttft(
                length, num_ranks, cost, link, **sizes, is_folded=is_folded, is_ring=is_ring
            )
        for way, seconds in found.items():
            efficiency = float(cost.seconds(length, 0)) / (num_ranks * seconds)
            yield {"length": length, "num_ranks": num_ranks, "way": way, "seconds": seconds, "efficiency": efficiency}


def _ways(length: int, world_size: int, shares: Sequence[tuple[float, ...]], plan: PartitionTable) -> dict[str, Way]:
    """Name the ways that a prompt is prefilled."""
    ways: dict[str, Way] = {ONE_RANK: ONE_RANK}
    if world_size > 1:
        ways |= {TSP: TSP, FOLDED: FOLDED, "even": even(length, world_size), "planned": predicted(length, plan)}
    for share in shares:
        ways["shares " + ",".join(f"{each:.3g}" for each in share)] = resolve_partition(share, length, world_size)
    return ways


def _predict(
    row: Mapping[str, Any], name: str, cost: CostModel, link: Link, facts: ModelFacts, world_size: int
) -> float:
    """Predict the seconds of a row."""
    if name in (TSP, FOLDED):
        return predict_tsp_ttft(row["length"], world_size, cost, link, **facts.sizes(), is_folded=name == FOLDED)
    return float(predict_ttft(row["lengths"], cost, link, **facts.sizes()))


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
        token_ids = ranks.call(encode, text)[0]
        if len(token_ids) < lengths[-1]:
            raise ValueError(f"the text has {len(token_ids)} tokens, but {lengths[-1]} are needed")
        facts = ranks.call(describe_model)[0]
        yield Settings(machine=ranks.describe_machine(facts.dtype))
        short = token_ids[:_WARM_UP_TOKENS]
        for way in dict.fromkeys((ONE_RANK, TSP, FOLDED, even(len(short), world_size))):
            ranks.call(prefill, short, way)
        plan = plan_table(ranks, facts, lengths) if table is None else ranks.call(load_table, str(table))[0]
        if table is None:
            yield Content(timings=[asdict(each) for each in plan.timings], worst_error_of_fit=worst_error(plan))
        cost = plan.cost
        # A table may be from another machine
        link = plan.link if table is None else measure_link(ranks, facts, lengths[-1])
        if link is not None:
            say(f"link: {link.bytes_per_second / 1e9:.4f} GB/s, {1e6 * link.latency:.0f} us a message")
        yield Content(cost=None if cost is None else asdict(cost), link=None if link is None else asdict(link))
        if cost is not None and link is not None:
            yield Content(simulated=[row for each in lengths for row in simulate(each, cost, link, facts)])
        ways = {each: _ways(each, world_size, shares, plan) for each in lengths}
        with track_progress(rounds * sum(map(len, ways.values()))) as announce:
            for each, own in ways.items():
                runs: dict[str, list[list[Prefill]]] = {name: [] for name in own}
                for turn in range(rounds):
                    # Forwards and backwards in turn
                    for name in list(own)[:: 1 if turn % 2 == 0 else -1]:
                        announce(f"{each} tokens, round {turn + 1}: {name}")
                        runs[name].append(ranks.call(prefill, token_ids[:each], own[name]))
                alone = statistics.median(run[-1].seconds for run in runs[ONE_RANK])
                for name, way in own.items():
                    row = make_row(name, way, runs[name], token_ids[:each])
                    row["speed_against_one_rank"] = alone / row["median_s"]
                    if cost is not None and link is not None and row["num_ranks"] > 1:
                        row["predicted_s"] = _predict(row, name, cost, link, facts, world_size)
                    yield row
