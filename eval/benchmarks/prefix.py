"""One long prefix, many continuations: what their caches hold together, and how long it takes to have them.

Every continuation needs a cache with the prefix in it. Four ways to have one:

    prefill again    the prefix is read anew for each continuation, through `dynamic`
    deepcopy         read once; each has a `copy.deepcopy` of the filled `DynamicCache`, as Transformers documents it
    fork             read once through a GEAR cache; each has a `GEARCache.fork`
    load and fork    the same from the file that an earlier process has saved

The ways take turns, a continuation each, and every cache stays to the end, when the bytes of all of them together are
measured: what forks share counts once. Prefilling again takes so long that only some rounds of it are measured; what
all continuations would take and hold is then a median and a mean times their number, and the row says so.

    kvcache-plugins bench prefix --text-file FILE --out FILE.json
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.nn import functional as F
from transformers import PreTrainedModel

from kvcache_plugins import GEARCache
from kvcache_plugins.console.inputs import ModelOption, NumThreadsOption, load_for_evaluation, read_text
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.timing import spread
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import check_caches, create_cache, parse_cache_spec
from kvcache_plugins.reports.memory import measure_memory

from .prefix_ways import Way, _timed, dense_ways, gear_ways


# Of ways that hold the same numbers, the largest difference of logits over the largest logit
_TOLERANCE = 1e-3


def take_turns(network: PreTrainedModel, ways: Sequence[Way], continuations: torch.Tensor) -> None:
    """
    Makes the caches of all ways, the ways by turns, and feeds each its continuation in one forward.

    Args:
        network (`PreTrainedModel`): the model.
        ways (`Sequence[Way]`): where the measurements are added.
        continuations (`torch.Tensor` of shape `[continuations, new_tokens]`): token ids.
    """
    for number, tokens in enumerate(continuations):
        for way in ways:
            if number >= way.rounds:
                continue
            seconds, cache = _timed(way.make, network.device)
            way.ready_s.append(seconds)
            seconds, output = _timed(partial(network, tokens[None], **as_argument(cache)), network.device)
            way.tokens_s.append(seconds)
            way.caches.append(cache)
            way.logits.append(output.logits[0])


def prefix_row(way: Way, num_continuations: int, prefix: int, dense_logits: Sequence[torch.Tensor]) -> dict[str, Any]:
    """
    A row of the result.

    Args:
        way (`Way`): after its turns.
        num_continuations (`int`): of how many the totals are.
        prefix (`int`): tokens of the prefix.
        dense_logits (`Sequence[torch.Tensor]`): logits of the continuations through a dense cache.
    """
    each, made = spread(way.ready_s), len(way.ready_s)
    is_extrapolated = made < num_continuations
    all_ready = num_continuations * each["median_s"] if is_extrapolated else sum(way.ready_s)
    held = measure_memory(way.caches).total_bytes
    return {
        "way": way.name,
        "cache": way.cache,
        "prefix": prefix,
        "num_continuations": num_continuations,
        "num_measured": made,
        "is_extrapolated": is_extrapolated,
        "held_bytes": round(held * num_continuations / made) if is_extrapolated else held,
        "once_s": way.once_s,
        **each,
        "all_ready_s": sum(way.once_s.values()) + all_ready,
        "tokens_s": spread(way.tokens_s),
        "kl": statistics.fmean(map(_mean_kl, dense_logits, way.logits)),
        "save_s": way.save_s,
        "file_bytes": way.file_bytes,
    }


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    count = f"{row['num_measured']} of {row['num_continuations']} measured" if row["is_extrapolated"] else "measured"
    return (
        f"{row['way']:<14} {row['cache']:<12} {row['num_continuations']} hold {row['held_bytes'] / 1e6:8.1f} MB, "
        f"ready in {row['all_ready_s']:7.2f} s ({count}), {1e3 * row['median_s']:8.1f} ms each; KL {row['kl']:.4f}"
    )


@torch.inference_mode()
def benchmark_prefix(
    text_file: Annotated[Path, typer.Option(help="A text of --prefix + --continuations * --new-tokens tokens.")],
    cache: Annotated[list[str], typer.Option(help="A GEAR cache: NAME or NAME:key=value,... ; repeatable.")] = [
        "gear-k4v3"
    ],
    model: ModelOption = "smollm2",
    prefix: Annotated[int, typer.Option(help="Tokens that all continuations begin with.", min=1)] = 8000,
    continuations: Annotated[int, typer.Option(help="How many.", min=1)] = 16,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each, fed in one forward.", min=1)] = 8,
    prefill_rounds: Annotated[int, typer.Option(help="How often the prefix is prefilled again.", min=1)] = 3,
    num_threads: NumThreadsOption = None,
) -> dict[str, Any]:
    """Compare ways to continue one prefix many times.

    They are reading it again, deepcopy, forks, and forks of a saved cache.

    The dense copies are all held at once: 16 of 8000 tokens of SmolLM2 take 6 GB in float32.

    \b
    Examples:
        kvcache-plugins bench prefix --text-file book.txt --out prefix.json
        kvcache-plugins bench prefix --text-file book.txt --prefix 1000 --continuations 4 --cache gear-2bit
    """
    if prefill_rounds > continuations:
        raise ValueError(
            f"`prefill_rounds` has to be at most `continuations`, {continuations}, but got {prefill_rounds}"
        )
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    check_caches(cache)
    text = read_text(text_file, "text_file")
    network, tokenizer = load_for_evaluation(model)
    token_ids = tokenizer(text, return_tensors="pt").input_ids.to(network.device)
    needed = prefix + continuations * new_tokens
    if token_ids.shape[1] < needed:
        raise ValueError(f"the text has {token_ids.shape[1]} tokens, but {needed} are needed")
    empty = {spec: _create_gear(spec, network) for spec in dict.fromkeys(cache)}
    fed = token_ids[0, prefix:needed].view(continuations, new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        ways = dense_ways(network, token_ids[:, :prefix], continuations, prefill_rounds)
        for number, (spec, gear) in enumerate(empty.items()):
            # What is loaded may go on standing in its file
            path = Path(folder) / f"{number}.safetensors"
            ways += gear_ways(network, token_ids[:, :prefix], continuations, spec, gear, path)
        # What is compiled or allocated the first time is no way's own
        for way in ways[1:]:
            network(fed[:1], **as_argument(way.make()))
        take_turns(network, ways, fed)
    _check_agreement(ways)
    rows = [prefix_row(way, continuations, prefix, ways[1].logits) for way in ways]
    for row in rows:
        typer.echo(describe(row))
    dtype = str(network.dtype).removeprefix("torch.")
    settings = {"model": model, "prefix": prefix, "continuations": continuations, "new_tokens": new_tokens}
    settings |= {"prefill_rounds": prefill_rounds, "text_file": text_file.name, "dtype": dtype}
    return {"benchmark": "prefix", **provenance(network.device), "settings": settings, "rows": rows}


def _create_gear(spec: str, network: PreTrainedModel) -> GEARCache:
    name, options = parse_cache_spec(spec)
    cache = create_cache(name, network, **options)
    if not isinstance(cache, GEARCache):
        raise ValueError(
            f"`cache` has to be a GEAR cache, which can be forked, but `{spec}` is a {type(cache).__name__}"
        )
    return cache


def _mean_kl(dense_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Mean KL(dense || cache) over the tokens of a continuation, `[new_tokens, vocabulary]`."""
    dense, other = (F.log_softmax(each.double(), dim=-1) for each in (dense_logits, logits))
    return F.kl_div(other, dense, reduction="batchmean", log_target=True).item()


def _check_agreement(ways: Sequence[Way]) -> None:
    """A `RuntimeError` unless ways of one cache have given the same logits: times of others would mean nothing."""
    for first, second in zip(ways[::2], ways[1::2], strict=True):
        for expected, found in zip(first.logits, second.logits, strict=False):
            difference = float((expected - found).abs().max() / expected.abs().max())
            # No comparison with NaN holds
            if not difference <= _TOLERANCE:
                raise RuntimeError(
                    f"`{first.name}` and `{second.name}` of `{first.cache}` differ by {difference:.1e} of the largest "
                    "logit: one of them is wrong"
                )
