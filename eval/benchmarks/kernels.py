"""Decode attention straight from compressed storage, beside dense attention, in one process.

Every attention is checked against plain PyTorch when it is added; nothing is timed on a mismatch. Then all are timed
in turns, so that other work of the machine slows all of them alike. Rows have medians and quartiles of the time, the
bytes read, and the bandwidth as a share of that of a copy on the same machine. On a GPU the time is the device's own,
and that of a whole call, with its launches, is a second field.

Instructions of a GPU that need not be present are counted for each preset. A multiprocessor has four slots for warp
instructions in a clock, and reads a dense number of 16 bits in a known number of clocks. The share of the copy
bandwidth that these slots allow, and the speed-up over dense, are bounds, as waiting is not counted. The loop over
outliers counts as often as it runs for the preset's lists. Triton must compile, not interpret.
"""

import re
import statistics
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from kvcache_plugins.eval.benchmark import say
from kvcache_plugins.eval.harness import read_states, spread, take_turns, time_call, time_on_gpu
from kvcache_plugins.eval.kernel_check import require_close
from kvcache_plugins.formats.parts import GroupPart, RowPart
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.engine import choose_kernel, load_triton
from kvcache_plugins.packed.cache import makes_packed_cache
from kvcache_plugins.registry import check_cache, create_cache
from kvcache_plugins.transform_coding.calibration import calibrate_transform

from .step import llama, random_model


CACHES = ("gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit", "transform")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Bytes of the copied buffer: on a GPU far more than its cache, so that the copy takes longer than Python's launches
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of an attention: sequences of `context` tokens, `groups` query heads for each key/value head."""

    context: int
    batch_size: int = 1
    num_heads: int = 8
    groups: int = 4
    head_dim: int = 128


def random_states(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw rotated keys, with channels of different size, and values, `[B, H, T, D]`; the same every time."""
    size = (shape.batch_size, shape.num_heads, shape.context, shape.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    head = (1, shape.num_heads, 1, shape.head_dim)
    channel_scale = torch.rand(head, dtype=torch.float32, device=device, generator=generator) * 3
    keys = torch.randn(size, dtype=torch.float32, device=device, generator=generator).mul_(channel_scale)
    positions = torch.arange(shape.context, dtype=torch.int64, device=device)[None]
    turns = LlamaRotaryEmbedding(_config(keys)).to(device)(keys, positions)
    keys, _ = apply_rotary_pos_emb(keys, keys[:, :1], *turns)
    return keys.to(dtype), torch.randn(size, dtype=torch.float32, device=device, generator=generator).to(dtype)


def _config(keys: torch.Tensor) -> LlamaConfig:
    """Make the configuration of a layer with such keys `[B, H, T, D]`."""
    sizes: dict[str, Any] = {"num_attention_heads": keys.shape[1], "num_key_value_heads": keys.shape[1]}
    return LlamaConfig(num_hidden_layers=1, head_dim=keys.shape[3], **sizes)


class Contest:
    """Attentions over the same random states. Each is checked when it is added."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.keys, self.values = random_states(shape, dtype, device)
        heads = shape.num_heads * shape.groups
        query = torch.randn(shape.batch_size, heads, 1, shape.head_dim, dtype=torch.float32, device=device)
        self.query = query.to(dtype)
        # Query heads of a group as rows, so that a key is read once for all of them
        self.packed = self.query.view(shape.batch_size, shape.num_heads, shape.groups, shape.head_dim)
        self.kernel, _ = choose_kernel(self.query)
        self.functions: dict[str, Callable[[], Any]] = {}
        self.num_bytes: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.dense_name = f"dense {str(dtype).removeprefix('torch.')}"
        for kind in (dtype, torch.bfloat16) if dtype == torch.float32 else (dtype,):
            query, keys, values = (tensor.to(kind) for tensor in (self.packed, self.keys, self.values))
            name = f"dense {str(kind).removeprefix('torch.')}"
            self.functions[name] = partial(F.scaled_dot_product_attention, query, keys, values)
            self.num_bytes[name] = keys.nbytes + values.nbytes
        source = torch.empty(_COPY_BYTES.get(device.type, 2**27) // 4, dtype=torch.float32, device=device)
        self.num_bytes["copy"] = 2 * source.nbytes
        self._copy: Callable[[], Any] = partial(torch.empty_like(source).copy_, source)

    def add_backend(self, backend: str) -> None:
        """Add dense attention by one of `BACKENDS`; a `RuntimeError` if it refuses or is wrong."""
        dense = self.functions[self.dense_name]
        name, function = f"{self.dense_name}, {backend}", sdpa_kernel(BACKENDS[backend])(dense)
        self.errors[name] = require_close(name, function(), dense())
        self.functions[name], self.num_bytes[name] = function, self.num_bytes[self.dense_name]

    def add(self, cache_name: str) -> None:
        """Add a cache's attention; a `MismatchError` if plain PyTorch has another result from the same storage."""
        part = compress(cache_name, self.keys, self.values)
        function, expected = (
            partial(attend, query, [part], self.shape.num_heads, None, kernel)
            for query, kernel in ((self.query, self.kernel), (self.query.float(), "torch"))
        )
        error = require_close(f"{cache_name} by the `{self.kernel}` kernel", function(), expected())
        say(f"{cache_name}: relative error {error:.1e} against plain PyTorch")
        self.functions[cache_name], self.errors[cache_name] = function, error
        # Formats in bases are a model's, not the cache's
        own = [each for each in part.formats if each.basis is None] if isinstance(part, RowPart) else []
        tensors = [tensor for each in own for tensor in each.tensors()]
        for side in (part.keys, part.values):
            tensors += [side] if isinstance(side, torch.Tensor) else [each for _, each in side.named_tensors()]
        self.num_bytes[cache_name] = sum(tensor.nbytes for tensor in tensors)

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Time all in turns; return a row for each, the copy last."""
        every = {**self.functions, "copy": self._copy}
        functions = {name: lambda number, each=each: each() for name, each in every.items()}
        whole_calls = take_turns(functions, self._time_call, rounds, warm_up=3)
        if self.device.type != "cuda":
            return self._rows(whole_calls, {})
        return self._rows(take_turns(functions, partial(time_on_gpu, ahead=self._copy), rounds), whole_calls)

    def _time_call(self, function: Callable[[], Any]) -> float:
        # Replace the content of the processor's caches, as other layers of a model do
        self._copy()
        return time_call(function, device=self.device)

    def _rows(
        self, seconds: Mapping[str, Sequence[float]], whole_calls: Mapping[str, Sequence[float]]
    ) -> list[dict[str, Any]]:
        medians = {name: statistics.median(measured) for name, measured in seconds.items()}
        ceiling = self.num_bytes["copy"] / medians["copy"]
        # Fastest of PyTorch's kernels, whichever PyTorch would choose
        dense = min(median for name, median in medians.items() if name.startswith(self.dense_name))
        return [
            {
                "name": name,
                **spread(measured),
                "bytes": self.num_bytes[name],
                "share_of_copy_bandwidth": self.num_bytes[name] / medians[name] / ceiling,
                "speed_against_dense": dense / medians[name],
                **({"relative_error": self.errors[name]} if name in self.errors else {}),
                **({"whole_call_median_s": statistics.median(whole_calls[name])} if name in whole_calls else {}),
            }
            for name, measured in seconds.items()
        ]

    def settings(self, rounds: int) -> dict[str, object]:
        """Return the settings that the rows were measured with."""
        timed = "device time" if self.device.type == "cuda" else "whole calls"
        dtype = str(self.query.dtype).removeprefix("torch.")
        return {**asdict(self.shape), "dtype": dtype, "kernel": self.kernel, "rounds": rounds, "timed": timed}


def compress(
    name: str, keys: torch.Tensor, values: torch.Tensor, model: Any = None, **options: Any
) -> GroupPart | RowPart:
    """Compress all tokens as a layer's prompt; a `ValueError` if some stay exact, as they fill no group."""
    num_tokens, config = keys.shape[2], _config(keys) if model is None else model
    if not makes_packed_cache(name):
        raise ValueError(f"`cache` has to name presets of `GEARCache` or `TransformCodingCache`, but got `{name}`")
    # Sink tokens would stay exact, too
    cache: Any = create_cache(name, config, num_sink_tokens=0, **options)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    layer.commit_prompt()
    num_exact = num_tokens - sum(segment.length for segment in layer.storage.segments)
    if num_exact:
        shortest, group = cache.cache_config.shortest_prompt, cache.cache_config.token_group
        accepted = f"at least {shortest}" if group == 1 else f"a multiple of {group}"
        raise ValueError(f"`context` has to be {accepted} for `{name}`")
    return layer._part(layer.storage.segments[0], None)


# Machine code


def compile_for(kernel: Any, arguments: Mapping[str, Any], capability: int | str, **options: int) -> Any:
    """Compile for a launch with aligned tensors, and for a capability, such as 90, or AMD's, such as `"gfx942"`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type_name(value)
        is_multiple = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if is_multiple and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("hip", capability, 64) if isinstance(capability, str) else GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options=options)


def resources(compiled: Any) -> dict[str, int]:
    """Count registers and bytes of local memory a thread, and bytes of shared memory a program."""
    text = run_tool("cuobjdump", "-res-usage", compiled)
    used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": compiled.metadata.shared}


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kind = "i" if value.dtype.is_signed else "u"
        if value.dtype.is_floating_point:
            kind = "bf" if value.dtype == torch.bfloat16 else "fp"
        return f"*{kind}{8 * value.dtype.itemsize}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def run_tool(tool: str, option: str, compiled: Any) -> str:
    """Run one of the assembler's tools on the machine code of a kernel, and return what it prints."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([path, option, file.name], check=True, capture_output=True, text=True).stdout


_INTEGER = "IMAD IADD LOP SHF SHL SHR LEA ISETP IMNMX VI SEL SGXT PLOP IABS"
# The first that an operation's name begins with
_KINDS = {
    "tensor core": ("HMMA", "IMMA", "HGMMA", "QGMMA"),
    "global memory": ("LDG", "STG", "ATOM", "RED", "UTMA", "CCTL"),
    "shared memory": ("LDS", "STS", "STAS", "DEPBAR", "SYNCS"),
    "local memory": ("LDL", "STL"),
    "shuffle": ("SHFL", "MOVM", "VOTE", "REDUX"),
    "special function": ("MUFU",),
    "conversion": ("I2F", "F2F", "F2I", "I2I", "FRND"),
    "half": ("HFMA2", "HADD2", "HMUL2", "HMNMX2", "HSET"),
    "float": ("FFMA", "FADD", "FMUL", "FMNMX", "FSET", "FSEL", "FCHK"),
    "byte permutation": ("PRMT",),
    "integer": tuple(_INTEGER.split()),
    "barrier": ("BAR", "WARPSYNC"),
    "control": ("BRA", "BSSY", "BSYNC", "EXIT", "NOP", "CALL", "RET", "BREAK", "WARPSYNC", "BMOV"),
}
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<text>(?P<operation>[\w.]+)[^;]*);")
_TARGET = re.compile(r"\(?(\.L_\w+)")


class Loop(NamedTuple):
    """A loop by its first and last instruction."""

    first: int
    last: int

    def holds(self, other: "Loop") -> bool:
        """Return true if the other lies within this one."""
        return self != other and self.first <= other.first and other.last <= self.last


class Listing:
    """The instructions of one kernel in order, read from what `nvdisasm -c` prints."""

    def __init__(self, text: str) -> None:
        self.operations: list[str] = []
        labels: dict[str, int] = {}
        ends: dict[int, int] = {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(self.operations)
            elif instruction := _INSTRUCTION.match(line):
                target = _TARGET.search(instruction["text"]) if instruction["operation"].startswith("BRA") else None
                # Back to a place that was there. Several branches may lead to it: the last of them ends its loop
                if target is not None and target[1] in labels:
                    ends[labels[target[1]]] = len(self.operations)
                self.operations.append(instruction["operation"])
        # A kernel ends in a branch to itself, which fills its last line
        self.loops = [Loop(first, last) for first, last in sorted(ends.items()) if last > first]

    def _with_products(self) -> list[Loop]:
        loops = [loop for loop in self.loops if self.count(loop)["tensor core"]]
        if not loops:
            raise ValueError("the kernel has no loop with products of tensor cores")
        return loops

    def tile_loop(self) -> Loop:
        """Find the loop over tiles: the largest with products that is within no other but the one over chunks."""
        loops = self._with_products()
        inner = [loop for loop in loops if any(each.holds(loop) for each in loops)]
        return max(inner or loops, key=lambda loop: loop.last - loop.first)

    def shortest_loop(self) -> Loop:
        """Find the shortest loop with products: over whole tiles where a kernel has another one for the rest."""
        return min(self._with_products(), key=lambda loop: loop.last - loop.first)

    def loops_within(self, loop: Loop) -> list[Loop]:
        """List the loops right inside of one, in order."""
        inside = [each for each in self.loops if loop.holds(each)]
        return [each for each in inside if not any(other.holds(each) for other in inside)]

    def count(self, loop: Loop, without: Sequence[Loop] = ()) -> Counter[str]:
        """Count instructions of a loop by kind, but for those of other loops."""
        counts: Counter[str] = Counter()
        for place in range(loop.first, loop.last + 1):
            if not any(each.first <= place <= each.last for each in without):
                is_of = self.operations[place].startswith
                counts[next((kind for kind, names in _KINDS.items() if is_of(names)), "other")] += 1
        return counts


# Presets

PRESETS = (
    *("kivi-2bit", "kivi-4bit", "gear-k4v3:value_nbits=4", "gear-k4v3:value_nbits=4,q_group_size=32", "gear-k4v3"),
    *("gear-k4v3:key_nbits=3,value_nbits=2", "gear-k4v3:key_nbits=2,value_nbits=2", "kcvt-4bit", "per-token-2bit"),
    *("per-token-4bit", "gear-l-2bit", "gear-l-4bit", "gear-2bit", "gear-4bit"),
    *("transform-16", "transform", "calibrated-16"),
)
# Channels of a head that the command counts by default, the second of rows alone
HEAD_DIMS = (128, 64)
CONTEXT = 1024
NUM_HEADS = 8
# Words of a model, and tokens of its calibration: enough for all directions of a head, or others are too large for it
_CALIBRATION_TOKENS = 512
# An H200: 132 multiprocessors at 1.8 GHz copy 4.3 TB/s, and issue four warp instructions a clock each
_CLOCKS_A_DENSE_NUMBER = 2 * 132 * 1.8e9 / 4.3e12
_SLOTS, _DENSE_BITS = 4, 16


def compress_random(cache: str, head_dim: int) -> GroupPart | RowPart:
    """Compress the prompt of one layer of random states, of a model with random weights."""
    if not check_cache(cache.partition(":")[0]).options.get("calibration"):
        shape = Shape(context=CONTEXT, num_heads=NUM_HEADS, head_dim=head_dim)
        return compress(cache, *random_states(shape, torch.bfloat16, torch.device("cpu")))
    fields = llama(_CALIBRATION_TOKENS, NUM_HEADS * head_dim, 64, 1, NUM_HEADS, NUM_HEADS, 2 * CONTEXT)
    with torch.random.fork_rng():
        model = random_model(fields, torch.float32)
    calibration = calibrate_transform(model, [torch.randperm(_CALIBRATION_TOKENS, device="cpu")], num_draws=1)
    # A calibration is of the model's own states, and the others would be far larger
    ((keys, values),) = read_states(model, torch.randint(_CALIBRATION_TOKENS, (1, CONTEXT), device="cpu"))
    with torch.inference_mode():
        return compress(cache, keys.bfloat16(), values.bfloat16(), model, calibration=calibration)


def count_attention(part: GroupPart | RowPart, head_dim: int, num_rows: int, capability: int) -> dict[str, Any]:
    """Count warp instructions of decode attention a cached number, and what they allow at best."""
    query = torch.empty(1, NUM_HEADS, num_rows, head_dim, dtype=torch.bfloat16, device="cpu")
    launch: Any = load_triton().prepare_part(query, part, 1.0, packed=True).launch
    compiled = compile_for(launch.kernel, launch.arguments, capability, **launch.options)
    listing = Listing(run_tool("nvdisasm", "-c", compiled))
    if isinstance(part, RowPart):
        # There is another loop, for what is left of a tile
        kinds = listing.count(listing.shortest_loop())
        # Tables of rows, which do not grow, and spare room are left out
        num_bytes = sum(side[:, :, : part.length].nbytes for side in (part.keys, part.values))
    else:
        kinds = _count_tile(listing, part, launch.arguments["BLOCK_E"])
        num_bytes = sum(tensor.nbytes for side in (part.keys, part.values) for _, tensor in side.named_tensors())
    numbers = launch.arguments["BLOCK_T"] * 2 * head_dim / launch.grid[2]
    kinds = Counter({kind: number * launch.options["num_warps"] for kind, number in kinds.items()})
    bits = 8 * num_bytes / (2 * NUM_HEADS * head_dim * part.length)
    instructions = sum(kinds.values()) / numbers
    moved, issue = _CLOCKS_A_DENSE_NUMBER * bits / _DENSE_BITS, instructions / _SLOTS
    return {
        "kernel": "attention",
        "head_dim": head_dim,
        "query_heads": num_rows,
        **resources(compiled),
        "instructions_a_number": instructions,
        "kinds": {kind: number / numbers for kind, number in kinds.most_common()},
        "bits_a_number": bits,
        "share_of_copy_bandwidth": min(1.0, moved / issue),
        "times_dense": _CLOCKS_A_DENSE_NUMBER / max(moved, issue),
    }


def _count_tile(listing: Listing, part: GroupPart, block_entries: int) -> Counter[str]:
    """Count instructions of a tile, those of its outliers as often as the lists of the part make them run."""
    tile_loop = listing.tile_loop()
    inner = listing.loops_within(tile_loop)
    kinds = listing.count(tile_loop, without=inner)
    offsets = [side.outlier_offsets for side in (part.keys, part.values) if side.outlier_offsets is not None]
    for each, loop in zip(offsets, inner, strict=True):
        turns = (each.diff(dim=-1) / block_entries).ceil().mean().item()
        for kind, number in listing.count(loop).items():
            kinds[kind] += number * turns  # type: ignore[assignment]
    return kinds
