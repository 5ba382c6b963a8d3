"""Decode steps and attention alone over shapes: kinds of heads, dtypes, batches, threads and contexts, in one table.

Steps are those of random models that stand for SmolLM2, a fifth as deep and with a fifth of its words, so that the
parts of a step keep their proportions; `gqa-4` has Llama 3 8B's heads. Caches are filled with states, not by reading.
In each place of the table the caches take turns.

    kvcache-plugins bench shapes --out eval/results/shapes_cpu.json
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvcache_plugins.console.inputs import parse_dtype
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.caches import REFERENCE, check_length, with_reference
from kvcache_plugins.eval.harness.filled_caches import States, fill_cache, read_states
from kvcache_plugins.eval.harness.timing import spread, time_in_turns
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec

from .contest import Contest, Shape


PARTS = ("step", "attention")
# Tokens that are read; longer contexts are these again
_TOKENS_READ = 512
# Attention alone is timed over compressed tokens alone, which are whole groups
_GROUP = 64
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Heads of a random model: `num_heads` for keys and values, with `groups` query heads each."""

    num_heads: int
    groups: int
    head_dim: int = 64
    num_layers: int = 6

    def config(self) -> LlamaConfig:
        """A model of these heads, with SmolLM2's other proportions."""
        hidden_size = self.num_heads * self.groups * self.head_dim if self.head_dim == 64 else 1024
        return LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=hidden_size * 8 // 3,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads * self.groups,
            num_key_value_heads=self.num_heads,
            head_dim=self.head_dim,
            vocab_size=9830,
            max_position_embeddings=32768,
        )


SHAPES = {
    "mha": Heads(num_heads=9, groups=1),
    "gqa-3": Heads(num_heads=3, groups=3),
    "gqa-4": Heads(num_heads=8, groups=4, head_dim=128, num_layers=2),
    "mqa": Heads(num_heads=1, groups=9),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in the table, for all numbers of threads."""

    shape: str
    dtype: str
    batch_size: int
    context: int

    @property
    def dense_bytes(self) -> int:
        """Counts the bytes of a dense cache there, of all layers."""
        heads = SHAPES[self.shape]
        states = 2 * heads.num_layers * heads.num_heads * heads.head_dim * self.batch_size * self.context
        return states * parse_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}, batch {self.batch_size}, {self.context} tokens"


def time_steps(
    network: PreTrainedModel,
    states: States,
    place: Place,
    specs: Sequence[str],
    threads: Sequence[int],
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Rows of decode steps in one place, a cache and number of threads each."""
    caches: dict[str, Cache] = {}
    for spec in specs:
        name, options = parse_cache_spec(spec)
        caches[spec] = create_cache(name, network, **options)
        fill_cache(caches[spec], states, place.context, place.batch_size)
    token_ids = torch.full((place.batch_size, 1), 7)
    steps = {spec: partial(network, token_ids, **as_argument(cache)) for spec, cache in caches.items()}
    # Of the first step: nothing is timed that does not answer as the first cache does
    logits = {spec: step().logits[:, -1].float() for spec, step in steps.items()}
    for cache in caches.values():
        check_length(cache, place.context + 1)
    reference = logits[specs[0]]
    errors = {spec: float((each - reference).norm() / reference.norm()) for spec, each in logits.items()}
    return _time_with_threads(steps, errors, place, "step", threads, rounds, seconds)


def time_attention(
    place: Place, specs: Sequence[str], threads: Sequence[int], rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Rows of attention alone in one place: dense, and over the storage of each GEAR cache, checked first."""
    if place.context % _GROUP:
        return []
    heads = SHAPES[place.shape]
    shape = Shape(
        context=place.context,
        batch_size=place.batch_size,
        num_heads=heads.num_heads,
        groups=heads.groups,
        head_dim=heads.head_dim,
    )
    contest = Contest(shape, parse_dtype(place.dtype), _CPU)
    for spec in specs:
        contest.add(spec)
    functions = {name: contest.functions[name] for name in (contest.dense_name, *specs)}
    return _time_with_threads(functions, contest.errors, place, "attention", threads, rounds, seconds)


def _time_with_threads(
    functions: Mapping[str, Callable[[], Any]],
    errors: Mapping[str, float],
    place: Place,
    part: str,
    threads: Sequence[int],
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    rows = []
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        measured = {name: spread(times) for name, times in time_in_turns(functions, _CPU, rounds, seconds).items()}
        first = next(iter(measured.values()))["median_s"]
        rows += [
            {
                "part": part,
                "shape": place.shape,
                "dtype": place.dtype,
                "batch_size": place.batch_size,
                "num_threads": num_threads,
                "context": place.context,
                "cache": name,
                **each,
                "speed_against_first": first / each["median_s"],
                "relative_error": errors.get(name, 0.0),
            }
            for name, each in measured.items()
        ]
    return rows


@torch.inference_mode()
def benchmark_shapes(
    part: Annotated[list[str], typer.Option(help="step or attention; repeatable.")] = ["step", "attention"],
    cache: Annotated[list[str], typer.Option(help="A GEAR preset, beside dynamic; repeatable.")] = [
        "gear-k4v3",
        "gear-t22",
    ],
    shape: Annotated[list[str], typer.Option(help="mha, gqa-3, gqa-4 or mqa; repeatable.")] = [
        "mha",
        "gqa-3",
        "gqa-4",
        "mqa",
    ],
    dtype: Annotated[list[str], typer.Option(help="float32, bfloat16 or float16; repeatable.")] = [
        "float32",
        "bfloat16",
    ],
    batch_size: Annotated[list[int], typer.Option(help="Sequences; repeatable.", min=1)] = [1, 8],
    num_threads: Annotated[list[int], typer.Option(help="Of the CPU; repeatable.", min=1)] = [1, 2],
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [
        1,
        64,
        256,
        1024,
        4096,
        16384,
    ],
    rounds: Annotated[int, typer.Option(help="Times that each is timed in one place.", min=3)] = 20,
    seconds: Annotated[float, typer.Option(help="After these, three rounds are enough in one place.", min=0)] = 1.0,
    max_gigabytes: Annotated[float, typer.Option(help="Places where a dense cache takes more are left out.")] = 2.5,
    limit: Annotated[float, typer.Option(help="Seconds after which no further place is begun.", min=0)] = 3600.0,
) -> dict[str, Any]:
    """Time steps and attention over shapes. Heads, dtypes, batches, threads and contexts, each with each.

    Steps are those of small random models; caches are filled with states, not by reading. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench shapes --out shapes.json
        kvcache-plugins bench shapes --part step --shape mqa --dtype bfloat16 --context 4096 --cache gear
    """
    for name, values, accepted in (("part", part, PARTS), ("shape", shape, tuple(SHAPES))):
        for value in values:
            check_choice(name, value, accepted)
    for precision in dtype:
        parse_dtype(precision)
    caches = with_reference(check_caches(cache))
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    for kind, precision in product(shape, dtype):
        places = [
            Place(shape=kind, dtype=precision, batch_size=size, context=length)
            for size, length in product(batch_size, context)
        ]
        fitting = [place for place in places if place.dense_bytes <= max_gigabytes * 1e9]
        failures += [
            {"what": str(place), "reason": f"a dense cache of {place.dense_bytes / 1e9:.1f} GB"}
            for place in places
            if place not in fitting
        ]
        timers: list[Callable[[Place], list[dict[str, Any]]]] = []
        if "step" in part:
            network, states = random_model(kind, precision)
            timers.append(
                partial(time_steps, network, states, specs=caches, threads=num_threads, rounds=rounds, seconds=seconds)
            )
        if "attention" in part:
            specs = [spec for spec in caches if parse_cache_spec(spec)[0] != REFERENCE]
            timers.append(
                partial(time_attention, specs=specs, threads=num_threads, rounds=rounds, seconds=seconds / 4)
            )
        for place in fitting:
            if time.perf_counter() - start > limit:
                failures.append({"what": str(place), "reason": f"{limit:.0f} seconds were over"})
                continue
            for timer in timers:
                rows += timer(place)
            typer.echo(describe(place, rows))
    settings = {"rounds": rounds, "seconds": seconds}
    return {"benchmark": "shapes", **provenance(_CPU), "settings": settings, "rows": rows, "failures": failures}


def random_model(kind: str, dtype: str) -> tuple[PreTrainedModel, States]:
    """A model of one of `SHAPES`, and the states of `_TOKENS_READ` random tokens of it."""
    torch.manual_seed(0)
    # The decorator that Transformers puts on `to` loses its `self` in the eyes of mypy
    network: Any = LlamaForCausalLM(SHAPES[kind].config())
    network = network.to(parse_dtype(dtype)).eval()
    return network, read_states(network, torch.randint(network.config.vocab_size, (1, _TOKENS_READ)))


def describe(place: Place, rows: Sequence[Mapping[str, Any]]) -> str:
    """One line of what was measured in one place."""
    own = [
        row
        for row in rows
        if (row["shape"], row["dtype"], row["batch_size"], row["context"])
        == (place.shape, place.dtype, place.batch_size, place.context)
    ]
    times = (f"{row['part']} {row['cache']} {row['num_threads']}: {1e3 * row['median_s']:.2f} ms" for row in own)
    return f"{place}: {', '.join(times)}"
