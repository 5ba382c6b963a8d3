"""Machine code of decode attention, preset by preset: what a GPU that is not there would have to issue.

A warp instruction takes one of four slots that a multiprocessor has a clock. A cached number of 16 bits takes so many
clocks to read; what of the copy bandwidth the slots allow, and how many times as fast as reading a dense cache that is
at best, follows. Both are bounds: waiting for memory, for each other or for one unit of the multiprocessor is not in
them. A loop over outliers within a tile counts as often as the preset's own lists make it run.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvcache_plugins.codecs.groups import TENSOR_NAMES
from kvcache_plugins.codecs.parts import CodedPart, CompressedPart
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.harness import read_states
from kvcache_plugins.eval.machine_code import Listing, compile_for, disassemble, resources
from kvcache_plugins.eval.rows import Content, Found, Settings
from kvcache_plugins.gear.transform.calibration import calibrate_transform
from kvcache_plugins.layers.compressed_layer import CompressedLayer
from kvcache_plugins.registry import check_caches, create_cache, describe_caches

from .kernels import Shape, random_states
from .step import random_model


_ROWS = ("gear-t16", "gear-t25", "gear-t16:quantizer=trellis", "gear-c16")
PRESETS = (
    *("kivi-2bit", "kivi-4bit", "gear-k4v3:value_nbits=4", "gear-k4v3:value_nbits=4,q_group_size=32", "gear-k4v3"),
    *("gear-k4v3:nbits=3,value_nbits=2", "gear-k4v3:nbits=2,value_nbits=2", "kcvt-4bit", "per-token-2bit"),
    *("per-token-4bit", "gear-l-2bit", "gear-l-4bit", "gear-2bit", "gear-4bit", *_ROWS),
)
# Channels of a head that the command counts by default, the second of rows alone
HEAD_DIMS = (128, 64)
_CONTEXT, _NUM_HEADS = 1024, 8
# Words of a model, and tokens of its calibration: enough for all directions of a head, or others are too large for it
_CALIBRATION_TOKENS = 512
# Of an H200: 132 multiprocessors at 1.8 GHz copy 4.3 TB/s, and issue four warp instructions a clock each
_CLOCKS_A_DENSE_NUMBER = 2 * 132 * 1.8e9 / 4.3e12
_SLOTS, _DENSE_BITS = 4, 16


def compress(cache: str, head_dim: int) -> CompressedPart | CodedPart:
    """Compresses the prompt of one layer of random states, of a model with random weights."""
    sizes: dict[str, int] = {"vocab_size": _CALIBRATION_TOKENS, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"hidden_size": _NUM_HEADS * head_dim, "num_attention_heads": _NUM_HEADS}
    with torch.random.fork_rng():
        model: Any = random_model(LlamaConfig(**sizes), torch.float32)  # type: ignore[arg-type]
    options: dict[str, Any] = {}
    if describe_caches(cache.partition(":")[0])[0].options.get("calibration"):
        options["calibration"] = calibrate_transform(model, [torch.randperm(_CALIBRATION_TOKENS)], num_draws=1)
    layers = create_cache(cache, model, **options)
    with torch.inference_mode():
        if options:
            # A calibration is of the model's own states, and those below would be far larger
            ((keys, values),) = read_states(model, torch.randint(_CALIBRATION_TOKENS, (1, _CONTEXT)))
        else:
            shape = Shape(context=_CONTEXT, num_heads=_NUM_HEADS, head_dim=head_dim)
            keys, values = random_states(shape, torch.bfloat16, torch.device("cpu"))
            # Transform coding looks at whether keys were turned
            keys, _ = apply_rotary_pos_emb(keys, keys, *model.model.rotary_emb(keys, torch.arange(_CONTEXT)[None]))
        layers.update(keys.bfloat16(), values.bfloat16(), 0)
        layer = layers.layers[0]
        if isinstance(layer, CompressedLayer):
            layer.settle_prompt()
    if not isinstance(layer, CompressedLayer) or not layer.blocks:
        raise ValueError(f"`cache` has to name presets whose prompts these kernels read, but got `{cache}`")
    part: CompressedPart | CodedPart = layer.blocks[0].part(layer.codec, None, None)
    return part


def count_attention(part: CompressedPart | CodedPart, head_dim: int, num_rows: int, capability: int) -> dict[str, Any]:
    """Counts the instructions of decode attention a cached number: a row but for its cache."""
    # Imported late, as Triton need not be there
    from kvcache_plugins.kernels.triton import prepare_part

    query = torch.empty(1, _NUM_HEADS, num_rows, head_dim, dtype=torch.bfloat16)
    launch: Any = prepare_part(query, part, 1.0, packed=True).launch
    compiled = compile_for(launch.kernel, launch.arguments, capability, **launch.options)
    listing = Listing(disassemble(compiled))
    if isinstance(part, CodedPart):
        # There is another loop, for what is left of a tile
        kinds = listing.count(listing.shortest_loop())
        # Tables of rows, which do not grow, and spare room are left out
        num_bytes = sum(side[:, :, : part.length].nbytes for side in (part.keys, part.values))
    else:
        kinds = _count_tile(listing, part, launch.arguments["BLOCK_E"])
        tensors = (getattr(side, name) for side in (part.keys, part.values) for name in TENSOR_NAMES)
        num_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    numbers = launch.arguments["BLOCK_T"] * 2 * head_dim / launch.grid[2]
    kinds = Counter({kind: number * launch.options["num_warps"] for kind, number in kinds.items()})
    bits = 8 * num_bytes / (2 * _NUM_HEADS * head_dim * part.length)
    names = {"kernel": "attention", "head_dim": head_dim, "query_heads": num_rows}
    return {**names, **_bounds(compiled, kinds, numbers, bits)}


def _count_tile(listing: Listing, part: CompressedPart, block_entries: int) -> Counter[str]:
    """Counts instructions of a tile, those of its outliers as often as the lists of the part make them run."""
    tile_loop = listing.tile_loop()
    inner = listing.loops_within(tile_loop)
    kinds = listing.count(tile_loop, without=inner)
    offsets = [side.outlier_offsets for side in (part.keys, part.values) if side.outlier_offsets is not None]
    for each, loop in zip(offsets, inner, strict=True):
        turns = (each.diff(dim=-1) / block_entries).ceil().mean().item()
        for kind, number in listing.count(loop).items():
            kinds[kind] += number * turns  # type: ignore[assignment]
    return kinds


def _bounds(compiled: Any, kinds: Counter[str], num_numbers: float, bits: float) -> dict[str, Any]:
    """Computes what warp instructions by kind, issued for so many numbers of so many bits, allow at best."""
    instructions = sum(kinds.values()) / num_numbers
    moved, issue = _CLOCKS_A_DENSE_NUMBER * bits / _DENSE_BITS, instructions / _SLOTS
    return {
        **resources(compiled),
        "instructions_a_number": instructions,
        "kinds": {kind: number / num_numbers for kind, number in kinds.most_common()},
        "bits_a_number": bits,
        "share_of_copy_bandwidth": min(1.0, moved / issue),
        "times_dense": _CLOCKS_A_DENSE_NUMBER / max(moved, issue),
    }


@benchmark("machine-code", "Counted in machine code, not measured; bounds for an H200")
def benchmark_machine_code(
    cache: Annotated[list[str] | None, typer.Option(help="A GEAR preset; repeatable; by default all.")] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(help="Channels of a head; repeatable; by default 128, of rows 64 too.", min=1)
    ] = None,
    query_heads: Annotated[list[int], typer.Option(help="Query heads of a key/value head; repeatable.", min=1)] = [4],
    capability: Annotated[int, typer.Option(help="Compute capability: 80, 86, 90.", min=80)] = 90,
) -> Iterator[Found]:
    """Count the machine code of attention.

    It is compiled for a GPU that need not be there: nothing is timed.

    \b
    Examples:
        kvcache-plugins bench machine-code
        kvcache-plugins bench machine-code --cache gear-k4v3 --head-dim 64 --head-dim 128 --capability 80
    """
    yield Settings(dtype="bfloat16", context=_CONTEXT, num_heads=_NUM_HEADS)
    yield Content(device="compiled, not run")
    for size in head_dim or HEAD_DIMS:
        for name in check_caches(cache or PRESETS):
            part = compress(name, size)
            if head_dim is None and size != HEAD_DIMS[0] and not isinstance(part, CodedPart):
                continue
            say(f"{name}, {size} channels")
            for num_rows in query_heads:
                yield {"cache": name, **count_attention(part, size, num_rows, capability)}
