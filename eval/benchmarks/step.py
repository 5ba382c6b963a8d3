"""Whole decode steps of a model, and prompts, through several caches that take turns in one process.

The model reads the context of the steps through each cache. With `read` it reads the first tokens alone, and their
states are repeated, as a prefill of a long context takes far longer than the steps. `shape` makes random models with
SmolLM2's proportions, a fifth of its layers and a fifth of its vocabulary; `gqa-4` has Llama 3 8B's heads.

Prompts are read at once and in chunks. For new tokens after a prompt each round gets a copy of the filled cache, which
is made before the clock starts. The time of encoding is measured apart, too.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cache, LlamaConfig, PreTrainedModel

from kvcache_plugins.eval import harness
from kvcache_plugins.eval.rows import Failure
from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.models.reference_model import parse_dtype
from kvcache_plugins.reports.memory import measure_memory


def llama(*sizes: int, **more: int) -> dict[str, int]:
    """Make the fields of a `LlamaConfig` from sizes in the order of `names`, and `more`."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {**dict(zip((*names, "num_key_value_heads", "max_position_embeddings"), sizes, strict=True)), **more}


def make_shape(num_heads: int, groups: int, head_dim: int = 64, num_layers: int = 6) -> dict[str, int]:
    """Make the fields of a model with `num_heads` key/value heads, and SmolLM2's other proportions."""
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
    Time decode steps of caches that hold `context` tokens, in turns. Each gets the tokens `[batch_size, steps]`, one a
    step. `instead` has functions to call in place of the model, by cache; `limits` are those of `take_turns`.

    Yields a row for each cache that took at least three turns, with its speed against the first row's and the relative
    error of the first step's logits; and a `Failure` for each cache that took fewer turns than there are steps.
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
                # Unlike the median, the mean includes steps that compress a chunk
                "mean_s": statistics.fmean(times),
                "speed_against_first": first / statistics.median(times),
                "steps": len(times),
                "tokens_per_s": token_ids.shape[0] / statistics.median(times),
                "relative_error": errors[name],
                "bytes": measure_memory(caches[name]).total_bytes,
                "stats": harness.cache_stats(caches[name]),
            }
        if len(times) < token_ids.shape[1]:
            yield Failure(f"{name}, steps after {len(times)}", "skipped: time, or the error above")


def _relative_errors(logits: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the relative error of each cache's logits against the first cache's."""
    first = next(iter(logits.values()), torch.empty(0, dtype=torch.float32, device="cpu"))
    return {name: float((each - first).norm() / first.norm()) for name, each in logits.items()}


def random_model(fields: Mapping[str, int], dtype: torch.dtype, device: torch.device | None = None) -> PreTrainedModel:
    """Make a random Llama on a device, with the same weights every time."""
    config = LlamaConfig(**fields, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with device or torch.device("cpu"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load_or_make(
    model: str, shape: str | None, text_file: Path | None, num_tokens: int, dtype: str | None = None
) -> tuple[PreTrainedModel, torch.Tensor]:
    """Load a model and the first tokens of a file, or make a random model of a shape in `SHAPES` and random tokens."""
    if shape is None:
        assert text_file is not None
        return harness.load_with_tokens(model, text_file, num_tokens, dtype)
    network = random_model(SHAPES[shape](), parse_dtype(dtype or "float32"))
    return network, torch.randint(network.config.vocab_size, (1, num_tokens), device="cpu")


@contextmanager
def coding_seconds(cache: Cache, device: torch.device | None = None) -> Iterator[list[float]]:
    """Time every call of `commit_prompt` inside the `with` block, with its work on a GPU; yield the seconds."""
    seconds: list[float] = []
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, LazyLayer)]

    def timed(commit: Callable[[], None]) -> None:
        seconds.append(harness.time_call(commit, device))

    for layer in layers:
        layer.commit_prompt = partial(timed, layer.commit_prompt)
    try:
        yield seconds
    finally:
        for layer in layers:
            del layer.commit_prompt


def read_prompt(network: PreTrainedModel, cache: Cache, token_ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Read tokens `[1, tokens]` into a cache, `chunk` at a time; return the last one's logits."""
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
    Time in turns how caches read the same tokens `[1, tokens]`, `chunk` at a time; `makers` make a cache for each
    turn. Returns a row for each, with time and logits against the first, and the filled caches of the last turn.
    """
    coding: dict[str, list[float]] = {name: [] for name in makers}
    logits: dict[str, torch.Tensor] = {}
    caches: dict[str, Cache] = {}

    @contextmanager
    def turn(name: str) -> Iterator[None]:
        caches[name] = makers[name]()
        with coding_seconds(caches[name], network.device) as coded:
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
