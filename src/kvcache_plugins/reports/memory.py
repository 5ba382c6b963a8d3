"""Memory of a cache: bytes summed over its tensors, ratios to other caches, and a report as text or HTML.

The HTML has plain elements alone, without styles, scripts or other files, so that every notebook viewer shows it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.layers.lazy_layer import LazyLayer
from kvcache_plugins.layers.step_plan import DroppedOnCopy


# Entry of `stats()`: a counter, or for a chosen cache a measurement
StatValue = int | float | str | Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """
    Bytes of a cache.

    Attributes:
        parts (`dict[str, int]`): bytes by category (`codes`, `scales`, `low_rank`, `outliers`, `residual`, `spare`,
            `dense`, ...).
        devices (`dict[str, int]`): bytes by device.
        dense_bytes (`int`): bytes of a `DynamicCache` with the same tokens in the same dtype.
        num_values (`int`): number of key and value elements of these tokens.
        shared (`dict[str, int]`, *optional*): bytes by name (`calibration`) that all caches of a model share, each
            counted once. `kv_percent_with_shared` includes them, all other numbers do not.
    """

    parts: dict[str, int]
    devices: dict[str, int]
    dense_bytes: int
    num_values: int
    shared: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes stored, including metadata, buffers and spare capacity."""
        return sum(self.parts.values())

    @property
    def compression_ratio(self) -> float:
        """Ratio of a `DynamicCache`'s bytes, in the same dtype, to these; 1.0 for an empty cache."""
        return self.dense_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def kv_percent(self) -> float:
        """Bytes stored in percent of a cache at 16 bits a value, the papers' measure (a float32 cache has 200)."""
        return 100 * self.total_bytes / (2 * self.num_values) if self.num_values else 0.0

    @property
    def kv_percent_with_shared(self) -> float:
        """`kv_percent` with shared tensors, as for the only cache of a model."""
        held = self.total_bytes + sum(self.shared.values())
        return 100 * held / (2 * self.num_values) if self.num_values else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits stored for a key or value element."""
        return 8 * self.total_bytes / self.num_values if self.num_values else 0.0

    def __str__(self) -> str:
        """Show the size and each category's share of it; exact tokens are `residual` or `dense`."""
        whole = f"{self.total_bytes / 1e6:.1f} MB, {self.kv_percent:.1f} % of a cache at 16 bits"
        if not self.num_values:
            return whole
        shares = {part: 50 * number / self.num_values for part, number in self.parts.items()}
        largest_first = sorted(shares.items(), key=lambda item: -item[1])
        return f"{whole}: {', '.join(f'{part} {share:.1f} %' for part, share in largest_first)}"

    def _repr_html_(self) -> str:
        return render_memory("MemoryReport", self)


def measure_memory(cache: Cache | Sequence[Cache]) -> MemoryReport:
    """
    Measure one or several caches of this project, of Transformers or of a third party.

    A `LazyLayer` names the categories of its tensors. In any other layer every reachable tensor counts as `dense`, or
    as `quantized` if the layer quantizes. Tensors that several of the caches share (see `GEARCache.fork`) count once.
    """
    caches = [cache] if isinstance(cache, Cache) else cache
    parts: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    dense_bytes = num_values = 0
    shared: Counter[str] = Counter()
    seen: set[tuple[torch.device, int, int]] = set()

    def is_new(tensor: torch.Tensor) -> bool:
        before = len(seen)
        seen.add((tensor.device, tensor.data_ptr(), tensor.nbytes))
        return len(seen) > before

    for layer in (layer for each in caches for layer in each.layers):
        named = list(layer.named_tensors() if isinstance(layer, LazyLayer) else _tensors_of_other_layer(layer))
        for part, tensor in named:
            if len(caches) > 1 and not tensor.is_meta and not is_new(tensor):
                continue
            parts[part] += tensor.nbytes
            devices[str(tensor.device)] += tensor.nbytes
        for part, tensor in layer.shared_tensors() if isinstance(layer, LazyLayer) else ():
            if is_new(tensor):
                shared[part] += tensor.nbytes
        layer_values, itemsize = _dense_equivalent(layer, named)
        num_values += layer_values
        dense_bytes += layer_values * itemsize
    return MemoryReport(
        parts=dict(parts), devices=dict(devices), dense_bytes=dense_bytes, num_values=num_values, shared=dict(shared)
    )


class ReportingMixin:
    """Mixin that adds `memory()` and `stats()` to a cache of Transformers."""

    def memory(self) -> MemoryReport:
        """Measure the cache's memory."""
        return measure_memory(self)  # type: ignore[arg-type]

    def stats(self) -> Mapping[str, StatValue]:
        """Return counters that show whether the cache was used."""
        layers: Sequence[object] = self.layers  # type: ignore[attr-defined]
        num_quantized = sum(bool(_quantized_sides(layer)) for layer in layers)
        return {"num_layers": len(layers), "tokens_cached": self._num_tokens(), "layers_quantized": num_quantized}

    def _num_tokens(self) -> int:
        layers: Sequence[object] = self.layers  # type: ignore[attr-defined]
        return max((layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)), default=0)

    def __repr__(self) -> str:
        memory = self.memory()
        held = f"{self._num_tokens()} tokens, {_show(memory.total_bytes)}, {memory.kv_percent:.1f} % of 16 bits"
        if memory.shared:
            held += f", and {_show(sum(memory.shared.values()))} that all caches of the model share"
        return f"{type(self).__name__}({held if memory.total_bytes else 'empty'})"

    def _repr_html_(self) -> str:
        return render_memory(type(self).__name__, self.memory(), self.stats())


def _show(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 10**6 else f"{num_bytes / 1e3:.1f} kB"


def add_stats(layers: Sequence[object], make_layer: Callable[[int], LazyLayer]) -> dict[str, int]:
    """
    Sum the counters of all lazy layers, or return those of a new layer if there is none. `tokens_cached` is the
    maximum.
    """
    own = [layer for layer in layers if isinstance(layer, LazyLayer)]
    total: Counter[str] = Counter()
    for layer in own or [make_layer(0)]:
        total.update(layer.stats())
    longest = max((layer.get_seq_length() for layer in own), default=0)
    return {"num_layers": len(layers), **total, "tokens_cached": longest}


# Objects that a cache refers to and does not hold: the model, plans with their scratch memory, and values without data
_NOT_HELD = (torch.nn.Module, DroppedOnCopy, type, str, bytes, int, float, complex, torch.dtype, torch.device)


def reachable_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor with data that `value` refers to, once each, but for those of modules and plans."""
    # Kept alive, so that no other object can get the same id
    seen: dict[int, object] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or id(item) in seen or isinstance(item, _NOT_HELD):
            continue
        seen[id(item)] = item
        # A tensor subclass refers to the plain tensors that hold its data
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            yield item  # type: ignore[misc]
        if isinstance(item, Mapping):
            stack.extend([*item.keys(), *item.values()])
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(item)
        else:
            stack.extend(cell.cell_contents for cell in getattr(item, "__closure__", None) or ())
            stack.extend(getattr(item, name, None) for name in ("__self__", "__dict__"))
            slots = (vars(cls).get("__slots__", ()) for cls in type(item).__mro__)
            names = {name for own in slots for name in ([own] if isinstance(own, str) else own)}
            stack.extend(getattr(item, name, None) for name in names - {"__dict__", "__weakref__"})


def _quantized_sides(layer: object) -> list[object]:
    """Return the quantized keys and values of a `QuantizedLayer` of Transformers, as far as it has any."""
    sides = [getattr(layer, name, None) for name in ("_quantized_keys", "_quantized_values")]
    return [each for each in sides if each is not None]


def _tensors_of_other_layer(layer: object) -> Iterator[tuple[str, torch.Tensor]]:
    quantized = {id(tensor) for tensor in reachable_tensors(_quantized_sides(layer))}
    for tensor in reachable_tensors(layer):
        yield ("quantized" if id(tensor) in quantized else "dense"), tensor


def _dense_equivalent(layer: object, named: list[tuple[str, torch.Tensor]]) -> tuple[int, int]:
    """Return the number of elements that a dense layer would hold, and the bytes of an element."""
    if isinstance(layer, LazyLayer):
        return (layer.num_values(), layer.dtype.itemsize) if layer.is_initialized else (0, 0)
    quantized = _quantized_sides(layer)
    if quantized:
        assert isinstance(layer, CacheLayerMixin) and layer.keys is not None, "it has a buffer of exact tokens"
        # Such a layer has no `dtype` since Transformers 5.24
        return sum(map(_elements_per_token, quantized)) * layer.get_seq_length(), layer.keys.dtype.itemsize
    stored = [tensor for _, tensor in named if tensor.is_floating_point()]
    return sum(tensor.numel() for tensor in stored), (stored[0].element_size() if stored else 0)


def _elements_per_token(states: object) -> int:
    """Return the elements of a token in quantized states: a tensor (quanto), or one with metadata (hqq, fp8)."""
    tensor, metadata = states if isinstance(states, tuple) else (states, None)
    # `tensor` may be packed, then metadata have the original shape
    shape = metadata["shape"] if isinstance(metadata, dict) else tensor.shape
    return int(shape[0] * shape[1] * shape[3])


def render_memory(title: str, report: MemoryReport, counters: Mapping[str, StatValue] | None = None) -> str:
    """Render a report and `stats()` as HTML, which is well-formed XML too. All names are escaped."""
    held = {part: size for part, size in report.parts.items() if size}
    total = report.total_bytes
    lines = [f"<b>{escape(title)}</b>: holds nothing yet"]
    if held:
        cells = (
            (escape(part), f"{size:,} bytes", f"{100 * size / total:.1f} %")
            for part, size in sorted(held.items(), key=lambda item: -item[1])
        )
        rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in cells)
        lines = [
            f"<b>{escape(title)}</b>: {total / 1e6:.2f} MB, {report.kv_percent:.1f} % of a cache at 16 bits a value; "
            f"dense {report.dense_bytes / 1e6:.2f} MB, {report.compression_ratio:.2f} times as much",
            f"<table>{rows}</table>",
        ]
    by_device = report.devices if held else {}
    sizes = (("devices", by_device), ("shared by all caches", report.shared))
    named = [(name, {key: f"{size / 1e6:.2f} MB" for key, size in own.items()}) for name, own in sizes]
    named.append(("counters", {name: _shown(value) for name, value in (counters or {}).items()}))
    for name, values in named:
        if values:
            shown = ", ".join(f"{escape(key)}&#160;{escape(value)}" for key, value in values.items())
            lines.append(f"<small>{name}: {shown}</small>")
    return "<div>\n" + "\n".join(f"<div>{line}</div>" for line in lines) + "\n</div>"


def _shown(value: StatValue) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_shown(each)}' for key, each in value.items())})"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
