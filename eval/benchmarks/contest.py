"""Attentions over the same random states: each is checked against plain PyTorch when it joins, then all take turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvcache_plugins.codecs.codec import Positions
from kvcache_plugins.codecs.parts import CodedPart, CompressedPart
from kvcache_plugins.eval.harness.timing import spread, time_call, time_on_gpu
from kvcache_plugins.gear.kernel_check import require_close
from kvcache_plugins.gear.transform.config import TransformConfig
from kvcache_plugins.kernels.attention import attend
from kvcache_plugins.kernels.attention import attend as attend_coded
from kvcache_plugins.kernels.engine import choose_kernel
from kvcache_plugins.registry import create_cache


# Its storage is also dequantized as a whole, which is what a cache has to do that hands dense states back
_DEQUANTIZED = "gear-l-2bit"
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
# Bytes of the buffer that is copied; a GPU's is far beyond its cache and busies it for longer than Python needs
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**30}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """
    What is attended to: `batch_size` sequences of `context` tokens, `num_heads` key/value heads of `head_dim` channels
    with `groups` query heads each.
    """

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
    """
    Attentions over the same random states. Each is checked when it joins.

    Args:
        shape (`Shape`): what is attended to.
        dtype (`torch.dtype`): of queries and dense states.
        device (`torch.device`): where.
    """

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
        self._copy = self._make_copy()

    def _add_dense(self, name: str, dtype: torch.dtype) -> None:
        query, keys, values = (tensor.to(dtype) for tensor in (self.packed, self.keys, self.values))
        self.functions[name] = partial(F.scaled_dot_product_attention, query, keys, values)
        self.num_bytes[name] = keys.nbytes + values.nbytes

    def add_backend(self, backend: str) -> None:
        """
        Adds dense attention by one of PyTorch's kernels, a key of `BACKENDS`, beside the one that it picks.

        Raises:
            RuntimeError: if the kernel refuses the dtype, the shape or the device, or is wrong.
        """
        dense = self.functions[self.dense_name]
        name, function = f"{self.dense_name}, {backend}", partial(_attend_by, BACKENDS[backend], dense)
        self.errors[name] = require_close(name, function(), dense())
        self.functions[name], self.num_bytes[name] = function, self.num_bytes[self.dense_name]

    def add(self, cache_name: str) -> None:
        """
        Adds a cache's attention.

        Raises:
            MismatchError: if it is not what plain PyTorch computes from the same storage.
        """
        part = _compressed_part(cache_name, self.keys, self.values)
        function, expected = (
            _attention(query, part, self.shape.num_heads, kernel)
            for query, kernel in ((self.query, self.kernel), (self.query.float(), "torch"))
        )
        error = require_close(f"{cache_name} by the `{self.kernel}` kernel", function(), expected())
        typer.echo(f"{cache_name}: relative error {error:.1e} against plain PyTorch", err=True)
        self.functions[cache_name], self.errors[cache_name] = function, error
        num_bytes = _num_bytes(part)
        self.num_bytes[cache_name] = num_bytes
        if cache_name == _DEQUANTIZED and isinstance(part, CompressedPart):
            name = f"{cache_name}, dequantized first"
            self.functions[name] = partial(_dequantize_then_attend, self.packed, part, self.query.dtype)
            self.num_bytes[name] = num_bytes

    def _make_copy(self) -> Callable[[], Any]:
        source = torch.empty(_COPY_BYTES.get(self.device.type, 2**27) // 4, device=self.device)
        target = torch.empty_like(source)
        self.num_bytes["copy"] = 2 * source.nbytes
        return partial(target.copy_, source)

    def run(self, rounds: int) -> list[dict[str, Any]]:
        """Times all in turns; one row each, a copy last."""
        functions = {**self.functions, "copy": self._copy}
        if self.device.type != "cuda":
            return self._rows(take_turns(functions, rounds, partial(time_call, device=self.device)), {})
        device_seconds = take_turns(functions, rounds, partial(time_on_gpu, ahead=self._copy))
        whole_calls = take_turns(functions, rounds, partial(time_call, device=self.device))
        return self._rows(device_seconds, whole_calls)

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
    # Sink tokens would stay exact, too
    cache: Any = create_cache(name, num_sink_tokens=0)
    is_coded = isinstance(cache.gear_config, TransformConfig)
    cache.update(keys, values, 0)
    layer = cache.layers[0]
    layer.settle_prompt()
    if sum(block.length for block in layer.blocks) != keys.shape[2]:
        shortest = cache.gear_config.shortest_prompt
        accepted = f"at least {shortest}" if is_coded else f"a multiple of {shortest}"
        raise ValueError(f"`context` has to be {accepted} for `{name}`")
    (block,) = layer.blocks
    if is_coded:
        return CodedPart(block.keys, block.values, layer.codec, Positions(block.start), block.length, None)
    return CompressedPart(block.keys, block.values, block.length, None)


def _attention(
    query: torch.Tensor, part: CompressedPart | CodedPart, num_heads: int, kernel: str
) -> Callable[[], torch.Tensor]:
    if isinstance(part, CodedPart):
        return partial(attend_coded, query, [part], num_heads, None, kernel)
    return partial(attend, query, [part], num_heads, None, kernel)


def _num_bytes(part: CompressedPart | CodedPart) -> int:
    if isinstance(part, CodedPart):
        return sum(tensor.nbytes for tensor in (part.keys, part.values, *part.codec.tensors()))
    return sum(tensor.nbytes for side in (part.keys, part.values) for _, tensor in side.named_tensors())


def _dequantize_then_attend(query: torch.Tensor, part: CompressedPart, dtype: torch.dtype) -> torch.Tensor:
    tiles = list(part.tiles())
    keys, values = (torch.cat([getattr(tile, side) for tile in tiles], dim=2) for side in ("keys", "values"))
    return F.scaled_dot_product_attention(query, keys.to(dtype), values.to(dtype))


def _attend_by(backend: SDPBackend, function: Callable[[], torch.Tensor]) -> torch.Tensor:
    with sdpa_kernel(backend):
        return function()


def take_turns(
    functions: Mapping[str, Callable[[], Any]], rounds: int, time_one: Callable[[Callable[[], Any]], float]
) -> dict[str, list[float]]:
    """Seconds of each function, in `rounds` rounds in which each runs once."""
    for function in functions.values():
        for _ in range(3):
            function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(time_one(function))
    return seconds
