"""Time to first token of KV-Runahead beside TSP and beside one rank alone, all in the same processes, taking turns.

The time goes from a barrier of all ranks to the logits on the last one, which then also has the whole cache. With
`--throttle` the ranks talk through network namespaces, first at the full speed of virtual cables, then throttled.

    kvcache-plugins bench runahead --length 4096 --length 8192 --text-file FILE
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.display import make_table, open_console
from kvcache_plugins.console.inputs import ModelOption, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.kv_runahead.planner import resolve_partition

from .isolated_network import IsolatedNetwork
from .measure import (
    FULL,
    THROTTLED,
    encode,
)
from .rank_processes import Ranks
from .ways import LinkComparison, compare_links


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


def benchmark_runahead(
    text_file: Annotated[Path, typer.Option(help="A text of at least as many tokens as the longest --length.")],
    length: Annotated[list[int], typer.Option(help="Tokens of the prompt; repeatable.", min=1)] = [4096, 8192],
    model: ModelOption = "smollm2",
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
    """Time to first token of KV-Runahead, TSP and one rank. All run on ranks of this machine and take turns.

    \b
    Examples:
        kvcache-plugins bench runahead --text-file book.txt
        kvcache-plugins bench runahead --text-file book.txt --length 8192 --sweep 0.5,0.55,0.6,0.65,0.7,0.75
        kvcache-plugins bench runahead --text-file book.txt --length 4096 --throttle 0.1 --out throttled.json
    """
    shares = [parse_shares(each, world_size) for each in partition or []] + parse_sweep(sweep, world_size)
    text, lengths = read_text(text_file, "text_file"), sorted(set(length))
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
        benchmark = LinkComparison(ranks, lengths, rounds, shares)
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
