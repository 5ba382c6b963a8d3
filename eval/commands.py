"""Commands of `kvcache-plugins` that use several folders of `eval`: options, help and rows.

Help reads this module, so it imports nothing heavy at the top: a command imports what it runs.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.console.inputs import ModelOption, read_text
from kvcache_plugins.console.results import find_commit

from .benchmark import benchmark, say
from .result_files import read_result
from .rows import Content, Found, KnownRows, Settings


if TYPE_CHECKING:
    from .runahead.measure import Prefill


# Tokens of the first prefills of KV-Runahead, which are not timed
_WARM_UP_TOKENS = 256


@benchmark("families")
def survey_families(
    pattern: Annotated[str, typer.Argument(help="Shell pattern of `model_type`s, such as 'qwen*'.")] = "*",
    cache: Annotated[list[str] | None, typer.Option(help="NAME or NAME:key=value,key=value; repeatable.")] = None,
    bits: Annotated[float, typer.Option(help="Bits that caches of `--cache` are held to.", min=1, max=16)] = 2.0,
    seconds: Annotated[float, typer.Option(help="After so many a family is given up.", min=1.0)] = 180.0,
    media: Annotated[bool, typer.Option("--media", help="Families of pictures, sounds and encoders instead.")] = False,
    resume: Annotated[Path | None, typer.Option(help="JSON file written after each family; skip those in it.")] = None,
) -> Iterator[Found]:
    """Try caches on a tiny random model of every decoder family.

    The families are those of the installed Transformers. Each cache, by default the presets that people get, is held
    against itself used in another way, and against DynamicCache: two turns, two prompts of unequal length, a prompt in
    chunks. It works, works and reads whole layers dense while decoding, refuses and says why, or FAILS.

    \b
    Examples:
        kvcache-plugins models
        kvcache-plugins models 'gemma*' --cache gear-2bit --cache h2o
        kvcache-plugins models --json | jq '.rows[] | select(.outcomes.transform.status != "works")'
        kvcache-plugins models --out eval/results/families.json
        kvcache-plugins models --media 'qwen*'
        kvcache-plugins models --media --resume media_families.json
    """
    from .families import PROMPT_LENGTH, cases_of, own_cases, try_families
    from .tiny_models import family_names, media_family_names

    names = media_family_names() if media else family_names()
    families = [name for name in names if fnmatchcase(name, pattern)]
    if not families:
        raise ValueError(f"`pattern` {pattern!r} matches no family; there are {', '.join(names)}")
    cases = cases_of(cache, bits) if cache else own_cases(has_media=media)
    yield Settings(families=pattern, caches=" ".join(cases), tokens=PROMPT_LENGTH)
    own = {"bits": bits, "seconds": seconds, "media": media, "families": pattern, "caches": " ".join(cases)}
    done = _finished_rows(resume, own)
    remaining = [name for name in families if name not in {row["family"] for row in done}]
    yield done
    # The file has this list, which is empty at the end
    yield Content(remaining=remaining)
    with track_progress(len(remaining)) as announce:
        for result in try_families(list(remaining), cases, announce, seconds, has_media=media):
            remaining.remove(result.family)
            yield asdict(result)


def _finished_rows(path: Path | None, settings: dict[str, object]) -> KnownRows:
    """Return rows of a survey's file, if there is one; refuse one of another commit or with other settings."""
    if path is None or not path.exists():
        return KnownRows()
    content = read_result(path)
    known = {key: content.get("settings", {}).get(key) for key in settings}
    if known != settings or content.get("commit") != find_commit():
        raise ValueError(f"`resume`: {path} was made at another commit or with other settings")
    return KnownRows(content["rows"])


def write_report(
    result: Annotated[Path, typer.Argument(help="A folder that a sweep has filled, or the JSON file of one result.")],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write; printed by default.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder to draw figures into.")] = None,
) -> None:
    """Tables and figures of a result.

    There are figures of a sweep, of `bench step` and of `eval fidelity`. A sweep gives accuracy against bytes and
    perplexity against position, steps give time against context, `eval fidelity` divergence against bytes.

    \b
    Examples:
        kvcache-plugins eval report eval/results/gear --figures docs/figures
        kvcache-plugins eval report eval/results/step_short_smollm2.json --figures docs/figures
    """
    from .tables import read_sweep, render_result

    if result.is_file() and result.suffix != ".json":
        raise ValueError(f"`result` has to be a folder or a .json file but is {result}")
    text = render_result(result.parent, result.stem if result.is_file() else result.name)
    if out is None:
        typer.echo(text)
    else:
        out.write_text(text, encoding="utf-8")
    if figures is None:
        return
    from .figures import draw_result, draw_sweep

    if result.is_dir():
        paths = draw_sweep(read_sweep(result), figures, result.name)
    else:
        paths = [draw_result(read_result(result), figures / f"{result.stem}.png")]
    for path in paths:
        typer.echo(f"drew {path}", err=True)


@benchmark("runahead", "Seconds to the first token of {model}, medians of {rounds}")
def benchmark_runahead(
    text_file: Annotated[Path, typer.Option(help="A text of at least as many tokens as the longest --length.")],
    length: Annotated[list[int], typer.Option(help="Tokens of the prompt; repeatable.", min=1)] = [4096, 8192],
    model: ModelOption = "smollm2",
    world_size: Annotated[int, typer.Option(help="Ranks, all started on this machine's CPUs.", min=1)] = 2,
    rounds: Annotated[int, typer.Option(help="Runs of everything, taking turns.", min=3)] = 5,
    num_threads: Annotated[int, typer.Option(help="Threads of every rank.", min=1)] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32 (default), bfloat16 or float16.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Table of `kvcache-plugins plan`; else slices are measured.")
    ] = None,
    partition: Annotated[list[str] | None, typer.Option(help="Shares such as 0.6,0.4; repeatable.")] = None,
) -> Iterator[Found]:
    """Time the first token of KV-Runahead, TSP, a zig-zag, one rank. All run on this machine and take turns.

    \b
    Examples:
        kvcache-plugins bench runahead --text-file book.txt
        kvcache-plugins bench runahead --text-file book.txt --length 8192 --partition 0.5,0.5 --partition 0.65,0.35
    """
    from kvcache_plugins.kv_runahead.planner import even

    from .runahead.benchmark import list_ways, make_row, parse_shares, predict, simulate
    from .runahead.measure import FOLDED, ONE_RANK, TSP, describe_model, encode, load_table, measure_link, prefill
    from .runahead.plan import plan_table, worst_error
    from .runahead.ranks import Ranks

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
        ways = {each: list_ways(each, world_size, shares, plan) for each in lengths}
        with track_progress(rounds * sum(map(len, ways.values()))) as announce:
            for each, own in ways.items():
                runs: dict[str, list[list[Prefill]]] = {name: [] for name in own}
                for turn in range(rounds):
                    # The order is reversed in every other round
                    for name in list(own)[:: 1 if turn % 2 == 0 else -1]:
                        announce(f"{each} tokens, round {turn + 1}: {name}")
                        runs[name].append(ranks.call(prefill, token_ids[:each], own[name]))
                alone = statistics.median(run[-1].seconds for run in runs[ONE_RANK])
                for name, way in own.items():
                    row = make_row(name, way, runs[name], token_ids[:each])
                    row["speed_against_one_rank"] = alone / row["median_s"]
                    if cost is not None and link is not None and row["num_ranks"] > 1:
                        row["predicted_s"] = predict(row, name, cost, link, facts, world_size)
                    yield row


def run_on_gpu(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files.")] = Path("eval/results"),
    call: Annotated[
        str | None, typer.Option(help="Parts to run: checks (240 s) or times (570 s); by default all.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(help="Seconds that it may take; by default the call's.", min=1)
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, to try the script; no GPU needed.")] = False,
    part: Annotated[str | None, typer.Option(help="One part only, in this process: checks, attention, ...")] = None,
) -> None:
    """Check and time kernels and steps on a GPU. Run it in the root of the repository, whose tests it uses.

    \b
    Examples:
        kvcache-plugins bench gpu --call checks
        kvcache-plugins bench gpu --call times
        kvcache-plugins bench gpu --part attention --out /tmp/results
        TRITON_INTERPRET=1 KVCACHE_PLUGINS_KERNELS=triton \\
            kvcache-plugins bench gpu --tiny --out /tmp/results
    """
    from .gpu import run_parts

    run_parts(out, limit, tiny, part, call)
