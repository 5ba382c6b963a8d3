"""Commands of `kvcache-plugins bench`: options, help and rows.

Help reads this module, so it imports nothing heavy at the top: a command imports what it runs.
"""

import copy
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache_plugins.console.inputs import (
    CachesOption,
    DtypeOption,
    ModelOption,
    NumThreadsOption,
    load_for_evaluation,
    parse_device,
    read_text,
)
from kvcache_plugins.console.interrupts import interrupts_are_ours
from kvcache_plugins.eval.benchmark import benchmark, loaded_settings, say
from kvcache_plugins.eval.rows import Content, Failure, Found, Settings
from kvcache_plugins.registry import check_caches, create_cache


if TYPE_CHECKING:
    from transformers import Cache


# Tokens that random models read; longer contexts repeat their states
_TOKENS_READ = 512
# Tokens of the text that tables of models without a calibration are made of
_TABLE_TOKENS = 1024


@benchmark("step", "Decode steps of {model}, {dtype}", in_inference_mode=True)
def benchmark_steps(
    cache: CachesOption,
    text_file: Annotated[Path | None, typer.Option(help="A text of --context (or --read) + --steps tokens.")] = None,
    model: ModelOption = "smollm2",
    shape: Annotated[
        list[str] | None, typer.Option(help="Instead of a model and text random mha, gqa-3, gqa-4 or mqa; repeatable.")
    ] = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [4096],
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    batch_size: Annotated[list[int], typer.Option(help="Sequences; repeatable.", min=1)] = [1],
    dtype: Annotated[
        list[str] | None, typer.Option(help="float32 (default on CPU), bfloat16 (elsewhere) or float16; repeatable.")
    ] = None,
    num_threads: Annotated[list[int] | None, typer.Option(help="CPU threads; repeatable.", min=1)] = None,
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
    import torch

    from kvcache_plugins.eval import harness
    from kvcache_plugins.models.reference_model import parse_dtype
    from kvcache_plugins.option_checks import check_choice

    from .step import SHAPES, load_or_make, read_prompt, time_steps

    for each in shape or ():
        check_choice("shape", each, tuple(SHAPES))
    for each in dtype or ():
        parse_dtype(each)
    if (text_file is None) != bool(shape):
        raise ValueError("`text_file` has to be given, or `shape` for random models, which read none")
    specs = dict.fromkeys([*[harness.REFERENCE] * bool(shape), *cache])
    threads = num_threads or [torch.get_num_threads()]
    read = _TOKENS_READ if shape and read is None else read
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
                # No limits, so that there are no failures
                yield from ({**place, **row} for row in time_steps(network, caches, part, length))
            for used_cache in caches.values():
                harness.check_length(used_cache, length + num_fed)


@benchmark("prompts", "Prompts of {model}, {dtype}", in_inference_mode=True)
def benchmark_prompts(
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + --new-tokens tokens.")],
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 4096,
    new_tokens: Annotated[list[int], typer.Option(help="Tokens after it; repeatable.", min=1)] = [
        17,
        128,
        512,
        2048,
    ],
    chunk: Annotated[list[int], typer.Option(help="Chunks that it is read in; repeatable.", min=1)] = [512],
    rounds: Annotated[int, typer.Option(help="Rounds that a median is over.", min=1)] = 3,
    dtype: DtypeOption = None,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Time prompts, chunks of them, and tokens after them. Times are against those of the first cache.

    The time of encoding is measured too.

    \b
    Examples:
        kvcache-plugins bench prompts --cache dynamic --cache transform --text-file book.txt
        kvcache-plugins bench prompts --cache dynamic --cache transform --context 8192 --chunk 512 --text-file book.txt
    """
    from kvcache_plugins.eval import harness

    from .step import read_prompt, time_reading

    network, token_ids = harness.load_with_tokens(model, text_file, context + max(new_tokens, default=0), dtype)
    makers = harness.cache_factories(cache, network)
    yield from loaded_settings(network)
    for make in makers.values():
        # Compile what is compiled on first use
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


@benchmark("step", "Decode steps of many requests, {dtype}")
def benchmark_batching(
    cache: CachesOption,
    text_file: Annotated[Path | None, typer.Option(help="A text for tables of models without a calibration.")] = None,
    model: ModelOption = "smollm2",
    shape: Annotated[str | None, typer.Option(help="Instead of a model a random one: mha, gqa-3, gqa-4, mqa.")] = None,
    requests: Annotated[list[int], typer.Option(help="Requests of a batch; repeatable.", min=1)] = [8],
    context: Annotated[list[int], typer.Option(help="Tokens of every request; repeatable.", min=1)] = [1024],
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 10,
    page_size: Annotated[int, typer.Option(help="Tokens of a page.", min=64)] = 256,
    num_threads: NumThreadsOption = None,
) -> Iterator[Found]:
    """Time decode steps of continuous batching. Dense pages, dense tensors by request and compressed pages.

    Seconds are those of the processor, on a CPU. Speeds are against Transformers' own.

    \b
    Examples:
        kvcache-plugins bench batching --cache calibrated-16 --context 1024 --context 4096 --num-threads 1
        kvcache-plugins bench batching --cache transform --shape gqa-4 --requests 1 --requests 8
    """
    from kvcache_plugins.batching import compressed_batching
    from kvcache_plugins.eval.harness import spread, take_turns, time_call
    from kvcache_plugins.option_checks import check_choice

    from .batching import BY_INDEX, BY_REQUEST, BatchedSteps, dense_update
    from .step import SHAPES, load_or_make

    if shape is not None:
        check_choice("shape", shape, tuple(SHAPES))
        if text_file is not None:
            raise ValueError("`text_file` is for tables of a model, and `shape` makes one that reads none")
    table_text = None
    if shape is None and text_file is None:
        network, _ = load_for_evaluation(model)
    else:
        network, table_text = load_or_make(model, shape, text_file, _TABLE_TOKENS)
    yield from loaded_settings(network)
    # Another model with the same weights, as an open context compresses all batches of its own model
    dense = copy.deepcopy(network, {id(each): each for each in (*network.parameters(), *network.buffers())})
    for count, length in product(requests, context):
        with ExitStack() as stack:
            ways = {name: BatchedSteps(dense, count, length, page_size) for name in (BY_INDEX, BY_REQUEST)}
            ways[BY_REQUEST].cache.update = dense_update(length)
            counters = {}
            for name in cache:
                batching = stack.enter_context(compressed_batching(network, name, text=table_text))
                ways[name], counters[name] = BatchedSteps(network, count, length, page_size), batching
            say(f"{count} requests of {length} tokens")
            functions: dict[str, Callable[[int], Any]] = {name: way.step for name, way in ways.items()}
            measured = take_turns(functions, partial(time_call, clock=time.process_time), steps, warm_up=1)
        first = statistics.median(measured[BY_INDEX])
        for name, times in measured.items():
            stats = counters[name].stats() if name in counters else {}
            if name in counters and (stats["fused_calls"] != stats["attend_calls"] or stats["dense_reads"]):
                raise RuntimeError(f"{name} was not attended to by its kernels: {stats}")
            yield {
                "batch_size": count,
                "context": length,
                "cache": name,
                **spread(times),
                "speed_against_first": first / statistics.median(times),
                "bytes": ways[name].num_bytes,
                "stats": stats,
            }


@benchmark(
    "kernels",
    "Attention over {batch_size} x {context} tokens, {dtype}, `{kernel}` kernels, {timed}",
    in_inference_mode=True,
)
def benchmark_kernels(
    context: Annotated[int, typer.Option(help="Tokens, a multiple of 64.", min=1)] = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 8,
    groups: Annotated[int, typer.Option(help="Query heads a key/value head.", min=1)] = 4,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 128,
    cache: Annotated[
        list[str] | None, typer.Option(help="A compressed preset; repeatable; by default one a kind.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of queries and dense states.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    num_threads: NumThreadsOption = None,
    rounds: Annotated[int, typer.Option(help="Times that each is timed.", min=3)] = 25,
) -> Iterator[Found]:
    """Time decode attention alone. From compressed storage, dense, and a copy, taking turns; checked first.

    \b
    Examples:
        kvcache-plugins bench kernels
        kvcache-plugins bench kernels --device cuda --dtype bfloat16 --batch-size 16 --context 32768 --out kernels.json
    """
    from kvcache_plugins.models.reference_model import parse_dtype

    from .kernels import BACKENDS, CACHES, Contest, Shape

    if head_dim % 2:
        raise ValueError(f"`head_dim` has to be even, for the rotary embedding, but got {head_dim}")
    place = parse_device(device)
    shape = Shape(context=context, batch_size=batch_size, num_heads=num_heads, groups=groups, head_dim=head_dim)
    kind = parse_dtype(dtype)
    caches = check_caches(cache or CACHES)
    contest = Contest(shape, kind, place)
    for backend in BACKENDS if place.type == "cuda" else ():
        try:
            contest.add_backend(backend)
        except RuntimeError as error:
            yield Failure(backend, str(error).splitlines()[0])
    for name in caches:
        contest.add(name)
    say(f"{rounds} rounds, in which each is timed once")
    yield Settings(contest.settings(rounds))
    yield Content(device=place)
    yield from contest.run(rounds)


@benchmark("machine-code", "Counted in machine code, not measured; bounds for an H200")
def benchmark_machine_code(
    cache: Annotated[list[str] | None, typer.Option(help="A compressed preset; repeatable; by default all.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Channels of a head; repeatable; by default 128, of rows 64 too.", min=1)
    ] = None,
    query_heads: Annotated[list[int], typer.Option(help="Query heads of a key/value head; repeatable.", min=1)] = [4],
    capability: Annotated[int, typer.Option(help="Compute capability: 80, 86, 90.", min=80)] = 90,
) -> Iterator[Found]:
    """Count the machine code of attention.

    It is compiled for a GPU that need not be there: nothing is timed.

    \b
    Examples:
        kvcache-plugins bench machine-code
        kvcache-plugins bench machine-code --cache gear-k4v3 --head-dim 64 --head-dim 128 --capability 80
    """
    from kvcache_plugins.formats.parts import RowPart

    from .kernels import CONTEXT, HEAD_DIMS, NUM_HEADS, PRESETS, compress_random, count_attention

    yield Settings(dtype="bfloat16", context=CONTEXT, num_heads=NUM_HEADS)
    yield Content(device="compiled, not run")
    for size in head_dim or HEAD_DIMS:
        for name in check_caches(cache or PRESETS):
            part = compress_random(name, size)
            if head_dim is None and size != HEAD_DIMS[0] and not isinstance(part, RowPart):
                continue
            say(f"{name}, {size} channels")
            for num_rows in query_heads:
                yield {"cache": name, **count_attention(part, size, num_rows, capability)}


@benchmark("memory", "Memory of {model} over {context} tokens")
def benchmark_memory(
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --context tokens.")],
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 4096,
) -> Iterator[Found]:
    """Measure bytes of caches, of a step, and of the process.

    \b
    Examples:
        kvcache-plugins bench memory --cache dynamic --cache transform --text-file book.txt
        kvcache-plugins bench memory --cache gear-2bit:rank=8 --context 1024 --text-file book.txt --out memory.json
    """
    import torch

    from .memory import measure_cache

    read_text(text_file, "text_file")
    # Without it glibc keeps some freed tensors, and peaks of equal runs differed by 400 MiB. New processes read it
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))
    for spec in cache:
        # A process each: a peak never falls again
        with interrupts_are_ours():
            pool = multiprocessing.get_context("spawn").Pool(1)
        with pool:
            say(f"{spec}, in a process of its own")
            yield pool.apply(measure_cache, (model, str(text_file), context, spec, torch.get_num_threads()))
