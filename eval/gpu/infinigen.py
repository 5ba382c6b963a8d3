"""Measurements of InfiniGen on a GPU: exactness, steps against full offloading and against none, hidden transfers.

Three caches answer the question. `offloaded`, Transformers' own, brings every layer's keys and values to the GPU at
every step. The same InfiniGen cache with its pool in the GPU's memory does everything that it otherwise does, choosing
included, but moves nothing over the bus: what is left between the two is what the bus costs. `dynamic` is dense.
"""

import gc
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import Cache, DynamicCache, PreTrainedModel

from kvcache_plugins import InfiniGenCache
from kvcache_plugins.eval.benchmarks.step import step_rows
from kvcache_plugins.eval.harness import time_call
from kvcache_plugins.gear.kernel_check import MismatchError
from kvcache_plugins.infinigen.layer import InfiniGenLayer
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache, parse_cache_spec

from .partial_report import PartialReport, TimeBox
from .parts import build_llama, open_report
from .plan import Plan, make_llama


RESIDENT = ", all resident"
# Tokens decoded before those that are timed: kernels are compiled, a run of tokens moves into the pool
_WARM_STEPS = 3
_LOGIT_TOLERANCE = 1e-3
_EXACT_MODEL = make_llama(1000, 256, 512, 4, 8, 4, 4096)


def check_exact(device: torch.device, num_context: int, num_steps: int) -> dict[str, Any]:
    """
    Decodes `num_steps` tokens behind `num_context` greedily, in float32 and with left padding, where every token is
    fetched, and with a dense cache.

    Returns:
        `dict`: `tokens_equal`, and the largest `logit_error` relative to the largest logit.

    Raises:
        MismatchError: if a token or a logit is another.
    """
    model = build_llama(_EXACT_MODEL, device, torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (2, num_context), generator=generator).to(device)
    mask = torch.ones_like(prompt)
    mask[0, : num_context // 2] = 0
    with InfiniGenCache(model, alpha=float("inf"), max_fetch_ratio=1.0, full_layers=()) as cache:
        results = [
            model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=mask,
                **as_argument(each),
                max_new_tokens=num_steps,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            for each in (cache, DynamicCache(config=model.config))
        ]
    logits, expected = (torch.stack(result.logits) for result in results)
    error = float((logits - expected).abs().max() / expected.abs().max())
    are_equal = torch.equal(results[0].sequences, results[1].sequences)
    # Not `>`: NaN has to fail
    if not are_equal or not error < _LOGIT_TOLERANCE:
        raise MismatchError(f"everything is fetched, and logits are wrong by {error:.1e}, tokens equal: {are_equal}")
    return {"tokens_equal": are_equal, "logit_error": error}


@torch.inference_mode()
def measure_offloading(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Measures InfiniGen beside what it stands in for: exact where everything is fetched, then timed."""
    fields, steps = plan.offload_model, plan.offload_steps
    report = open_report(out, "gpu_infinigen", "offloading", device, fields, steps=steps)
    with report.attempt("exactness"):
        report.settings["exactness"] = check_exact(device, *plan.exact_tokens)
    time_offloading(plan, report, build_llama(plan.offload_model, device), box)


def time_offloading(plan: Plan, report: PartialReport, model: PreTrainedModel, box: TimeBox) -> None:
    """Steps of every cache of the plan, one cache after the other: two long contexts may not fit beside each other."""
    tokens = torch.randint(
        model.config.vocab_size, (1, plan.offload_context + plan.offload_steps), device=model.device
    )
    for index, spec in enumerate(plan.offload_caches):
        typer.echo(f"offloading: {spec} reads {plan.offload_context} tokens")
        with report.attempt(spec):
            # What is left is shared with those that follow
            share = TimeBox(box.left / (len(plan.offload_caches) - index))
            share.require(0)
            _time_cache(spec, plan, report, model, tokens, share)
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
    _compare(report)


def _time_cache(
    spec: str, plan: Plan, report: PartialReport, model: PreTrainedModel, tokens: torch.Tensor, box: TimeBox
) -> None:
    name, options = parse_cache_spec(spec)
    if name.startswith("infinigen"):
        options["track_times"] = True
    cache = create_cache(name, model, **options)
    context, fed = tokens[:, : plan.offload_context], tokens[:, plan.offload_context :]
    prefill = time_call(lambda: model(context, **as_argument(cache), logits_to_keep=1), model.device)
    for token in fed[:, :_WARM_STEPS].split(1, dim=1):
        model(token, **as_argument(cache))
    _time_steps(spec, plan, report, model, cache, fed, box, {"prefill_s": prefill})
    if isinstance(cache, InfiniGenCache):
        _make_resident(cache)
        model(fed[:, :1], **as_argument(cache))
        _time_steps(spec + RESIDENT, plan, report, model, cache, fed, box, {})
        cache.detach()


def _time_steps(
    name: str,
    plan: Plan,
    report: PartialReport,
    model: PreTrainedModel,
    cache: Cache,
    fed: torch.Tensor,
    box: TimeBox,
    more: Mapping[str, Any],
) -> None:
    """Adds a row of the steps of a cache; three at least, however long they take."""
    before = dict(cache.stats()) if isinstance(cache, InfiniGenCache) else {}
    seconds: list[float] = []
    for token in fed.split(1, dim=1):
        if len(seconds) > 2 and box.is_up:
            break
        seconds.append(time_call(partial(model, token, **as_argument(cache)), model.device))
    (row,) = step_rows({name: seconds}, {name: cache}, plan.offload_context)
    # Here the first is itself; `_compare` sets it against others
    del row["speed_against_first"]
    row = {**row, **more, "steps": len(seconds), "tokens_per_s": 1 / row["median_s"]}
    if isinstance(cache, InfiniGenCache):
        row |= {"counted": count_transfers(cache), **_transfer_times(before, row["stats"], len(seconds))}
    report.add(row)
    typer.echo(f"  {name}: {1e3 * row['median_s']:.2f} ms a token, {row['tokens_per_s']:.1f} tokens/s")


def _transfer_times(before: Mapping[str, float], after: Mapping[str, float], num_steps: int) -> dict[str, float]:
    """Seconds a step of transfers and of waiting for them, and the share of transfers that was hidden."""
    transfer, stalled = (after[name] - before[name] for name in ("transfer_s", "stalled_s"))
    hidden = max(1 - stalled / transfer, 0.0) if transfer else 0.0
    return {
        "transfer_s_per_token": transfer / num_steps,
        "stalled_s_per_token": stalled / num_steps,
        "hidden_share": hidden,
    }


def _make_resident(cache: InfiniGenCache) -> None:
    """Moves the pool of every layer to where the layer is computed."""
    for layer in cache.layers:
        if isinstance(layer, InfiniGenLayer) and layer.pool is not None:
            layer.pool.map(partial(torch.Tensor.to, device=layer.device))


def count_transfers(cache: InfiniGenCache) -> dict[str, float]:
    """
    Bytes that a decoded token brings over the bus: a count, from the cache's own counters, for which no GPU is needed.

    Returns:
        `dict[str, float]`: `bytes_per_token`, and `full_offloading_bytes_per_token`, the keys and values of all real
        tokens in all layers, which a cache that is offloaded as a whole brings there.
    """
    stats = cache.stats()
    # A layer takes the same step as all others
    num_steps = stats["selected_calls"] / stats["layers_offloaded"]
    layer = next(each for each in cache.layers if isinstance(each, InfiniGenLayer))
    # As a dense cache has them: what is fetched may be codes
    row_bytes = sum(layer.states_shape(side)[3] for side in ("keys", "values")) * layer.dtype.itemsize
    in_all_layers = stats["tokens_fetchable"] * stats["num_layers"] / stats["layers_offloaded"]
    return {
        "bytes_per_token": stats["bytes_fetched"] / num_steps,
        "full_offloading_bytes_per_token": in_all_layers * row_bytes / num_steps,
    }


def _compare(report: PartialReport) -> None:
    """Sets every row against full offloading, and InfiniGen's against the same with everything resident."""
    medians = {row["cache"]: row["median_s"] for row in report.rows}
    for row in report.rows:
        resident = medians.get(row["cache"] + RESIDENT)
        if resident is not None:
            row["time_against_resident"] = row["median_s"] / resident
        if "offloaded" in medians:
            row["speed_against_offloaded"] = medians["offloaded"] / row["median_s"]
    report.save()
