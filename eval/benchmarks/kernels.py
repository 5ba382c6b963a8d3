"""Decode attention straight from compressed storage, beside dense attention, in one process.

Every attention is checked against plain PyTorch when it joins; nothing is timed on a mismatch. Then all take turns, so
that what disturbs the machine disturbs them alike: medians and quartiles of the time, bytes each has to read, and the
share of the bandwidth that a copy reaches on the same machine. On a GPU the time is the device's own; that of a whole
call, with its launches, stands beside it.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcache_plugins.codecs.parts import CodedPart, CompressedPart
from kvcache_plugins.console.inputs import NumThreadsOption, parse_device
from kvcache_plugins.eval.benchmark import benchmark, say
from kvcache_plugins.eval.harness import spread, take_turns, time_call, time_on_gpu
from kvcache_plugins.eval.rows import Content, Failure, Found, Settings
from kvcache_plugins.gear.kernel_check import require_close
from kvcache_plugins.gear.transform.config import TransformConfig
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.layers.static_layer import StaticLayer
from kvcache_plugins.models.reference_model import parse_dtype
from kvcache_plugins.registry import check_caches, create_cache, describe_caches


CACHES = ("gear-2bit", "gear-l-2bit", "kivi-2bit", "gear-4bit", "kcvt-4bit", "gear-t25")
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Bytes of the buffer that is copied; a GPU's is far beyond its cache and busies it for longer than Python needs
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
    """Keys, whose channels differ in size as a model's do, and values, `[B, H, T, D]`; always the same ones."""
    size = (shape.batch_size, shape.num_heads, shape.context, shape.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    channel_scale = torch.rand(1, shape.num_heads, 1, shape.head_dim, device=device, generator=generator) * 3
    keys = torch.randn(size, device=device, generator=generator).mul_(channel_scale)
    return keys.to(dtype), torch.randn(size, device=device, generator=generator).to(dtype)


class Contest:
    """Attentions over the same random states. Each is checked when it joins."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.keys, self.values = random_states(shape, dtype, device)
        heads = shape.num_heads * shape.groups
        self.query = torch.randn(shape.batch_size, heads, 1, shape.head_dim, device=device).to(dtype)
        # Query heads of a group as rows: every key is then read once for all of them
        self.packed = self.query.view(shape.batch_size, shape.num_heads, shape.groups, shape.head_dim)
        self.kernel, _ = choose_kernel(self.query)
        self.functions: dict[str, Callable[[], Any]] = {}
        self.num_bytes: dict[str, int] = {}
        self.errors: dict[str, float] = {}
        self.dense_name = f"dense {str(dtype).removeprefix('torch.')}"
        self._add_dense(self.dense_name, dtype)
        if dtype == torch.float32:
            self._add_dense("dense bfloat16", torch.bfloat16)
        source = torch.empty(_COPY_BYTES.get(device.type, 2**27) // 4, device=device)
        self.num_bytes["copy"] = 2 * source.nbytes
        self._copy: Callable[[], Any] = partial(torch.empty_like(source).copy_, source)

    def _add_dense(self, name: str, dtype: torch.dtype) -> None:
        query, keys, values = (tensor.to(dtype) for tensor in (self.packed, self.keys, self.values))
        self.functions[name] = partial(F.scaled_dot_product_attention, query, keys, values)
        self.num_bytes[name] = keys.nbytes + values.nbytes

    def add_backend(self, backend: str) -> None:
        """
        Adds dense attention by one of PyTorch's kernels, a key of `BACKENDS`, beside the one that it picks. One that
        refuses the dtype, the shape or the device, or is wrong, raises a `RuntimeError`.
        """
        dense = self.functions[self.dense_name]
        name, function = f"{self.dense_name}, {backend}", sdpa_kernel(BACKENDS[backend])(dense)
        self.errors[name] = require_close(name, function(), dense())
        self.functions[name], self.num_bytes[name] = function, self.num_bytes[self.dense_name]

    def add(self, cache_name: str) -> None:
        """Adds a cache's attention; a `MismatchError` if plain PyTorch computes another from the same storage."""
        part = _compressed_part(cache_name, self.keys, self.values)
        function, expected = (
            partial(attend, query, [part], self.shape.num_heads, None, kernel)
            for query, kernel in ((self.query, self.kernel), (self.query.float(), "torch"))
        )
        error = require_close(f"{cache_name} by the `{self.kernel}` kernel", function(), expected())
        say(f"{cache_name}: relative error {error:.1e} against plain PyTorch")
        self.functions[cache_name], self.errors[cache_name] = function, error
        tensors = [*part.codec.tensors()] if isinstance(part, CodedPart) else []
        for side in (part.keys, part.values):
            tensors += [side] if isinstance(side, torch.Tensor) else [each for _, each in side.named_tensors()]
        self.num_bytes[cache_name] = sum(tensor.nbytes for tensor in tensors)

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Times all in turns; one row each, a copy last."""
        every = {**self.functions, "copy": self._copy}
        functions = {name: lambda number, each=each: each() for name, each in every.items()}
        whole_calls = take_turns(functions, self._time_call, rounds, warm_up=3)
        if self.device.type != "cuda":
            return self._rows(whole_calls, {})
        return self._rows(take_turns(functions, partial(time_on_gpu, ahead=self._copy), rounds), whole_calls)

    def _time_call(self, function: Callable[[], Any]) -> float:
        # Whoever comes first would find its states in no cache, and all others theirs: a model's other layers have
        # emptied caches before each
        self._copy()
        return time_call(function, device=self.device)

    def _rows(
        self, seconds: Mapping[str, Sequence[float]], whole_calls: Mapping[str, Sequence[float]]
    ) -> list[dict[str, Any]]:
        medians = {name: statistics.median(measured) for name, measured in seconds.items()}
        ceiling = self.num_bytes["copy"] / medians["copy"]
        # The fastest of PyTorch's kernels, whichever it picks by itself
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
        """Returns the settings that the rows were measured with."""
        timed = "device time" if self.device.type == "cuda" else "whole calls"
        dtype = str(self.query.dtype).removeprefix("torch.")
        return {**asdict(self.shape), "dtype": dtype, "kernel": self.kernel, "rounds": rounds, "timed": timed}


def _compressed_part(name: str, keys: torch.Tensor, values: torch.Tensor) -> CompressedPart | CodedPart:
    """All tokens as one prompt of a GEAR layer; those beyond a whole number of groups would stay exact."""
    num_tokens = keys.shape[2]
    if not str(describe_caches(name.partition(":")[0])[0].factory).endswith(":GEARCache"):
        raise ValueError(f"`cache` has to name presets of GEAR, but got `{name}`")
    # Layers that stand still, on GPUs, keep some of the newest tokens exact: those are more, then
    for _ in range(2):
        # Sink tokens would stay exact, too
        cache: Any = create_cache(name, num_sink_tokens=0)
        cache.update(keys, values, 0)
        layer = cache.layers[0]
        layer.settle_prompt()
        num_exact = num_tokens - sum(block.length for block in layer.blocks)
        if num_exact == 0 or not isinstance(layer, StaticLayer):
            break
        keys, values = (torch.cat([each, each[:, :, :num_exact]], dim=2) for each in (keys, values))
    if num_exact:
        shortest = cache.gear_config.shortest_prompt
        is_coded = isinstance(cache.gear_config, TransformConfig)
        accepted = f"at least {shortest}" if is_coded else f"a multiple of {shortest}"
        raise ValueError(f"`context` has to be {accepted} for `{name}`")
    (block,) = layer.blocks
    return block.part(layer.codec, None, None)


@benchmark("kernels", "Attention over {batch_size} x {context} tokens, {dtype}, `{kernel}` kernels, {timed}")
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
) -> Iterator[Found]:
    """Time decode attention alone. From compressed storage, dense, and a copy, taking turns; checked first.

    \b
    Examples:
        kvcache-plugins bench kernels
        kvcache-plugins bench kernels --device cuda --dtype bfloat16 --batch-size 16 --context 32768 --out kernels.json
    """
    place = parse_device(device)
    shape = Shape(context=context, batch_size=batch_size, num_heads=num_heads, groups=groups, head_dim=head_dim)
    kind = parse_dtype(dtype)
    caches = check_caches(cache or CACHES)
    contest = Contest(shape, kind, place)
    for backend in BACKENDS if place.type == "cuda" else ():
        try:
            contest.add_backend(backend)
        except RuntimeError as error:
            yield Failure(backend, str(error).splitlines()[0])
    for name in caches:
        contest.add(name)
    say(f"{rounds} rounds, in which each is timed once")
    yield Settings(contest.settings(rounds))
    yield Content(device=place)
    yield from contest.run(rounds)
