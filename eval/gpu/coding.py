"""Coding of tokens as rows, by kernels and in plain PyTorch, beside a copy of the same states: right, then timed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import Cache, PreTrainedModel

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.eval.harness.timing import spread, time_call, time_on_gpu
from kvcache_plugins.gear.kernel_check import plain_pytorch, require_same_rows
from kvcache_plugins.gear.transform.layer import TransformLayer
from kvcache_plugins.kernels.attention_call import AttentionCall

from .models import DTYPE, build_llama
from .partial_report import PartialReport, TimeBox
from .plan import Plan
from .presets import create_preset


# Times that each way is timed
_ROUNDS = 20
# Bytes that are copied before what is timed: more than a GPU's cache holds, and for longer than Python needs
_AHEAD_BYTES = 2**28


def time_coding(plan: Plan, out: Path, device: torch.device, box: TimeBox) -> None:
    """A prompt and a chunk of decoded tokens coded, a row for each way. What is not right is not timed."""
    settings = {**plan.preset_model, "tokens": plan.coding_tokens, "dtype": str(DTYPE).removeprefix("torch.")}
    report = PartialReport(out / "gpu_coding.json", "coding", device, settings)
    model = build_llama(plan.preset_model, device)
    for name in plan.coding_caches:
        with report.attempt(name):
            box.require(0.0)
            for row in _time_cache(name, create_preset(name, model), model, plan, device):
                report.add({"cache": name, **row})
                typer.echo(f"{name}, {row['tokens']} tokens, {row['way']}: {1e3 * row['median_s']:.3f} ms")


@torch.inference_mode()
def _time_cache(
    name: str, cache: Cache, model: PreTrainedModel, plan: Plan, device: torch.device
) -> list[dict[str, Any]]:
    layer, keys, values = _fill(cache, model, max(plan.coding_tokens), device)
    assert layer.codec is not None
    start, rows = layer.blocks[0].start, []
    positions = Positions(start)
    for count in plan.coding_tokens:
        own_keys, own_values = (each[:, :, start : start + count] for each in (keys, values))
        encode = partial(layer.codec.encode, own_keys, own_values, positions)
        found = require_same_rows(f"{name}, {count} tokens", layer.codec, own_keys, own_values, positions)
        states = [own_keys, own_values]
        targets = [torch.empty_like(each) for each in states]
        ways: dict[str, Callable[[], Any]] = {
            "kernels": encode,
            "plain": partial(_in_plain_pytorch, encode),
            "copy": partial(torch._foreach_copy_, targets, states),
        }
        for way, function in ways.items():
            seconds = _time(function, device)
            rows.append({"tokens": states[0].shape[2], "way": way, "different_rows": found, **spread(seconds)})
    return rows


def _fill(
    cache: Cache, model: PreTrainedModel, count: int, device: torch.device
) -> tuple[TransformLayer, torch.Tensor, torch.Tensor]:
    """The first layer of a cache, that has coded a prompt of random states, and these."""
    config, layer = model.config, cache.layers[0]
    assert isinstance(layer, TransformLayer)
    head_dim = config.hidden_size // config.num_attention_heads
    size = config.num_key_value_heads, count + layer.config.num_sink_tokens, head_dim
    keys, values = torch.randn(2, 1, *size, device=device).to(DTYPE)
    keys = keys * torch.rand(1, size[0], 1, head_dim, device=device).to(DTYPE)
    layer.update(keys, values)
    query = torch.randn(1, config.num_attention_heads, *size[1:], device=device).to(DTYPE)
    layer.on_exact_attention(AttentionCall(query, is_causal=True))
    layer.settle_prompt()
    return layer, keys, values


def _in_plain_pytorch(function: Callable[[], Any]) -> None:
    with plain_pytorch():
        function()


def _time(function: Callable[[], Any], device: torch.device) -> list[float]:
    if device.type != "cuda":
        return [time_call(function, device)]
    function()
    source = torch.empty(_AHEAD_BYTES // 4, device=device)
    ahead = partial(torch.empty_like(source).copy_, source)
    return [time_on_gpu(function, ahead) for _ in range(_ROUNDS)]
