"""Machine code of decode attention and of coding, preset by preset: what a GPU that is not there would have to issue.

A warp instruction takes one of four slots that a multiprocessor has a clock. A cached number of 16 bits takes so many
clocks to read; what of the copy bandwidth the slots allow, and how many times as fast as reading a dense cache that is
at best, follows. Both are bounds: waiting for memory, for each other or for one unit of the multiprocessor is not in
them. A loop over outliers within a tile counts as often as the preset's own lists make it run. Of kernels that code
rows all counts, a loop over channels as often as it runs, and the fit of a scale once, though it may be repeated.

    kvcache-plugins bench machine-code
"""

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.groups import TENSOR_NAMES
from kvcache_plugins.codecs.parts import CodedPart, CompressedPart
from kvcache_plugins.console.results import provenance
from kvcache_plugins.eval.machine_code.bounds import counted_row
from kvcache_plugins.eval.machine_code.compilation import compile_for, disassemble
from kvcache_plugins.eval.machine_code.listing import Listing
from kvcache_plugins.gear.layer import GEARLayer
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.gear.transform.layer import TransformLayer
from kvcache_plugins.gear.transform.storage import CodedBlock
from kvcache_plugins.registry import check_caches, create_cache, describe_caches

from .coding_machine_code import SIDES, count_coding, is_coded
from .contest import Shape, random_states


if TYPE_CHECKING:
    from kvcache_plugins.triton_kernels.attention.partials import Launch


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
    "gear-t16",
    "gear-t25",
    "gear-t16-trellis",
    "gear-c16",
)
# Channels of a head that the command counts by default, the second of rows alone
HEAD_DIMS = (128, 64)
_CPU = torch.device("cpu")
_CONTEXT = 1024
_NUM_HEADS = 8
# Enough for a calibration of random weights
_CALIBRATION_TOKENS = 96


def compress(cache: str, head_dim: int) -> CompressedPart | CodedPart:
    """The compressed prompt of one layer."""
    model = _random_model(head_dim)
    options: dict[str, Any] = {}
    if describe_caches(cache)[0].options.get("calibration"):
        tokens = torch.arange(_CALIBRATION_TOKENS) % model.config.vocab_size
        options["calibration"] = calibrate_transform(model, [tokens], num_draws=1)
    layers = create_cache(cache, model, **options)
    shape = Shape(context=_CONTEXT, num_heads=_NUM_HEADS, head_dim=head_dim)
    keys, values = random_states(shape, torch.bfloat16, _CPU)
    with torch.inference_mode():
        # Transform coding looks at whether keys were turned
        angles = model.model.rotary_emb(keys, torch.arange(_CONTEXT)[None])
        keys, _ = apply_rotary_pos_emb(keys, keys, *angles)
        layers.update(keys, values, 0)
        layer = layers.layers[0]
        if isinstance(layer, GEARLayer | TransformLayer):
            layer.settle_prompt()
    if not isinstance(layer, GEARLayer | TransformLayer) or not layer.blocks:
        raise ValueError(f"`cache` has to name presets whose prompts these kernels read, but got `{cache}`")
    block = layer.blocks[0]
    if isinstance(block, CodedBlock):
        assert isinstance(layer, TransformLayer) and layer.codec is not None
        return CodedPart(block.keys, block.values, layer.codec, Positions(block.start), block.length, None)
    return CompressedPart(block.keys, block.values, block.length, None)


def _random_model(head_dim: int) -> LlamaForCausalLM:
    """A model of one layer, whose rotary embedding and, where asked for, calibration a cache has."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=_NUM_HEADS * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=_NUM_HEADS,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def count(
    cache: str, part: CompressedPart | CodedPart, head_dim: int, num_rows: int, capability: int
) -> dict[str, Any]:
    """One row: instructions a number by kind, registers, spilled bytes, shared memory, and the bounds."""
    query = torch.empty(1, _NUM_HEADS, num_rows, head_dim, dtype=torch.bfloat16)
    launch = _prepare(query, part)
    compiled = compile_for(launch.kernel, launch.arguments, capability, **launch.options)
    listing = Listing(disassemble(compiled))
    if isinstance(part, CodedPart):
        # There is another loop, for what is left of a tile
        kinds = listing.count(listing.shortest_loop())
    else:
        kinds = _count_tile(listing, part, launch)
    numbers = launch.arguments["BLOCK_T"] * 2 * head_dim / launch.grid[2]
    kinds = Counter({kind: number * launch.options["num_warps"] for kind, number in kinds.items()})
    names = {"cache": cache, "kernel": "attention", "head_dim": head_dim, "query_heads": num_rows}
    bits = _num_bits(part) / (2 * _NUM_HEADS * head_dim * part.length)
    return counted_row(names, compiled, kinds, numbers, bits)


def _prepare(query: torch.Tensor, part: CompressedPart | CodedPart) -> "Launch":
    """Prepares the launch that a GPU would run. Imported late, as Triton need not be there."""
    from kvcache_plugins.kernels.triton import prepare_part
    from kvcache_plugins.kernels.triton import prepare_part as prepare_rows

    if isinstance(part, CodedPart):
        return prepare_rows(query, part, 1.0, packed=True).launch
    return prepare_part(query, part, 1.0, packed=True).launch


def _count_tile(listing: Listing, part: CompressedPart, launch: "Launch") -> Counter[str]:
    """Instructions of a tile by kind, those of its outliers as often as the lists of the part make them run."""
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
    return kinds


def describe(row: dict[str, Any]) -> str:
    """One line of a result."""
    heads = "" if row["query_heads"] is None else f", {row['query_heads']:2d} query heads"
    bound = f"{100 * row['share_of_copy_bandwidth']:.0f} % of copy bandwidth"
    if row["times_dense"] is not None:
        bound = f"{row['times_dense']:.2f} times dense"
    return (
        f"{row['cache']:<16} {row['kernel']:<9} D {row['head_dim']:3d}{heads}: "
        f"{row['instructions_a_number']:.3f} instructions a number, {row['registers']} registers, "
        f"{row['spilled']} bytes spilled, {row['shared']} shared, at best {bound}"
    )


def benchmark_machine_code(
    cache: Annotated[list[str] | None, typer.Option(help="A GEAR preset; repeatable; by default all.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Channels of a head; repeatable; by default 128, of rows 64 too.", min=1)
    ] = None,
    query_heads: Annotated[list[int], typer.Option(help="Query heads of a key/value head; repeatable.", min=1)] = [4],
    capability: Annotated[int, typer.Option(help="Compute capability: 80, 86, 90.", min=80)] = 90,
) -> dict[str, Any]:
    """Count the machine code of decode attention and of coding.

    It is compiled for a GPU that need not be there: nothing is timed.

    \b
    Examples:
        kvcache-plugins bench machine-code
        kvcache-plugins bench machine-code --cache gear-k4v4 --head-dim 64 --head-dim 128 --capability 80
    """
    typer.echo("counted in machine code, not measured; bounds for an H200")
    rows = []
    for size in head_dim or HEAD_DIMS:
        for name in check_caches(cache or PRESETS):
            part = compress(name, size)
            if head_dim is None and size != HEAD_DIMS[0] and not isinstance(part, CodedPart):
                continue
            counted = [partial(count, name, part, size, num_rows, capability) for num_rows in query_heads]
            if isinstance(part, CodedPart) and is_coded(part):
                counted += [partial(count_coding, name, part, size, side, capability) for side in SIDES]
            for each in counted:
                rows.append(each())
                typer.echo(describe(rows[-1]))
    settings = {"capability": capability, "dtype": "bfloat16", "context": _CONTEXT, "num_heads": _NUM_HEADS}
    origin = {**provenance(_CPU), "device": "compiled, not run"}
    return {"benchmark": "machine-code", **origin, "settings": settings, "rows": rows}


def _num_bits(part: CompressedPart | CodedPart) -> int:
    """Of what a decode step reads. Tables of rows, which do not grow, and spare room are left out."""
    if isinstance(part, CodedPart):
        return sum(8 * side[:, :, : part.length].nbytes for side in (part.keys, part.values))
    tensors = (getattr(side, name) for side in (part.keys, part.values) for name in TENSOR_NAMES)
    return sum(8 * tensor.nbytes for tensor in tensors if tensor is not None)
