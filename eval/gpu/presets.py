"""Decode attention of every GEAR preset over what it stores, a chunk of decoded tokens among it, on the GPU.

A preset runs two layers of random states in bfloat16: a prompt, decoded tokens that the update after them compresses,
and one more. What attention makes of that is held against plain PyTorch from the same storage.
"""

import time
from functools import lru_cache
from typing import Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.eval.harness.caches import cache_stats
from kvcache_plugins.gear.kernel_check import MismatchError, require_close_layers
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.models.cache_argument import as_argument
from kvcache_plugins.registry import create_cache

from .models import build_llama
from .partial_report import PartialReport, TimeBox
from .plan import Plan


# Those in calibrated bases, and the tokens that a calibration is made of
_CALIBRATED = "gear-c"
_CALIBRATION_TOKENS = 96


def check_presets(plan: Plan, report: PartialReport, device: torch.device, box: TimeBox) -> None:
    """Adds a row for each preset of the plan that is right, and a failure for each other."""
    model = build_llama(plan.preset_model, device)
    longest = 0.0
    for name in plan.presets:
        with report.attempt(name):
            box.require(1.5 * longest)
            start = time.monotonic()
            error = _check(name, create_preset(name, model), model, plan)
            longest = max(longest, time.monotonic() - start)
            report.add({"cache": name, "relative_error": error, "seconds": time.monotonic() - start})
            typer.echo(f"{name}: relative error {error:.1e}")


def create_preset(name: str, model: PreTrainedModel) -> Cache:
    """A preset's cache; those in calibrated bases share a calibration of the model."""
    options: dict[str, Any] = {"calibration": _calibrate(model)} if name.startswith(_CALIBRATED) else {}
    return create_cache(name, model, **options)


@lru_cache(maxsize=1)
def _calibrate(model: PreTrainedModel) -> Any:
    tokens = torch.randint(model.config.vocab_size, (_CALIBRATION_TOKENS,), device=model.device)
    return calibrate_transform(model, [tokens], num_draws=1)


def _check(name: str, cache: Cache, model: PreTrainedModel, plan: Plan) -> float:
    with torch.inference_mode():
        for count in plan.preset_tokens:
            tokens = torch.randint(model.config.vocab_size, (1, count), device=model.device)
            model(tokens, **as_argument(cache), logits_to_keep=1)
        error = require_close_layers(name, cache, model.config.num_attention_heads)
    stats = cache_stats(cache)
    if error is None or stats["kernel_fallbacks"] or not stats["fused_calls"]:
        raise MismatchError(f"{name} was not computed by the kernels: {stats}")
    return error
