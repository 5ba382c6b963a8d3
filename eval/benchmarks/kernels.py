"""Decode attention straight from compressed storage, beside dense attention, in one process.

Every kernel is checked against plain PyTorch first; nothing is timed on a mismatch. Then all contestants take turns,
so that what disturbs the machine disturbs them alike: medians and quartiles of the time, bytes each has to read, and
the share of the bandwidth that a copy reaches on the same machine. On a GPU the time is the device's own; that of a
whole call, with its launches, stands beside it.

    kvcache-plugins bench kernels --context 16384 --out FILE.json
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
import typer

from kvcache_plugins.console.display import announce_compilation
from kvcache_plugins.console.inputs import NumThreadsOption, parse_device, parse_dtype
from kvcache_plugins.console.results import provenance
from kvcache_plugins.registry import check_caches

from .contest import BACKENDS, Contest, Shape


CACHES = ("gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit", "gear-t25")


def describe(row: Mapping[str, Any]) -> str:
    """One line of a result."""
    lower, median, upper = (1e3 * row[key] for key in ("lower_quartile_s", "median_s", "upper_quartile_s"))
    return (
        f"{row['name']:<32} {median:8.3f} ms ({lower:.3f} to {upper:.3f}), {row['bytes'] / 1e6:7.1f} MB, "
        f"{100 * row['share_of_copy_bandwidth']:5.1f} % of copy, {row['speed_against_dense']:5.2f} times dense"
    )


@torch.inference_mode()
def benchmark_kernels(
    context: Annotated[int, typer.Option(help="Tokens, a multiple of 64.", min=1)] = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    num_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 8,
    groups: Annotated[int, typer.Option(help="Query heads a key/value head.", min=1)] = 4,
    head_dim: Annotated[int, typer.Option(help="Channels of a head.", min=1)] = 128,
    cache: Annotated[
        list[str] | None, typer.Option(help="A GEAR preset; repeatable; by default one of each kind.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, of queries and dense states.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    num_threads: NumThreadsOption = None,
    rounds: Annotated[int, typer.Option(help="Times that each is timed.", min=3)] = 25,
) -> dict[str, Any]:
    """Time decode attention alone. From compressed storage, dense, and a copy, taking turns; checked first.

    \b
    Examples:
        kvcache-plugins bench kernels
        kvcache-plugins bench kernels --device cuda --dtype bfloat16 --batch-size 16 --context 32768 --out kernels.json
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    place = parse_device(device)
    shape = Shape(context=context, batch_size=batch_size, num_heads=num_heads, groups=groups, head_dim=head_dim)
    kind = parse_dtype(dtype)
    caches = check_caches(cache or CACHES)
    announce_compilation(place.type)
    contest = Contest(shape, kind, place)
    for backend in BACKENDS if place.type == "cuda" else ():
        try:
            contest.add_backend(backend)
        except RuntimeError as error:
            typer.echo(f"{backend}: left out ({str(error).splitlines()[0]})", err=True)
    for name in caches:
        contest.add(name)
    typer.echo(f"{rounds} rounds, in which each is timed once", err=True)
    rows = contest.run(rounds)
    for row in rows:
        typer.echo(describe(row))
    content = {**provenance(place), "settings": contest.settings(rounds), "rows": rows}
    return {"benchmark": "kernels", **content}
