"""Whole decode steps of a model, and prompts, through several caches that take turns in one process.

The context of steps is the text's, read by the model through each cache; or, with `read`, the states of its first
tokens, repeated, where a prefill would take far longer than the steps. With `shape` models are random ones that stand
for SmolLM2, a fifth as deep and with a fifth of its words, so that the parts of a step keep their proportions; `gqa-4`
has Llama 3 8B's heads.

Prompts are read at once and in chunks, and several new tokens behind them, for which a cache is copied, untimed, so
that all rounds begin with the same; what coding them takes is timed too.
"""

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from operator import truediv
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel

from kvcache_plugins.console import inputs
from kvcache_plugins.eval import harness
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings, say
from kvcache_plugins.eval.rows import Failure, Found, Settings
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import parse_dtype
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import create_cache
from kvcache_plugins.reports.memory import measure_memory


# Of random models: longer contexts are these again
_TOKENS_READ = 512


def llama(*sizes: int, **more: int) -> dict[str, int]:
    """Makes the fields of a `LlamaConfig`: words, widths, layers, heads of queries and of keys, length; and `more`."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**dict(zip((*names, "num_key_value_heads", "max_position_embeddings"), sizes, strict=True)), **more}


def make_shape(num_heads: int, groups: int, head_dim: int = 64, num_layers: int = 6) -> dict[str, int]:
    """Makes the fields of a model with `num_heads` for keys and values, and SmolLM2's other proportions."""
    width = num_heads * groups * head_dim if head_dim == 64 else 1024
    return llama(9830, width, width * 8 // 3, num_layers, num_heads * groups, num_heads, 32768, head_dim=head_dim)


SHAPES = {
    "mha": partial(make_shape, num_heads=9, groups=1),
    "gqa-3": partial(make_shape, num_heads=3, groups=3),
    "gqa-4": partial(make_shape, num_heads=8, groups=4, head_dim=128, num_layers=2),
    "mqa": partial(make_shape, num_heads=1, groups=9),
}


def time_steps(
    network: Callable[..., Any],
    caches: Mapping[str, Cache],
    token_ids: torch.Tensor,
    context: int,
    instead: Mapping[str, Callable[..., Any]] | None = None,
    **limits: Any,
) -> Iterator[Any]:
    """
    Times every decode step of each cache that holds `context` tokens already, fed `[batch_size, steps]`; they take
    turns. By the names of caches, what is called `instead` of the model; `limits` are those of `take_turns`.

    Yields a row for each cache that took at least three turns, speeds against the first of them and the relative error
    of the first step's logits beside the first cache's; and a `Failure` for each that took fewer turns than all.
    """
    logits: dict[str, torch.Tensor] = {}

    def step(name: str, number: int) -> None:
        call = (instead or {}).get(name, network)
        output = call(token_ids[:, number : number + 1], **as_argument(caches[name]))
        if number == 0:
            logits[name] = output.logits[:, -1].float()

    functions = {name: partial(step, name) for name in caches}
    clock = partial(harness.time_call, device=token_ids.device)
    seconds = harness.take_turns(functions, clock, token_ids.shape[1], **limits)
    errors = _relative_errors(logits)
    first = next((statistics.median(times) for times in seconds.values() if len(times) > 2), 1.0)
    for name, times in seconds.items():
        if len(times) > 2:
            yield {
                "context": context,
                "cache": name,
                **harness.spread(times),
                # What a token costs with its share of compressing a chunk; a median leaves that out
                "mean_s": statistics.fmean(times),
                "speed_against_first": first / statistics.median(times),
                "steps": len(times),
                "tokens_per_s": token_ids.shape[0] / statistics.median(times),
                "relative_error": errors[name],
                "bytes": measure_memory(caches[name]).total_bytes,
                "stats": harness.cache_stats(caches[name]),
            }
        if len(times) < token_ids.shape[1]:
            yield Failure(f"{name}, steps after {len(times)}", "skipped: time, or what stands above")


def _relative_errors(logits: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Computes how far logits are from the first ones."""
    first = next(iter(logits.values()), torch.empty(0, dtype=torch.float32, device="cpu"))
    return {name: float((each - first).norm() / first.norm()) for name, each in logits.items()}


@benchmark("step", "Decode steps of {model}, {dtype}")
@torch.inference_mode()
def benchmark_steps(
    cache: inputs.CachesOption,
    text_file: Annotated[Path | None, typer.Option(help="A text of --context (or --read) + --steps tokens.")] = None,
    model: inputs.ModelOption = "smollm2",
    shape: Annotated[
        list[str] | None, typer.Option(help="Instead of a model and text random mha, gqa-3, gqa-4 or mqa; repeatable.")
    ] = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [4096],
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    batch_size: Annotated[list[int], typer.Option(help="Sequences; repeatable.", min=1)] = [1],
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 (default on CPU), bfloat16 (elsewhere) or float16; repeatable.")
    ] = None,
    num_threads: Annotated[list[int] | None, typer.Option(help="Of the CPU; repeatable.", min=1)] = None,
    read: Annotated[int | None, typer.Option(help="Tokens whose states are repeated up to --context.", min=64)] = None,
) -> Iterator[Found]:
    """Time whole decode steps of a model. Caches take turns.

    Speeds are against the first cache, of random models against `dynamic`. Lists of contexts, batches, dtypes and
    threads are all measured with each other.

    \b
    Examples:
        kvcache-plugins bench step --cache dynamic --cache transform --text-file book.txt
        kvcache-plugins bench step --cache dynamic --cache transform --context 65536 --read 4096 --text-file book.txt
        kvcache-plugins bench step --cache transform --shape mqa --shape gqa-4 --num-threads 1 --num-threads 2
    """
    for each in shape or ():
        check_choice("shape", each, tuple(SHAPES))
    for each in dtype or ():
        parse_dtype(each)
    if text_file is None and not shape:
        raise ValueError("`text_file` has to be given, or `shape` for random models, which read none")
    specs = dict.fromkeys([*[harness.REFERENCE] * bool(shape), *cache])
    threads = num_threads or [torch.get_num_threads()]
    read = _TOKENS_READ if shape else read
    num_fed = steps * len(threads)
    yield Settings(dtype=", ".join(dtype or []))
    kinds: list[str | None] = [*shape] if shape else [None]
    precisions: list[str | None] = [*dtype] if dtype else [None]
    for kind, precision in product(kinds, precisions):
        num_read = max(context) if read is None else read
        network, token_ids = load_or_make(model, kind, text_file, num_read + num_fed, precision)
        yield from loaded_settings(network) if len(dtype or ()) < 2 else ()
        states = None if read is None else harness.read_states(network, token_ids[:, :read])
        for size, length in product(batch_size, context):
            where = f"{' '.join(filter(None, (kind or model, precision)))}, batch {size}, {length} tokens"
            caches: dict[str, Cache] = {}
            for name in specs:
                caches[name] = create_cache(name, network)
                if states is None:
                    read_prompt(network, caches[name], token_ids[:, :length], length)
                    if size > 1:
                        caches[name].batch_repeat_interleave(size)
                else:
                    harness.fill_with_states(caches[name], states, length, size)
                say(f"{where}: {'read through' if states is None else 'filled into'} {name}")
            at = length if read is None else read
            fed = token_ids[:, at : at + num_fed].expand(size, -1)
            for number, part in zip(threads, fed.split(steps, dim=1), strict=True):
                torch.set_num_threads(number)
                place = {"batch_size": size, "num_threads": number, "dtype": str(network.dtype).removeprefix("torch.")}
                place |= {"part": "step", "shape": kind} if kind else {}
                # All of them are timed to the end
                yield from ({**place, **row} for row in time_steps(network, caches, part, length))
            for used_cache in caches.values():
                harness.check_length(used_cache, length + num_fed)


def random_model(fields: Mapping[str, int], dtype: torch.dtype, device: torch.device | None = None) -> PreTrainedModel:
    """Makes a random Llama, always the same, on the device: nothing is downloaded or copied."""
    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load_or_make(
    model: str, shape: str | None, text_file: Path | None, num_tokens: int, dtype: str | None = None
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Loads a model with the first tokens of a file, or makes a random one of a shape in `SHAPES` with random ones."""
    if shape is None:
        assert text_file is not None
        return harness.load_with_tokens(model, text_file, num_tokens, dtype)
    network = random_model(SHAPES[shape](), parse_dtype(dtype or "float32"))
    return network, torch.randint(network.config.vocab_size, (1, num_tokens), device="cpu")


@contextmanager
def coding_seconds(cache: Cache) -> Iterator[list[float]]:
    """Times every call by which a layer stores a prompt, while this lasts."""
    seconds: list[float] = []
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, LazyLayer)]

    def timed(settle: Callable[[], None]) -> None:
        seconds.append(harness.time_call(settle))

    for layer in layers:
        layer.commit_prompt = partial(timed, layer.commit_prompt)
    try:
        yield seconds
    finally:
        for layer in layers:
            del layer.commit_prompt


def read_prompt(network: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Reads tokens `[1, tokens]` into a cache, `chunk` at a time; returns the last one's logits."""
    *_, logits = harness.feed(network, token_ids, cache, chunk, needs_logits=False)
    return logits[0, -1].float()


def time_reading(
    network: PreTrainedModel,
    makers: Mapping[str, Callable[[], Cache]],
    token_ids: torch.Tensor,
    chunk: int,
    rounds: int,
) -> tuple[list[dict[str, Any]], dict[str, Cache]]:
    """
    Times what caches take for the same tokens `[1, tokens]`, `chunk` at a time, by turns; a maker makes each turn's.
    Returns a row for each, times and logits against the first, and the last caches, with the tokens in them.
    """
    coding: dict[str, list[float]] = {name: [] for name in makers}
    logits: dict[str, torch.Tensor] = {}
    caches: dict[str, Cache] = {}

    @contextmanager
    def turn(name: str) -> Iterator[None]:
        caches[name] = makers[name]()
        with coding_seconds(caches[name]) as coded:
            yield
        coding[name].append(sum(coded))

    def read(name: str, number: int) -> None:
        logits[name] = read_prompt(network, caches[name], token_ids, chunk)

    clock = partial(harness.time_call, device=network.device)
    seconds = harness.take_turns({name: partial(read, name) for name in makers}, clock, rounds, guard=turn)
    errors, first = _relative_errors(logits), next(iter(seconds.values()))
    rows = [
        {
            "new_tokens": token_ids.shape[1],
            "chunk": min(chunk, token_ids.shape[1]),
            "cache": name,
            **harness.spread(times),
            "time_against_first": statistics.median(times) / statistics.median(first),
            "coding_share": statistics.median(map(truediv, coding[name], times)),
            "relative_error": errors[name],
        }
        for name, times in seconds.items()
    ]
    return rows, caches


@benchmark("prompts", "Prompts of {model}, {dtype}")
@torch.inference_mode()
def benchmark_prompts(
    cache: inputs.CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --new-tokens tokens.")],
    model: inputs.ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 4096,
    new_tokens: Annotated[list[int], typer.Option(help="Tokens behind it; repeatable.", min=1)] = [
        17,
        128,
        512,
        2048,
    ],
    chunk: Annotated[list[int], typer.Option(help="Chunks that it is read in; repeatable.", min=1)] = [512],
    rounds: Annotated[int, typer.Option(help="Rounds that a median is over.", min=1)] = 3,
    dtype: inputs.DtypeOption = None,
    num_threads: inputs.NumThreadsOption = None,
) -> Iterator[Found]:
    """Time prompts, chunks of them, and tokens behind them. Times are against those of the first cache.

    What coding them takes is timed too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache transform --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache transform --context 8192 --chunk 512 --text-file book.txt
    """
    network, token_ids = harness.load_with_tokens(model, text_file, context + max(new_tokens, default=0), dtype)
    makers = harness.cache_factories(cache, network)
    yield from loaded_settings(network)
    for make in makers.values():
        # What compiles on first use
        read_prompt(network, make(), token_ids[:, : min(context, 256)], 256)
    held: dict[str, Cache] = {}
    for size in (context, *chunk):
        say(f"{context} tokens, {size} at a time")
        rows, caches = time_reading(network, makers, token_ids[:, :context], size, rounds)
        held = held or caches
        for row in rows:
            yield {"what": "prompt" if size == context else "chunks", "context": 0, **row}
    for count in new_tokens:
        say(f"{count} tokens behind {context}")
        copies = {spec: partial(copy.deepcopy, filled) for spec, filled in held.items()}
        for row in time_reading(network, copies, token_ids[:, context : context + count], count, rounds)[0]:
            yield {"what": "behind", "context": context, **row}
