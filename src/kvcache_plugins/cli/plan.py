"""`kvcache-plugins plan`: which slice of a prompt each rank of KV-Runahead prefills, for `runahead_prefill`."""

from pathlib import Path
from typing import Annotated

import typer

from kvcache_plugins.console.display import print_line
from kvcache_plugins.console.inputs import DtypeOption, JsonOption, ModelOption
from kvcache_plugins.console.results import prepare_file, print_json


def main(
    world_size: Annotated[int, typer.Option(help="Ranks to plan for, all started on this machine's CPUs.", min=1)],
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts, such as 4096,8192.")],
    out: Annotated[Path | None, typer.Option(help="JSON file, for `runahead_prefill(..., partition=...)`.")] = None,
    model: ModelOption = "smollm2",
    search: Annotated[bool, typer.Option("--search", help="Search around the plan, by whole prefills.")] = False,
    rounds: Annotated[int, typer.Option(help="Runs that a median is over.", min=1)] = 3,
    num_threads: Annotated[int, typer.Option(help="Threads of every rank.", min=1)] = 1,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the slices of a prompt for KV-Runahead's ranks.

    The model is timed on this machine. Column "by": seconds were predicted (planned) or measured (searched). If there
    are fewer slices than ranks, the first ranks stay idle, which is faster. A table is for one machine, model and
    number of ranks.

    \b
    Examples:
        kvcache-plugins plan --world-size 2 --lengths 4096,8192 --out table.json
        kvcache-plugins plan --model gemma3-270m --world-size 4 --lengths 2048,4096 --search --out table.json
        kvcache-plugins plan --world-size 2 --lengths 4096 --json | jq .entries
    """
    if out is None and not as_json:
        raise ValueError("Give `--out`, `--json` or both, or the table would be lost")
    try:
        parsed = sorted({int(each) for each in lengths.split(",")})
    except ValueError as error:
        raise ValueError(f"`lengths` have to be numbers with commas between them but are {lengths!r}") from error
    # Timings of shorter slices would not differ
    least = 16 * world_size
    if parsed[0] < least:
        raise ValueError(f"`lengths` have to be at least {least} for {world_size} ranks but one is {parsed[0]}")
    if out is not None:
        prepare_file(out)
    from kvcache_plugins.eval.runahead.measure import describe_model
    from kvcache_plugins.eval.runahead.plan import plan_table, show_plan
    from kvcache_plugins.eval.runahead.ranks import Ranks

    print_line(f"starting {world_size} ranks", stderr=True)
    with Ranks(model, world_size, dtype=dtype, num_threads=num_threads) as ranks:
        facts = ranks.call(describe_model)[0]
        table = plan_table(ranks, facts, parsed, rounds, search=search)
    if out is not None:
        table.save(out)
    if as_json:
        print_json(table.document())
    else:
        show_plan(table, facts)
