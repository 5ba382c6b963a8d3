"""Measurements of KV-Runahead by ranks: prefills, slices and messages.

Functions that take a `Worker` run in all ranks at once; the others give work to ranks, see `ranks`. Timing slices
takes longest. A few slices, first and last ones of each length, determine a cost model of four numbers, from which
partitions are planned.
"""

import statistics
import time
import warnings
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, TypedDict

import torch
import torch.distributed as dist
from transformers import DynamicCache

from kvcache_plugins.console.display import track_progress
from kvcache_plugins.kv_runahead.messages import MessageLayout, message_layouts
from kvcache_plugins.kv_runahead.planner import CostModel, Link, PartitionTable, Timing, bytes_of_token, planned
from kvcache_plugins.kv_runahead.prefill import runahead_prefill
from kvcache_plugins.kv_runahead.prefix_exchange import PrefixExchange, PromptSlice
from kvcache_plugins.kv_runahead.runahead_layer import SlicePrefill
from kvcache_plugins.kv_runahead.transport import Neighbours
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.fingerprint import fingerprint

from .ranks import Ranks, Worker
from .tsp import tsp_prefill


# Way to prefill a prompt: by the last rank alone, by TSP, by TSP in a zig-zag, or by KV-Runahead in these slices
Way = str | tuple[int, ...]
ONE_RANK = "one rank"
TSP = "TSP"
FOLDED = "zig-zag"
# Timed messages of each size
_NUM_MESSAGES = 9
# Least bytes of a long message: a short one goes at once into the buffers of a link, and does not show its speed
_LEAST_BYTES = 1 << 23


class SimulationSizes(TypedDict):
    """Sizes of a model that a simulation of the link needs."""

    bytes_per_token: float
    num_layers: int


class ModelFacts(NamedTuple):
    """
    Facts of a model that planning needs.

    Attributes:
        fingerprint (`str`), dtype (`str`): of the model.
        num_layers, bytes_per_token, vocab_size (`int`): layers, bytes of a token in one layer, and vocabulary.
        by_shapes (`CostModel`): cost in operations, see `CostModel.of_shapes`.
    """

    fingerprint: str
    dtype: str
    num_layers: int
    bytes_per_token: int
    vocab_size: int
    by_shapes: CostModel

    def sizes(self) -> SimulationSizes:
        """Return the sizes for a simulation."""
        return {"bytes_per_token": self.bytes_per_token, "num_layers": self.num_layers}

    def random_tokens(self, length: int) -> list[int]:
        """Draw a prompt for measuring, whose content does not matter."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (length,), generator=generator, device="cpu").tolist()


class Prefill(NamedTuple):
    """
    A prefill on one rank.

    Attributes:
        seconds (`float`): time from the barrier to the logits on the last rank, to the end of their part on others.
        stats (`dict`): stats of `RunaheadOutput`.
        difference (`float`, *optional*): largest difference of logits from those of one rank, on the last rank if
            one rank has prefilled a prompt of the length before.
    """

    seconds: float
    stats: dict[str, int | float]
    difference: float | None = None


class _NoExchange(PrefixExchange):
    """Exchange of a slice behind a prefix of random values: all work of a rank but receiving and sending."""

    def __init__(self, neighbours: Neighbours, layouts: list[MessageLayout], prompt_slice: PromptSlice) -> None:
        super().__init__(neighbours, layouts, prompt_slice)
        self._random: dict[tuple[int, ...], torch.Tensor] = {}

    def exchange(self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layout, part = self.layouts[layer_idx], self.prompt_slice
        kept = layout.num_kept(part.start)
        rows = layout.make_rows(kept + part.num_tokens, part.batch_size)
        shape = tuple(rows.shape)
        if shape not in self._random:
            self._random[shape] = torch.randn_like(rows)
        # Every layer has new memory, as if it were received
        rows.copy_(self._random[shape])
        layout.write(rows[kept:], keys, values)
        return (keys, values) if kept == 0 else layout.read(rows)


def describe_model(worker: Worker) -> ModelFacts:
    """Describe the loaded model."""
    model = worker.model
    return ModelFacts(
        fingerprint=fingerprint(model),
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(message_layouts(model)),
        bytes_per_token=bytes_of_token(model, model.dtype),
        vocab_size=model.config.get_text_config(decoder=True).vocab_size,
        by_shapes=CostModel.of_shapes(model),
    )


def encode(worker: Worker, text: str) -> list[int]:
    """Encode a text."""
    ids: list[int] = worker.tokenizer(text, verbose=False).input_ids
    return ids


def load_table(worker: Worker, path: str) -> PartitionTable:
    """Load a table of `kvcache-plugins plan`, checked against the model and the number of ranks."""
    return PartitionTable.load(path, worker.model, worker.size)


@torch.no_grad()
def prefill(worker: Worker, token_ids: Sequence[int], way: Way) -> Prefill:
    """Prefill a prompt, all ranks starting together, and time it."""
    input_ids = torch.tensor(token_ids, dtype=torch.int64, device="cpu")[None]
    length = len(token_ids)
    logits: torch.Tensor | None = None
    stats: dict[str, int | float] = {}
    dist.barrier()
    start = time.perf_counter()
    if way != ONE_RANK:
        with warnings.catch_warnings():
            # A plan may leave the prompt to one rank, which warns
            warnings.simplefilter("ignore")
            if isinstance(way, str):
                output = tsp_prefill(worker.model, input_ids, is_folded=way == FOLDED)
            else:
                output = runahead_prefill(worker.model, input_ids, partition=way)
        logits = output.logits
        stats = output.stats
    elif worker.rank == worker.size - 1:
        cache = DynamicCache(config=worker.model.config.get_text_config(decoder=True))
        logits = worker.model(input_ids, **as_argument(cache), use_cache=True, logits_to_keep=1).logits
    seconds = time.perf_counter() - start
    if logits is None:
        return Prefill(seconds, stats)
    if way == ONE_RANK:
        worker.reference[length] = logits
    expected = worker.reference.get(length)
    return Prefill(seconds, stats, None if expected is None else float((logits - expected).abs().max()))


@torch.no_grad()
def time_slice(worker: Worker, token_ids: Sequence[int], prefix: int) -> float:
    """Time a slice behind a prefix of random keys and values, while all other ranks do the same."""
    model = worker.model
    prompt_slice = PromptSlice(start=prefix, stop=prefix + len(token_ids), batch_size=1)
    exchange = _NoExchange(Neighbours(None, first=worker.rank, run=-1), message_layouts(model), prompt_slice)
    is_lazy = model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    own = SlicePrefill(exchange, is_lazy=is_lazy, cache=None)
    input_ids = torch.tensor(token_ids, dtype=torch.int64, device="cpu")[None]
    dist.barrier()
    start = time.perf_counter()
    with own.running():
        model.base_model(input_ids, **as_argument(own.cache), use_cache=True)
    return time.perf_counter() - start


def time_messages(worker: Worker, source: int, num_bytes: int) -> list[float]:
    """Time messages from rank `source` to the next and back, and halve the times; other ranks return nothing."""
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


def measure_link(ranks: Ranks, facts: ModelFacts, longest: int) -> Link | None:
    """
    Measure the slowest link, `None` of a single rank: latency by messages of one token, bandwidth by those of the
    longest prefix.
    """
    links = []
    short_bytes = facts.bytes_per_token
    long_bytes = max(facts.bytes_per_token * longest, _LEAST_BYTES)
    for source in range(ranks.size - 1):
        short = statistics.median(ranks.call(time_messages, source, short_bytes)[source])
        long = statistics.median(ranks.call(time_messages, source, long_bytes)[source])
        # If both take equally long, all of it is latency, and bytes cost next to nothing
        bytes_per_second = (long_bytes - short_bytes) / max(long - short, 1e-9)
        latency = max(short - short_bytes / bytes_per_second, 0.0)
        links.append(Link(latency=latency, bytes_per_second=bytes_per_second))
    return max(links, key=lambda link: float(link.seconds(float(long_bytes))), default=None)


def time_slices(ranks: Ranks, facts: ModelFacts, lengths: Sequence[int], rounds: int) -> list[Timing]:
    """
    Time slices of prompts of `lengths`: first and last ones by the model's shapes, and quarters.

    All ranks run the same slice at once, so that they share a machine as in a prefill. Slices take turns in every
    round, and the median over rounds and ranks is taken.
    """
    slices: set[tuple[int, int]] = set()
    for whole in lengths:
        partition, quarter = planned(whole, ranks.size, facts.by_shapes), max(whole // 4, 1)
        slices |= {(partition[0], 0), (partition[-1], whole - partition[-1]), (quarter, 0), (quarter, whole - quarter)}
    seconds: dict[tuple[int, int], list[float]] = {each: [] for each in sorted(slices)}
    with track_progress(rounds * len(slices)) as announce:
        for _, (length, prefix) in product(range(rounds), seconds):
            announce(f"slices of {length} tokens behind {prefix}")
            seconds[length, prefix] += ranks.call(time_slice, facts.random_tokens(length), prefix)
    return [
        Timing(length=length, prefix=prefix, seconds=statistics.median(values))
        for (length, prefix), values in seconds.items()
    ]
