"""Time per token over a long decode, for several caches in one process.

Shows whether a cache copies its history (time grows faster than the context) and, in its counters, that each token is
compressed once. Times are medians over bins of consecutive steps, with quartiles.

    kvcache-plugins bench decode --steps 5000 --cache gear-2bit --text-file FILE --out FILE.json
"""

import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.console.inputs import CachesOption, ModelOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.timing import spread, time_call
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory


@torch.no_grad()
def time_decode(model: PreTrainedModel, token_ids: torch.Tensor, prompt_length: int, cache: Cache) -> list[float]:
    """
    Feeds a prompt and then every further token of `token_ids` `[1, num_tokens]` through a cache.

    Returns:
        `list[float]`: seconds of each decode step.
    """
    model(token_ids[:, :prompt_length], **as_argument(cache), logits_to_keep=1)
    seconds = []
    for position in range(prompt_length, token_ids.shape[1]):
        token = token_ids[:, position : position + 1]
        seconds.append(time_call(partial(model, token, **as_argument(cache)), token_ids.device))
        if (position - prompt_length + 1) % 500 == 0:
            typer.echo(
                f"  step {position - prompt_length + 1}: {statistics.median(seconds[-500:]) * 1e3:.0f} ms", err=True
            )
    return seconds


def summarize(seconds: list[float], prompt_length: int, bin_length: int) -> list[dict[str, float]]:
    """Median and quartiles of the time per token in consecutive bins of steps."""
    bins = []
    for first in range(0, len(seconds) - bin_length + 1, bin_length):
        context = prompt_length + first + bin_length // 2
        bins.append({"context": context, **spread(seconds[first : first + bin_length])})
    return bins


def benchmark_decode(
    cache: CachesOption,
    text_file: Annotated[Path, typer.Option(help="A text of at least --prompt + --steps tokens.")],
    model: ModelOption = "smollm2",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", min=1)] = 256,
    steps: Annotated[int, typer.Option(help="Tokens to decode.", min=1)] = 5000,
    bin_length: Annotated[int, typer.Option(help="Steps that one median is over.", min=3)] = 500,
    num_layers: Annotated[
        int | None, typer.Option(help="Keep the model's first layers only, to save time.", min=1)
    ] = None,
) -> dict[str, Any]:
    """Time every step of a long decode. Shows whether a cache copies its history again and again.

    \b
    Examples:
        kvcache-plugins bench decode --cache dynamic --cache gear --text-file book.txt
        kvcache-plugins bench decode --cache gear-2bit --text-file book.txt --steps 500 --bin-length 100 --num-layers 2
    """
    check_caches(cache)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model)
    if num_layers is not None:
        network.config.num_hidden_layers = num_layers
        decoder: Any = network.base_model
        decoder.layers = decoder.layers[:num_layers]
    token_ids = tokenizer(text, return_tensors="pt").input_ids[:, : prompt + steps]
    if token_ids.shape[1] < prompt + steps:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {prompt + steps} are needed")
    token_ids = token_ids.to(network.device)
    rows: list[Mapping[str, Any]] = []
    for spec in cache:
        name, options = parse_cache_spec(spec)
        instance: Any = create_cache(name, network, **options)
        typer.echo(spec, err=True)
        bins = summarize(time_decode(network, token_ids, prompt, instance), prompt, bin_length)
        stats = instance.stats() if callable(getattr(instance, "stats", None)) else {}
        rows.append({"cache": spec, "bins": bins, "stats": stats, "bytes": measure_memory(instance).total_bytes})
        growth = bins[-1]["median_s"] / bins[0]["median_s"]
        context = bins[-1]["context"] / bins[0]["context"]
        typer.echo(f"{spec}: context x{context:.1f}, time per token x{growth:.2f}; {stats}")
        for each in bins:
            typer.echo(f"  {each['context']:6.0f} tokens: {each['median_s'] * 1e3:7.1f} ms")
    settings = {
        "model": model,
        "num_layers": network.config.num_hidden_layers,
        "prompt": prompt,
        "steps": steps,
        "text_file": text_file.name,
        "dtype": str(network.dtype).removeprefix("torch."),
    }
    return {"benchmark": "decode", **provenance(network.device), "settings": settings, "rows": rows}
