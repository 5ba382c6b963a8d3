"""Decode attention straight from compressed storage, beside dense attention, in one process.

Every kernel is checked against plain PyTorch first; nothing is timed on a mismatch. Then all contestants take turns,
so that what disturbs the machine disturbs them alike: medians and quartiles of the time, bytes each has to read, and
the share of the bandwidth that a copy reaches on the same machine.

    python -m kvcache_plugins.eval.benchmark_kernels --context 16384 --out FILE.json
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from kvcache_plugins.ops.attention import attend
from kvcache_plugins.ops.dispatch import choose_kernel
from kvcache_plugins.ops.parts import CompressedPart
from kvcache_plugins.registry import create_cache

from .report import provenance, write_json
from .timing import spread, time_call


CACHES = ("gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit")
# Of the output, relative RMS error against plain PyTorch
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-3, torch.bfloat16: 5e-3}


def _compressed_part(name: str, keys: torch.Tensor, values: torch.Tensor) -> CompressedPart:
    """All tokens as one prompt of a GEAR layer; those beyond a whole number of groups would stay exact."""
    cache: Any = create_cache(name)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    layer.settle_prompt()
    (block,) = layer.blocks
    if block.length != keys.shape[2]:
        raise ValueError(f"`context` has to be a multiple of {cache.gear_config.token_group}")
    return CompressedPart(block.keys, block.values, block.length, None)


def take_turns(functions: dict[str, Callable[[], Any]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each function, in `rounds` rounds in which each runs once."""
    for function in functions.values():
        for _ in range(3):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(time_call(function, device))
    return seconds


@torch.inference_mode()
def main(
    context: Annotated[int, typer.Option(help="Tokens, a multiple of 64.")] = 16384,
    batch_size: Annotated[int, typer.Option()] = 1,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.")] = 8,
    groups: Annotated[int, typer.Option(help="Query heads a key/value head.")] = 4,
    head_dim: Annotated[int, typer.Option()] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of queries and dense states.")] = "float32",
    device: Annotated[str, typer.Option()] = "cpu",
    num_threads: Annotated[int | None, typer.Option(help="Of the CPU; PyTorch's default if not given.")] = None,
    rounds: Annotated[int, typer.Option()] = 25,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Checks, then times decode attention."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place, kind = torch.device(device), getattr(torch, dtype)
    torch.manual_seed(0)
    shape = (batch_size, num_heads, context, head_dim)
    channel_scale = torch.rand(1, num_heads, 1, head_dim, device=place) * 3
    keys = (torch.randn(shape, device=place) * channel_scale).to(kind)
    values = torch.randn(shape, device=place).to(kind)
    query = torch.randn(batch_size, num_heads * groups, 1, head_dim, device=place).to(kind)
    packed = query.view(batch_size, num_heads, groups, head_dim)

    functions: dict[str, Callable[[], Any]] = {
        f"dense {dtype}": lambda: F.scaled_dot_product_attention(packed, keys, values)
    }
    num_bytes = {f"dense {dtype}": keys.nbytes + values.nbytes}
    if kind == torch.float32:
        half_query, half_keys, half_values = packed.bfloat16(), keys.bfloat16(), values.bfloat16()
        functions["dense bfloat16"] = lambda: F.scaled_dot_product_attention(half_query, half_keys, half_values)
        num_bytes["dense bfloat16"] = half_keys.nbytes + half_values.nbytes
    kernel, _ = choose_kernel(query)
    for name in CACHES:
        part = _compressed_part(name, keys, values)
        expected, output = attend(query, [part], num_heads), attend(query, [part], num_heads, kernel=kernel)
        error = ((output - expected).float().square().mean() / expected.float().square().mean()).sqrt().item()
        typer.echo(f"{name}: relative error {error:.1e} against plain PyTorch", err=True)
        if not error < _TOLERANCE[kind]:
            raise RuntimeError(f"{name} by the `{kernel}` kernel is wrong by {error:.1e}: not timed")
        functions[name] = partial(attend, query, [part], num_heads, kernel=kernel)
        num_bytes[name] = sum(tensor.nbytes for side in (part.keys, part.values) for _, tensor in side.named_tensors())
        if name == "gear-l-2bit":
            functions["gear-l-2bit, dequantized first"] = partial(_dequantize_then_attend, packed, part, kind)
            num_bytes["gear-l-2bit, dequantized first"] = num_bytes[name]
    source = torch.empty(2**27 // 4, device=place)
    target = torch.empty_like(source)
    functions["copy"] = lambda: target.copy_(source)
    num_bytes["copy"] = 2 * source.nbytes

    seconds = take_turns(functions, rounds, place)
    ceiling = num_bytes["copy"] / statistics.median(seconds["copy"])
    rows, dense = [], statistics.median(seconds[f"dense {dtype}"])
    for name, measured in seconds.items():
        times = spread(measured)
        lower, median, upper = (times[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
        bandwidth = num_bytes[name] / median
        rows.append(
            {
                "name": name,
                **times,
                "bytes": num_bytes[name],
                "share_of_copy_bandwidth": bandwidth / ceiling,
                "speed_against_dense": dense / median,
            }
        )
        typer.echo(
            f"{name:<32} {median * 1e3:8.2f} ms ({lower * 1e3:.2f} to {upper * 1e3:.2f}), "
            f"{num_bytes[name] / 1e6:7.1f} MB, {100 * bandwidth / ceiling:5.1f} % of copy, "
            f"{dense / median:5.2f} times dense {dtype}"
        )
    if out is not None:
        settings = {
            "batch_size": batch_size,
            "num_key_value_heads": num_heads,
            "groups": groups,
            "head_dim": head_dim,
            "context": context,
            "dtype": dtype,
            "kernel": kernel,
            "rounds": rounds,
        }
        write_json(out, {"benchmark": "kernels", **provenance(place), "settings": settings, "rows": rows})


def _dequantize_then_attend(query: torch.Tensor, part: CompressedPart, dtype: torch.dtype) -> torch.Tensor:
    """What a cache has to do that hands dense states back."""
    tiles = list(part.tiles())
    keys, values = (torch.cat([getattr(tile, side) for tile in tiles], dim=2) for side in ("keys", "values"))
    return F.scaled_dot_product_attention(query, keys.to(dtype), values.to(dtype))


if __name__ == "__main__":
    typer.run(main)
