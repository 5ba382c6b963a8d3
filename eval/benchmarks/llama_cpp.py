"""llama.cpp beside caches of this package: decode steps with the same weights in float32, and attention alone.

All take turns in one process. Caches on both sides are filled by repeating what was read of a text, see
`harness.filled_caches`; where all was read, llama.cpp's next-token probabilities are held against Transformers'.

    kvcache-plugins bench llama-cpp --text-file FILE --out eval/results/llama_cpp_smollm2.json
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.inputs import ModelOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.caches import check_length, with_reference
from kvcache_plugins.eval.harness.filled_caches import States, fill_cache, read_states
from kvcache_plugins.eval.harness.timing import spread, time_in_turns
from kvcache_plugins.eval.llama_cpp.attention import GgmlAttention
from kvcache_plugins.eval.llama_cpp.library import KV_TYPES, import_llama_cpp
from kvcache_plugins.eval.llama_cpp.model import LlamaContext, LlamaModel
from kvcache_plugins.eval.llama_cpp.weights import float32_gguf
from kvcache_plugins.gear.kernel_check import MismatchError
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.option_checks import check_choice
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory

from .contest import Contest, Shape


PARTS = ("step", "attention")
_CPU = torch.device("cpu")
_TOKENS_READ = 512
# Attention alone is timed over compressed tokens alone, which are whole groups
_GROUP = 64
# Heads that attention alone is timed for: SmolLM2's, and Llama 3 8B's
_HEADS = ({"num_heads": 3, "groups": 3, "head_dim": 64}, {"num_heads": 8, "groups": 4, "head_dim": 128})
# Of one next token, in nats, in f16 and in coded types, and of an attention's output over random states: more is
# another model or a bug
_MOST_KL_F16, _MOST_KL, _MOST_ERROR = 0.01, 2.0, 0.3


def llama_name(kv_type: str) -> str:
    """Names a row of llama.cpp."""
    return f"llama.cpp {kv_type}"


def time_steps(
    network: PreTrainedModel,
    llama: LlamaModel,
    token_ids: Sequence[int],
    states: States,
    context: int,
    caches: Sequence[str],
    kv_types: Sequence[str],
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Rows of decode steps over `context` tokens, a cache each."""
    functions: dict[str, Callable[[], Any]] = {}
    held: dict[str, dict[str, Any]] = {}
    token = torch.tensor([token_ids[:1]])
    expected = network(torch.tensor([token_ids[:context]]), logits_to_keep=1).logits[0, -1].log_softmax(-1)
    for spec in caches:
        name, options = parse_cache_spec(spec)
        cache: Cache = create_cache(name, network, **options)
        fill_cache(cache, states, context)
        functions[spec] = partial(network, token, **as_argument(cache))
        functions[spec]()
        check_length(cache, context + 1)
        held[spec] = {"bytes": measure_memory(cache).total_bytes}
    with ExitStack() as stack:
        for kv_type in kv_types:
            name = llama_name(kv_type)
            # One call comes before the timing
            own = LlamaContext(llama, kv_type, context, token_ids, rounds + 1, torch.get_num_threads())
            stack.enter_context(closing(own))
            kl = _divergence(name, expected, own.logits_read)
            held[name] = {"bytes": states_bytes(states, context, kv_type), "kl_after_reading": kl}
            functions[name] = own.step
        measured = time_in_turns(functions, _CPU, rounds, seconds)
    return _rows("step", measured, held, {"context": context})


def _divergence(name: str, expected: torch.Tensor, logits: torch.Tensor) -> float:
    """KL of llama.cpp's next token from Transformers', in nats."""
    kl = float((expected.exp() * (expected - logits.log_softmax(-1))).sum())
    # Not `>`: NaN has to fail
    if not kl < (_MOST_KL_F16 if name == llama_name("f16") else _MOST_KL):
        raise MismatchError(f"{name} is {kl:.2f} nats from Transformers after the same text: not timed")
    return kl


def time_attention(
    heads: Mapping[str, int],
    context: int,
    caches: Sequence[str],
    kv_types: Sequence[str],
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    """Rows of attention alone over `context` random tokens: dense, from GEAR's storage, and llama.cpp's."""
    contest = Contest(Shape(context=context, **heads), torch.float32, _CPU)
    for spec in caches:
        contest.add(spec)
    names = (contest.dense_name, *caches)
    functions = {name: contest.functions[name] for name in names}
    held: dict[str, dict[str, Any]] = {name: {"bytes": contest.num_bytes[name]} for name in names}
    dense = contest.functions[contest.dense_name]().flatten()
    with ExitStack() as stack:
        for kv_type in kv_types:
            name = llama_name(kv_type)
            own = GgmlAttention(contest.query, contest.keys, contest.values, kv_type, torch.get_num_threads())
            stack.enter_context(closing(own))
            own()
            error = float((own.output().flatten() - dense).norm() / dense.norm())
            if not error < _MOST_ERROR:
                raise MismatchError(f"{name} is wrong by {error:.1e}: not timed")
            functions[name] = own
            num_bytes = states_bytes([(contest.keys, contest.values)], context, kv_type)
            held[name] = {"bytes": num_bytes, "relative_error": error}
        measured = time_in_turns(functions, _CPU, rounds, seconds)
    return _rows("attention", measured, held, {"context": context, **heads})


def states_bytes(states: States, context: int, kv_type: str) -> int:
    """Counts the bytes that llama.cpp's cache holds of `context` tokens in a type."""
    numbers = sum(side.shape[1] * side.shape[3] for layer in states for side in layer)
    return int(numbers * context * KV_TYPES[kv_type].bits / 8)


def _rows(
    part: str, measured: Mapping[str, Sequence[float]], held: Mapping[str, Mapping[str, Any]], where: Mapping[str, int]
) -> list[dict[str, Any]]:
    first = statistics.median(next(iter(measured.values())))
    rows = [
        {
            "part": part,
            **where,
            "cache": name,
            **spread(times),
            "speed_against_first": first / statistics.median(times),
            **held[name],
        }
        for name, times in measured.items()
    ]
    for row in rows:
        typer.echo(f"{part}, {row['context']:6d} tokens, {row['cache']:<16} {1e3 * row['median_s']:9.3f} ms")
    return rows


def _measure(
    measurements: Sequence[tuple[str, Callable[[], list[dict[str, Any]]]]], limit: float
) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """Rows of all that is begun within `limit` seconds, and what is not."""
    start = time.perf_counter()
    rows, failures = list[dict[str, Any]](), list[dict[str, str]]()
    for what, measure in measurements:
        if time.perf_counter() - start > limit:
            failures.append({"what": what, "reason": f"{limit:.0f} seconds were over"})
        else:
            rows += measure()
    return rows, failures


@torch.inference_mode()
def benchmark_llama_cpp(
    text_file: Annotated[Path, typer.Option(help="A text, of which up to 512 tokens are read.")],
    part: Annotated[list[str], typer.Option(help="step or attention; repeatable.")] = ["step", "attention"],
    cache: Annotated[list[str], typer.Option(help="NAME or NAME:key=value,... whose steps are timed; repeatable.")] = [
        "quanto-4bit",
        "hqq-4bit",
        "gear-k4v3",
        "gear-t22",
        "gear",
    ],
    attention_cache: Annotated[list[str], typer.Option(help="A GEAR preset whose attention is; repeatable.")] = [
        "gear-k4v4",
        "gear-k4v3",
        "gear-k3v2",
        "gear-t22",
    ],
    kv_type: Annotated[list[str], typer.Option(help="f16, q8_0, q5_1, q5_0, q4_1 or q4_0; repeatable.")] = [
        "f16",
        "q8_0",
        "q5_1",
        "q4_0",
    ],
    model: ModelOption = "smollm2",
    gguf: Annotated[Path | None, typer.Option(help="The same weights; made in float32 of a short name's.")] = None,
    context: Annotated[list[int], typer.Option(help="Tokens in the cache; repeatable.", min=1)] = [1024, 4096, 16384],
    rounds: Annotated[int, typer.Option(help="Steps of each that a median is over; twice of attention.", min=3)] = 20,
    seconds: Annotated[float, typer.Option(help="After these, three rounds are enough in one context.", min=0)] = 10.0,
    num_threads: Annotated[int | None, typer.Option(help="Of both; PyTorch's default if not given.", min=1)] = None,
    limit: Annotated[float, typer.Option(help="Seconds after which no further context is begun.", min=0)] = 3600.0,
) -> dict[str, Any]:
    """Time steps and attention beside llama.cpp. The same weights in float32; all take turns.

    Needs the extra `llama-cpp`. Caches are filled by repeating what was read.

    \b
    Examples:
        kvcache-plugins bench llama-cpp --text-file book.txt --num-threads 1 --out llama_cpp.json
        kvcache-plugins bench llama-cpp --text-file book.txt --part attention --kv-type q4_0 --context 4096
    """
    for name, values, accepted in (("part", part, PARTS), ("kv_type", kv_type, tuple(KV_TYPES))):
        for value in values:
            check_choice(name, value, accepted)
    check_caches(attention_cache)
    specs = with_reference(check_caches(cache))
    bindings = import_llama_cpp()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    measurements: list[tuple[str, Callable[[], list[dict[str, Any]]]]] = []
    with ExitStack() as stack:
        if "step" in part:
            weights = gguf or float32_gguf(model)
            text = read_text(text_file, "text_file")
            network, tokenizer = load_for_evaluation(model, dtype="float32", device="cpu")
            token_ids = tokenizer(text, return_tensors="pt").input_ids[:, :_TOKENS_READ]
            llama = stack.enter_context(closing(LlamaModel(bindings, weights)))
            held = network, llama, token_ids[0].tolist(), read_states(network, token_ids)
            for length in context:
                step = partial(time_steps, *held, length, specs, kv_type, rounds, seconds)
                measurements.append((f"steps over {length} tokens", step))
        if "attention" in part:
            for heads, length in product(_HEADS, [length for length in context if length % _GROUP == 0]):
                alone = partial(time_attention, heads, length, attention_cache, kv_type, 2 * rounds, seconds)
                measurements.append((f"attention over {length} tokens", alone))
        rows, failures = _measure(measurements, limit)
    settings = {"model": model, "text_file": text_file.name, "rounds": rounds, "seconds": seconds, "dtype": "float32"}
    content: dict[str, Any] = provenance(_CPU)
    content["versions"] = {**content["versions"], "llama-cpp-python": metadata.version("llama-cpp-python")}
    return {"benchmark": "llama-cpp", **content, "settings": settings, "rows": rows, "failures": failures}
