"""Machine code of the decode attention, preset by preset: what a GPU that is not there would have to issue.

A warp instruction takes one of four slots that a multiprocessor has a clock. A cached number of 16 bits takes so many
clocks to read; what of the copy bandwidth the slots allow, and how many times as fast as reading a dense cache that is
at best, follows. Both are bounds: waiting for memory, for each other or for one unit of the multiprocessor is not in
them. A loop over outliers within a tile counts as often as the preset's own lists make it run.

    kvcache-plugins bench machine-code
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import typer

from kvcache_plugins.console.run_report import provenance
from kvcache_plugins.eval.machine_code.compilation import compile_for, disassemble, resources
from kvcache_plugins.eval.machine_code.listing import Listing
from kvcache_plugins.gear.layer import GEARLayer
from kvcache_plugins.ops.compressed_states import TENSOR_NAMES, CompressedStates
from kvcache_plugins.ops.parts import CompressedPart
from kvcache_plugins.ops.triton_attention import prepare_part
from kvcache_plugins.registry import check_caches, create_cache

from .contest import Shape, random_states


PRESETS = (
    "kivi-2bit",
    "kivi-4bit",
    "gear-k4v4",
    "gear-k4v4-g32",
    "gear-k4v3",
    "gear-k3v2",
    "gear-k2v2",
    "kcvt-4bit",
    "per-token-2bit",
    "per-token-4bit",
    "gear-l-2bit",
    "gear-l-4bit",
    "gear-2bit",
    "gear-4bit",
)
# Of an H200: 132 multiprocessors at 1.8 GHz copy 4.3 TB/s, and issue four warp instructions a clock each
_CLOCKS_A_DENSE_NUMBER = 2 * 132 * 1.8e9 / 4.3e12
_SLOTS = 4
_CPU = torch.device("cpu")
_CONTEXT = 1024
_NUM_HEADS = 8


def compress(cache: str, head_dim: int) -> CompressedPart:
    """The compressed prompt of one layer."""
    layers = create_cache(cache)
    states = random_states(Shape(context=_CONTEXT, num_heads=_NUM_HEADS, head_dim=head_dim), torch.bfloat16, _CPU)
    with torch.inference_mode():
        layers.update(*states, 0)
        layer = layers.layers[0]
        assert isinstance(layer, GEARLayer)
        layer.settle_prompt()
    if not layer.blocks:
        raise ValueError(f"`cache` has to name presets whose prompts these kernels read, but got `{cache}`")
    block = layer.blocks[0]
    return CompressedPart(block.keys, block.values, block.length, None)


def count(cache: str, head_dim: int, num_rows: int, capability: int) -> dict[str, Any]:
    """One row: instructions a number by kind, registers, spilled bytes, shared memory, and the bounds."""
    from kvcache_plugins.triton_kernels.attention.attend_kernel import attend_kernel

    part = compress(cache, head_dim)
    query = torch.empty(1, _NUM_HEADS, num_rows, head_dim, dtype=torch.bfloat16)
    launch = prepare_part(query, part, 1.0, packed=True)
    compiled = compile_for(attend_kernel, launch.arguments, capability, **launch.options)
    listing = Listing(disassemble(compiled))
    tile_loop = listing.tile_loop()
    inner = listing.loops_within(tile_loop)
    kinds = listing.count(tile_loop, without=inner)
    block_entries = launch.arguments["BLOCK_E"]
    sides = [side for side in (part.keys, part.values) if side.outlier_offsets is not None]
    for side, loop in zip(sides, inner, strict=True):
        assert side.outlier_offsets is not None
        turns = (side.outlier_offsets.diff(dim=-1) / block_entries).ceil().mean().item()
        for kind, number in listing.count(loop).items():
            kinds[kind] += number * turns
    row_blocks = launch.grid[2]
    numbers = launch.arguments["BLOCK_T"] * 2 * head_dim / row_blocks
    kinds = Counter({kind: number * launch.options["num_warps"] for kind, number in kinds.items()})
    instructions = sum(kinds.values()) / numbers
    bits = sum(_num_bits(side) for side in (part.keys, part.values)) / (2 * _NUM_HEADS * head_dim * part.length)
    read, issue = _CLOCKS_A_DENSE_NUMBER * bits / 16, instructions / _SLOTS
    return {
        "cache": cache,
        "head_dim": head_dim,
        "query_heads": num_rows,
        **resources(compiled),
        "instructions_a_number": instructions,
        "kinds": {kind: number / numbers for kind, number in kinds.most_common()},
        "bits_a_number": bits,
        "share_of_copy_bandwidth": min(1.0, read / issue),
        "times_dense": _CLOCKS_A_DENSE_NUMBER / max(read, issue),
    }


def describe(row: dict[str, Any]) -> str:
    """One line of a result."""
    return (
        f"{row['cache']:<15} D {row['head_dim']:3d}, {row['query_heads']:2d} query heads: "
        f"{row['instructions_a_number']:.3f} instructions a number, {row['registers']} registers, "
        f"{row['spilled']} bytes spilled, {row['shared']} shared, at best {row['times_dense']:.2f} times dense"
    )


def benchmark_machine_code(
    cache: Sequence[str] | None, head_dim: Sequence[int], query_heads: Sequence[int], capability: int
) -> dict[str, Any]:
    """A result of `bench machine-code`: a row for each preset, head dimension and number of query heads."""
    typer.echo("counted in machine code, not measured; bounds for an H200")
    rows = []
    for size in head_dim:
        for num_rows in query_heads:
            for name in check_caches(cache or PRESETS):
                rows.append(count(name, size, num_rows, capability))
                typer.echo(describe(rows[-1]))
    settings = {"capability": capability, "dtype": "bfloat16", "context": _CONTEXT, "num_heads": _NUM_HEADS}
    origin = {**provenance(_CPU), "device": "compiled, not run"}
    return {"benchmark": "machine-code", **origin, "settings": settings, "rows": rows}


def _num_bits(side: CompressedStates) -> int:
    tensors = (getattr(side, name) for name in TENSOR_NAMES)
    return sum(8 * tensor.nbytes for tensor in tensors if tensor is not None)
