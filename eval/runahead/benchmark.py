"""Benchmark of KV-Runahead: `kvcache-plugins bench runahead`.

Whole prefills are timed from a barrier of all ranks to the logits on the last one, which then also has the whole
cache, and shown beside the times that cost model and link predict.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from kvcache_plugins.eval.harness import spread
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, even, predicted, resolve_partition

from .measure import (
    FOLDED,
    ONE_RANK,
    TSP,
    ModelFacts,
    Prefill,
    Way,
)
from .simulation import plan_over_link, predict_ttft
from .tsp import predict_tsp_ttft


def parse_shares(text: str, world_size: int) -> tuple[float, ...]:
    """Parse shares of a prompt such as `0.6,0.4`; a `ValueError` for anything else, or for more shares than ranks."""
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"`partition` has to hold shares with commas between them but is {text!r}") from error
    # Check shares; the length does not matter
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


def list_ways(
    length: int, world_size: int, shares: Sequence[tuple[float, ...]], plan: PartitionTable
) -> dict[str, Way]:
    """Name the ways that a prompt is prefilled."""
    ways: dict[str, Way] = {ONE_RANK: ONE_RANK}
    if world_size > 1:
        ways |= {TSP: TSP, FOLDED: FOLDED, "even": even(length, world_size), "planned": predicted(length, plan)}
    for share in shares:
        ways["shares " + ",".join(f"{each:.3g}" for each in share)] = resolve_partition(share, length, world_size)
    return ways


def predict(
    row: Mapping[str, Any], name: str, cost: CostModel, link: Link, facts: ModelFacts, world_size: int
) -> float:
    """Predict the seconds of a row."""
    if name in (TSP, FOLDED):
        return predict_tsp_ttft(row["length"], world_size, cost, link, **facts.sizes(), is_folded=name == FOLDED)
    return float(predict_ttft(row["lengths"], cost, link, **facts.sizes()))
