"""Decode steps of GEAR caches as CUDA graphs: right first, then beside the same steps as they are, and a dense cache.

Tokens have to be those of the cache without graphs, in float32, where both add up in another order and mean the same.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.eval.benchmarks.step import describe, step_rows, time_turns
from kvcache_plugins.eval.harness.timing import time_call
from kvcache_plugins.gear.cache import GEARCache
from kvcache_plugins.gear.captured_steps import CapturedSteps
from kvcache_plugins.gear.kernel_check import MismatchError
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .models import build_llama
from .partial_report import PartialReport, TimeBox
from .plan import Plan


# Of decoded tokens, whose room is kept from the beginning
_ROOM = 1024


def captured(cache: Cache, model: PreTrainedModel) -> CapturedSteps:
    """The context in which steps of a GEAR cache are captured."""
    assert isinstance(cache, GEARCache)
    return cache.captured_steps(model, _ROOM)


@torch.inference_mode()
def check_captured(name: str, model: PreTrainedModel, plan: Plan) -> dict[str, Any]:
    """
    Decodes what a cache decodes, with and without graphs, chunks being compressed on the way.

    Raises:
        MismatchError: if tokens differ, or there were other graphs than one.
    """
    tokens = torch.randint(model.config.vocab_size, (1, plan.preset_tokens[0]), device=model.device)

    def decode(cache: Cache) -> torch.Tensor:
        step, decoded = tokens, []
        for _ in range(plan.captured_tokens):
            step = model(step, **as_argument(cache), logits_to_keep=1).logits.argmax(dim=-1)
            decoded.append(step)
        return torch.cat(decoded, dim=1)

    expected, cache = decode(create_cache(name, model)), create_cache(name, model)
    with captured(cache, model) as steps:
        got = decode(cache)
    counts = {"recorded": steps.num_recorded, "replayed": steps.num_replayed, "others": steps.num_others}
    num_equal = int((got == expected).cumprod(dim=1).sum())
    if num_equal < plan.captured_tokens or steps.num_recorded != 1:
        raise MismatchError(f"{name}, captured: {num_equal} of {plan.captured_tokens} tokens are right, {counts}")
    return counts


@torch.inference_mode()
def time_captured(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """Whole decode steps at batch 1, captured and not, taking turns; what decodes other tokens is not timed."""
    settings = {"weights": "random", **plan.model, "steps": plan.steps, "checked_tokens": plan.captured_tokens}
    report = PartialReport(out / "gpu_captured.json", "captured", device, settings)
    small, counts = build_llama(plan.preset_model, device, torch.float32), {}
    for name in plan.captured_caches:
        with report.attempt(f"{name}, tokens"):
            counts[name] = check_captured(name, small, plan)
            typer.echo(f"{name}: tokens of {plan.captured_tokens} steps are equal, {counts[name]}")
    model = build_llama(plan.model, device)
    tokens = torch.randint(model.config.vocab_size, (1, plan.context + 1 + plan.steps), device=device)
    caches: dict[str, Cache] = {}
    with ExitStack() as stack:
        longest = 0.0
        for name in ("dynamic", *(each for right in counts for each in (right, f"{right}, captured"))):
            with report.attempt(name):
                box.require(2 * longest)
                preset, _, way = name.partition(", ")
                cache = create_cache(preset, model)
                read = partial(model, tokens[:, : plan.context], **as_argument(cache), logits_to_keep=1)
                longest = max(longest, time_call(read, device))
                if way:
                    stack.enter_context(captured(cache, model))
                # What is compiled and recorded is so before the first turn
                model(tokens[:, plan.context : plan.context + 1], **as_argument(cache))
                caches[name] = cache
        seconds = time_turns(model, caches, tokens[:, plan.context + 1 :], report.attempt, lambda: box.is_up)
        for row in step_rows(seconds, caches, plan.context):
            report.add({**row, **counts.get(row["cache"].partition(", ")[0], {})})
            typer.echo(describe(row))
