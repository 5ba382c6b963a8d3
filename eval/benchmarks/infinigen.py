"""Where a decode step of an InfiniGen cache goes: shares of speculation, scoring, choosing and attention.

kvcache-plugins bench infinigen --context 8000 --text-file FILE
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache

from kvcache_plugins.console.inputs import CachesOption, ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.infinigen import cache as cache_module
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.infinigen.scoring import ScoringCodes
from kvcache_plugins.infinigen.tokens import OffloadedTokens
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec

from .step import describe, step_rows, time_turns


# What is timed, by name: where it stands, and what it is called there. Those of the second column contain others.
_PARTS: dict[str, tuple[Any, str]] = {
    "hooks": (cache_module.InfiniGenCache, "on_attention_input"),
    "choice": (InfiniGenLayer, "_start_fetch"),
    "speculation": (InfiniGenLayer, "speculate"),
    "scoring": (ScoringCodes, "scores"),
    "attention": (OffloadedTokens, "attend"),
}


@contextmanager
def _timed(owner: Any, name: str, part: str, seconds: dict[str, float]) -> Iterator[None]:
    original: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start  # type: ignore[assignment]

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, original)


def time_parts(step: Callable[[int], object], num_steps: int) -> dict[str, float]:
    """
    Seconds a step of each part, and of what is none of them (the model itself), on a CPU.

    Args:
        step (`Callable[[int], object]`): takes the step of a number.
        num_steps (`int`): how many.
    """
    seconds: dict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for part, (owner, name) in _PARTS.items():
            stack.enter_context(_timed(owner, name, part, seconds))
        start = time.perf_counter()
        for number in range(num_steps):
            step(number)
        total = time.perf_counter() - start
    parts = {
        "expected queries": seconds["hooks"] - seconds["speculation"],
        "scoring": seconds["scoring"],
        "choosing": seconds["choice"] - seconds["scoring"],
        "fetching and attention": seconds["attention"],
    }
    parts["the model"] = total - sum(parts.values())
    return {part: value / num_steps for part, value in parts.items()}


@torch.inference_mode()
def benchmark_infinigen(
    text_file: Annotated[Path, typer.Option(help="A text of at least --context + 2 * --steps tokens.")],
    cache: CachesOption = [
        "dynamic",
        "infinigen",
        "h2o:heavy_ratio=0.05,recent_ratio=0.05",
    ],
    model: ModelOption = "smollm2",
    context: Annotated[int, typer.Option(help="Tokens in the cache.", min=1)] = 8000,
    steps: Annotated[int, typer.Option(help="Decode steps that a median is over.", min=3)] = 40,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Time decode steps, and the parts of those of InfiniGen. Caches take turns.

    \b
    Examples:
        kvcache-plugins bench infinigen --text-file book.txt
        kvcache-plugins bench infinigen --cache dynamic --cache infinigen:share=0.05 --text-file book.txt
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_caches(cache)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model)
    token_ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    if token_ids.shape[1] < context + 2 * steps:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {context + 2 * steps} are needed")
    caches: dict[str, Cache] = {}
    for spec in cache:
        name, options = parse_cache_spec(spec)
        caches[spec] = create_cache(name, network, **options)
        network(token_ids[:, :context], **as_argument(caches[spec]), logits_to_keep=1)
        typer.echo(f"{context} tokens read through {spec}", err=True)
    fed = token_ids[:, context : context + 2 * steps]
    rows = step_rows(time_turns(network, caches, fed[:, :steps]), caches, context)
    for row in rows:
        typer.echo(describe(row))
        used = caches[row["cache"]]
        if not isinstance(used, cache_module.InfiniGenCache):
            continue

        def step(number: int, used: Cache = used) -> object:
            return network(fed[:, steps + number : steps + number + 1], **as_argument(used))

        row["parts_s"] = time_parts(step, steps)
        for part, seconds in row["parts_s"].items():
            typer.echo(f"    {part:<24} {1e3 * seconds:7.2f} ms")
    dtype = str(network.dtype).removeprefix("torch.")
    settings = {"model": model, "steps": steps, "text_file": text_file.name, "dtype": dtype}
    settings["num_threads"] = torch.get_num_threads()
    return {"benchmark": "step", **provenance(network.device), "settings": settings, "rows": rows}
