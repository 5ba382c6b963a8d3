"""Decode attention times predicted from bytes alone: what a cache holds, over a bandwidth that the caller states.

One item of the batch is really compressed, on the CPU, and its bytes are those of the cache's own `memory()`, the same
that `benchmark_kernels` counts; items do not share anything, so the batch is a multiple. The result is a bound: no
kernel that reads all of it is faster. Left out are the query, the output and the partial results of a split sequence
(thousandths of the bytes), the arithmetic, and the launches, which are counted beside it.

    kvcache-plugins bench predict --bandwidth 4300 --shape 16x32768
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.inputs import parse_dtype
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.harness.caches import REFERENCE, with_reference
from kvcache_plugins.registry import check_caches, create_cache
from kvcache_plugins.reports.memory import measure_memory

from .contest import Shape, random_states


_CACHES = (REFERENCE, "gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit")
# One for a prompt that is one compressed part, one that merges its splits and attends to the exact tokens
_GEAR_LAUNCHES = 2


@torch.inference_mode()
def bytes_of_item(cache_name: str, shape: Shape, dtype: torch.dtype) -> int:
    """Bytes that one layer of a cache holds of one sequence of `shape.context` tokens."""
    item = Shape(context=shape.context, num_heads=shape.num_heads, groups=shape.groups, head_dim=shape.head_dim)
    cache = create_cache(cache_name)
    cache.update(*random_states(item, dtype, torch.device("cpu")), 0)
    return measure_memory(cache).total_bytes


def predict(caches: Sequence[str], shape: Shape, dtype: torch.dtype, bytes_per_second: float) -> list[dict[str, Any]]:
    """A row for `dynamic` and one for each cache: bytes of a layer, and the seconds that reading them once takes."""
    item_bytes = {name: bytes_of_item(name, shape, dtype) for name in with_reference(caches)}
    return [
        {
            "cache": name,
            "batch_size": shape.batch_size,
            "context": shape.context,
            "bytes": size * shape.batch_size,
            "predicted_s": size * shape.batch_size / bytes_per_second,
            "predicted_speed_against_dense": item_bytes[REFERENCE] / size,
            "launches": None if name == REFERENCE else _GEAR_LAUNCHES,
        }
        for name, size in item_bytes.items()
    ]


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    launches = "" if row["launches"] is None else f"; {row['launches']} launches, not in the time"
    return (
        f"{row['batch_size']:4d} x {row['context']:6d} tokens, {row['cache']:<12} {row['bytes'] / 1e6:8.1f} MB, "
        f"predicted {row['predicted_s'] * 1e6:7.1f} us, "
        f"{row['predicted_speed_against_dense']:5.2f} times dense{launches}"
    )


def _parse_shape(text: str, **layer: int) -> Shape:
    batch_size, _, context = text.partition("x")
    if not (batch_size.isdecimal() and context.isdecimal() and int(batch_size) and int(context)):
        raise ValueError(f"`shape` has the form BATCHxTOKENS, such as `16x32768`, but got `{text}`")
    return Shape(batch_size=int(batch_size), context=int(context), **layer)


def benchmark_prediction(
    bandwidth: Annotated[float, typer.Option(help="GB/s (1e9 bytes) that reading is assumed to reach.")],
    shape: Annotated[list[str], typer.Option(help="BATCHxTOKENS; repeatable.")] = ["16x32768"],
    cache: Annotated[
        list[str] | None, typer.Option(help="`dynamic` or a GEAR preset; repeatable; by default one of each kind.")
    ] = None,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 8,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="Of dense and exact states.")] = "bfloat16",
) -> dict[str, Any]:
    """Predict attention times from bytes. The least time of one layer at a stated bandwidth; not a measurement.

    \b
    Examples:
        kvcache-plugins bench predict --bandwidth 4300
        kvcache-plugins bench predict --bandwidth 900 --shape 1x4096 --shape 8x4096 --cache gear-2bit
    """
    if bandwidth <= 0:
        raise ValueError(f"`bandwidth` must be above 0, but got {bandwidth}")
    kind = parse_dtype(dtype)
    shapes = [_parse_shape(text, num_heads=num_heads, head_dim=head_dim) for text in shape]
    caches = check_caches(cache or _CACHES)
    typer.echo(f"predictions from bytes at {bandwidth:g} GB/s, not measurements")
    rows: list[dict[str, Any]] = []
    for each in shapes:
        rows += predict(caches, each, kind, bandwidth * 1e9)
        for row in rows[-len(with_reference(caches)) :]:
            typer.echo(describe(row))
    settings = {"bandwidth_gb_s": bandwidth, "num_heads": num_heads, "head_dim": head_dim, "dtype": dtype}
    # Nothing depends on the machine that added the bytes up
    origin = {**provenance(torch.device("cpu")), "device": "predicted, not measured"}
    return {"benchmark": "prediction", **origin, "settings": settings, "rows": rows}
