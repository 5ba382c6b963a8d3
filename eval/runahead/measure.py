"""KV-Runahead measured: prefills, slices and messages by ranks; the plan made of them; and the benchmark of it all.

Functions that take a `Worker` run in the ranks, all at once; the others give them work, see `ranks`. What takes long
is the slices: a few of them, first and last ones of each length, fix a cost model of four numbers, and partitions
follow from that. The benchmark puts what cost model and link say beside whole prefills, timed from a barrier of all
ranks to the logits on the last one, which then also has the whole cache.
"""

import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from transformers import DynamicCache

from kvcache_plugins.console.display import open_console, print_line, track_progress
from kvcache_plugins.console.inputs import ModelOption, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.harness import spread
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.eval.tables import Column, number, print_markdown, table
from kvcache_plugins.kv_runahead import planner
from kvcache_plugins.kv_runahead.chain import Chain, PrefixExchange, PromptSlice
from kvcache_plugins.kv_runahead.messages import MessageLayout, message_layouts
from kvcache_plugins.kv_runahead.prefill import runahead_prefill
from kvcache_plugins.kv_runahead.transport import Neighbours
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.fingerprint import fingerprint

from .ranks import Ranks, Worker
from .simulation import plan_over_link, predict_ttft
from .tsp import predict_tsp_ttft, tsp_prefill


# How a prompt is prefilled: by the last rank alone, by TSP, by that of a zig-zag, or by KV-Runahead in these slices
Way = str | tuple[int, ...]
ONE_RANK, TSP, FOLDED = "one rank", "TSP", "zig-zag"
# Messages of each size that are timed
_NUM_MESSAGES = 9
# Of long ones: less would go at once into the buffers of a link, and not tell its speed
_LEAST_BYTES = 1 << 23
# The first step of a search, in shares of an even slice: what is planned is near already
_FIRST_STEP = 16
_WARM_UP_TOKENS = 256
# Runs of every slice that is timed for the plan
_PLAN_ROUNDS = 3


class ModelFacts(NamedTuple):
    """Facts of a model that planning needs: `by_shapes` is its cost in operations, see `CostModel.of_shapes`."""

    fingerprint: str
    dtype: str
    num_layers: int
    bytes_per_token: int
    vocab_size: int
    by_shapes: planner.CostModel

    def sizes(self) -> dict[str, Any]:
        """Lists what planning over a link needs."""
        return {"bytes_per_token": self.bytes_per_token, "num_layers": self.num_layers}

    def random_tokens(self, length: int) -> list[int]:
        """Draws a prompt for measuring: what it says does not matter."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (length,), generator=generator, device="cpu").tolist()


class Prefill(NamedTuple):
    """
    A prefill as a rank saw it: seconds from the barrier to the logits on the last rank, to the end of its part on
    others; `stats` of `RunaheadOutput`; on the last rank the largest difference of logits from one rank's, if known.
    """

    seconds: float
    stats: dict[str, int | float]
    difference: float | None = None


class _NoExchange(PrefixExchange):
    """A slice behind a prefix of random numbers: everything that a rank does but receiving and sending."""

    def __init__(self, neighbours: Neighbours, layouts: list[MessageLayout], prompt_slice: PromptSlice):
        super().__init__(neighbours, layouts, prompt_slice)
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout, part = self.layouts[layer_idx], self.prompt_slice
        kept = layout.num_kept(part.start)
        rows = layout.make_rows(kept + part.num_tokens, part.batch_size)
        # Random numbers are made once; in every layer it is new memory that they stand in, as when they are received
        filled = self._rows.get(tuple(rows.shape))
        if filled is None:
            filled = self._rows[tuple(rows.shape)] = torch.randn_like(rows)
        rows.copy_(filled)
        layout.write(rows[kept:], keys, values)
        return (keys, values) if kept == 0 else layout.read(rows)


# In the ranks


def describe_model(worker: Worker) -> ModelFacts:
    """Describes the loaded model."""
    model = worker.model
    return ModelFacts(
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(message_layouts(model)),
        bytes_per_token=planner.bytes_of_token(model, model.dtype),
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        by_shapes=planner.CostModel.of_shapes(model),
    )


def encode(worker: Worker, text: str) -> list[int]:
    """Encodes a text."""
    return worker.tokenizer(text, verbose=False).input_ids


@torch.no_grad()
def prefill(worker: Worker, token_ids: Sequence[int], way: Way) -> Prefill:
    """Prefills a prompt and times it, all ranks beginning together."""
    input_ids, length = torch.tensor(token_ids, dtype=torch.int64, device="cpu")[None], len(token_ids)
    logits, stats = None, dict[str, int | float]()
    dist.barrier()
    start = time.perf_counter()
    if way != ONE_RANK:
        with warnings.catch_warnings():
            # That one rank prefills alone is what was planned then
            warnings.simplefilter("ignore")
            if isinstance(way, str):
                output = tsp_prefill(worker.model, input_ids, is_folded=way == FOLDED)
            else:
                output = runahead_prefill(worker.model, input_ids, partition=way)
        logits, stats = output.logits, output.stats
    elif worker.rank == worker.size - 1:
        cache = DynamicCache(config=worker.model.config.get_text_config(decoder=True))
        logits = worker.model(input_ids, **as_argument(cache), use_cache=True, logits_to_keep=1).logits
    seconds = time.perf_counter() - start
    if logits is None:
        return Prefill(seconds, stats)
    if way == ONE_RANK:
        worker.reference[length] = logits
    known = worker.reference.get(length)
    return Prefill(seconds, stats, None if known is None else float((logits - known).abs().max()))


@torch.no_grad()
def time_slice(worker: Worker, token_ids: Sequence[int], prefix: int) -> float:
    """Times a slice behind a prefix of random keys and values, while all other ranks do the same."""
    model = worker.model
    prompt_slice = PromptSlice(start=prefix, stop=prefix + len(token_ids), batch_size=1)
    exchange = _NoExchange(Neighbours(None, first=worker.rank, run=-1), message_layouts(model), prompt_slice)
    is_lazy = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    chain = Chain(exchange, is_lazy=is_lazy, cache=None)
    input_ids = torch.tensor(token_ids, dtype=torch.int64, device="cpu")[None]
    dist.barrier()
    start = time.perf_counter()
    with chain.running():
        model.base_model(input_ids, **as_argument(chain.cache), use_cache=True)
    return time.perf_counter() - start


def time_messages(worker: Worker, source: int, num_bytes: int) -> list[float]:
    """Times messages from rank `source` to the next, there and back and halved; nothing on the other ranks."""
    dist.barrier()
    if worker.rank not in (source, source + 1):
        return []
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    other = 2 * source + 1 - worker.rank
    seconds = []
    # The first one makes the connection
    for _ in range(_NUM_MESSAGES + 1):
        start = time.perf_counter()
        for is_sending in (worker.rank == source, worker.rank != source):
            (dist.send if is_sending else dist.recv)(buffer, other)
        seconds.append((time.perf_counter() - start) / 2)
    return seconds[1:]


# Work for them


def measure_link(ranks: Ranks, facts: ModelFacts, longest: int) -> planner.Link | None:
    """Measures the slowest link: latency by messages of a token, bandwidth by the longest prefix's; else `None`."""
    links = []
    sizes = facts.bytes_per_token, max(facts.bytes_per_token * longest, _LEAST_BYTES)
    for source in range(ranks.size - 1):
        short, long = (statistics.median(ranks.call(time_messages, source, size)[source]) for size in sizes)
        # Where both take equally long, all is latency, and bytes cost next to nothing
        bytes_per_second = (sizes[1] - sizes[0]) / max(long - short, 1e-9)
        latency = max(short - sizes[0] / bytes_per_second, 0.0)
        links.append(planner.Link(latency=latency, bytes_per_second=bytes_per_second))
    return max(links, key=lambda link: float(link.seconds(float(sizes[1]))), default=None)


def time_slices(ranks: Ranks, facts: ModelFacts, lengths: Sequence[int], rounds: int) -> list[planner.Timing]:
    """
    Times slices of prompts of `lengths` on all ranks at once, so that what ranks of one machine share is shared: first
    and last ones by the model's shapes, and quarters. Rounds take turns; the median over rounds and ranks is taken.
    """
    slices: set[tuple[int, int]] = set()
    for whole in lengths:
        partition, quarter = planner.planned(whole, ranks.size, facts.by_shapes), max(whole // 4, 1)
        slices |= {(partition[0], 0), (partition[-1], whole - partition[-1]), (quarter, 0), (quarter, whole - quarter)}
    seconds: dict[tuple[int, int], list[float]] = {each: [] for each in sorted(slices)}
    with track_progress(rounds * len(slices)) as announce:
        for _, (length, prefix) in product(range(rounds), seconds):
            announce(f"slices of {length} tokens behind {prefix}")
            seconds[length, prefix] += ranks.call(time_slice, facts.random_tokens(length), prefix)
    return [
        planner.Timing(length=length, prefix=prefix, seconds=statistics.median(values))
        for (length, prefix), values in seconds.items()
    ]


# `kvcache-plugins plan`


def plan_table(
    ranks: Ranks, facts: ModelFacts, lengths: list[int], rounds: int = _PLAN_ROUNDS, *, search: bool = False
) -> planner.PartitionTable:
    """Fits a cost model to slices, measures the link, and plans `lengths`, or searches them by whole prefills."""
    timings = time_slices(ranks, facts, lengths, rounds)
    cost = planner.CostModel.fit(timings, projection_share=facts.by_shapes.projection_share)
    link = measure_link(ranks, facts, lengths[-1])
    entries = []
    for length in lengths:
        if link is None:
            slices = planner.planned(length, ranks.size, cost)
        else:
            slices = plan_over_link(length, ranks.size, cost, link, **facts.sizes())
        is_searched = search and len(slices) > 1
        if is_searched:
            slices, seconds = _search(ranks, facts, slices, rounds)
        elif link is None:
            seconds = cost.seconds(float(length), 0.0)
        else:
            seconds = float(predict_ttft(slices, cost, link, **facts.sizes()))
        ratios = tuple(each / length for each in slices)
        entries.append(planner.TableEntry(length=length, ratios=ratios, seconds=seconds, measured=is_searched))
    origin: Any = provenance(torch.device("cpu"))
    return planner.PartitionTable(
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


def _search(ranks: Ranks, facts: ModelFacts, start: tuple[int, ...], rounds: int) -> tuple[tuple[int, ...], float]:
    """Searches the best partition by whole prefills from a planned one; returns also its seconds."""
    length, console = sum(start), open_console(stderr=True)
    token_ids = facts.random_tokens(length)

    def measure(partitions: Sequence[tuple[int, ...]]) -> Iterator[float]:
        for slices in partitions:
            seconds = statistics.median(ranks.call(prefill, token_ids, slices)[-1].seconds for _ in range(rounds))
            console.print(f"searching: {' + '.join(map(str, slices))} tokens take {seconds:.3f} s", markup=False)
            yield seconds

    return planner.searched(start, measure, first_step=max(length // (_FIRST_STEP * len(start)), 1))


def worst_error(table: planner.PartitionTable) -> float:
    """Computes the largest relative error that a table's cost model has in the timings that it was fitted to."""
    cost = table.cost
    assert cost is not None
    return max(abs(cost.seconds(each.length, each.prefix) / each.seconds - 1) for each in table.timings)


def show_plan(plan: planner.PartitionTable, facts: ModelFacts) -> None:
    """Prints a table of partitions, and the cost model and the link that it is founded on."""
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


# `kvcache-plugins bench runahead`


def parse_shares(text: str, world_size: int) -> tuple[float, ...]:
    """Parses shares of a prompt such as `0.6,0.4`; a `ValueError` if they are none, or more than there are ranks."""
    try:
        shares = tuple(float(each) for each in text.split(","))
    except ValueError as error:
        raise ValueError(f"`partition` has to hold shares with commas between them but is {text!r}") from error
    # The rest of what can be wrong with them does not depend on the length
    planner.resolve_partition(shares, 1000, world_size)
    return shares


def load_table(worker: Worker, path: str) -> planner.PartitionTable:
    """Loads a table of `kvcache-plugins plan`, checked against the model and number of ranks."""
    return planner.PartitionTable.load(path, worker.model, worker.size)


def make_row(name: str, way: Way, runs: Sequence[list[Prefill]], token_ids: Sequence[int]) -> dict[str, Any]:
    """Makes the row of a way: its slices, seconds of its `runs`, and of the last of them what the ranks tell of it."""
    answers, seconds = runs[-1], [each[-1].seconds for each in runs]
    num_ranks = 1 if way == ONE_RANK else len(answers)
    lengths = planner.even(len(token_ids), num_ranks) if isinstance(way, str) else way
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


def simulate(length: int, cost: planner.CostModel, link: planner.Link, facts: ModelFacts) -> Iterator[dict[str, Any]]:
    """Yields seconds, and one rank's over those of all together (efficiency), of every way over equal links."""
    sizes = cost, link, facts.bytes_per_token, facts.num_layers
    for num_ranks in (2, 4, 8):
        plan = plan_over_link(length, num_ranks, cost, link, **facts.sizes())
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
        token_ids = ranks.call(encode, text)[0]
        if len(token_ids) < lengths[-1]:
            raise ValueError(f"the text has {len(token_ids)} tokens, but {lengths[-1]} are needed")
        facts = ranks.call(describe_model)[0]
        yield Settings(machine=ranks.describe_machine(facts.dtype))
        short = token_ids[:_WARM_UP_TOKENS]
        for way in dict.fromkeys((ONE_RANK, TSP, FOLDED, planner.even(len(short), world_size))):
            ranks.call(prefill, short, way)
        known = plan_table(ranks, facts, lengths) if table is None else ranks.call(load_table, str(table))[0]
        if table is None:
            yield Content(timings=[asdict(each) for each in known.timings], worst_error_of_fit=worst_error(known))
        # A table may be of another machine
        cost, link = known.cost, known.link if table is None else measure_link(ranks, facts, lengths[-1])
        if link is not None:
            say(f"link: {link.bytes_per_second / 1e9:.4f} GB/s, {1e6 * link.latency:.0f} us a message")
        yield Content(cost=None if cost is None else asdict(cost), link=None if link is None else asdict(link))
        if cost is not None and link is not None:
            yield Content(simulated=[row for each in lengths for row in simulate(each, cost, link, facts)])
        ways: dict[int, dict[str, Way]] = {each: {ONE_RANK: ONE_RANK} for each in lengths}
        for each, own in ways.items():
            if world_size > 1:
                own |= {TSP: TSP, FOLDED: FOLDED, "even": planner.even(each, world_size)}
                own["planned"] = planner.predicted(each, known)
            for share in shares:
                name = "shares " + ",".join(f"{one:.3g}" for one in share)
                own[name] = planner.resolve_partition(share, each, world_size)
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
                        sizes = cost, link, facts.bytes_per_token, facts.num_layers
                        if name in (TSP, FOLDED):
                            row["predicted_s"] = predict_tsp_ttft(each, world_size, *sizes, is_folded=name == FOLDED)
                        else:
                            row["predicted_s"] = float(predict_ttft(row["lengths"], *sizes))
                    yield row
