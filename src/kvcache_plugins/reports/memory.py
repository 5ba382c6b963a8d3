"""The one definition of what a cache holds: bytes, summed from its tensors, and the ratios made of them; and its HTML.

HTML is a stacked bar of parts, ratios and counters: plain elements with inline styles, no script, no style sheet and
no file besides, so that it survives the cleaning that viewers of notebooks do, and where styles are taken away the
table still says everything. Text has the colour of the page and nothing has a background but the bar, so that it can
be read on light and on dark ones. Colours are those of Okabe and Ito, which colour-blind people tell apart; a part
has the same colour in every report.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import cycle
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvcache_plugins.layers.lazy_states import LazyLayer


# What a cache says of itself: counters, and perhaps how it was chosen
StatValue = int | float | str | Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """
    What a cache holds.

    Attributes:
        parts (`dict[str, int]`): bytes per part (`codes`, `scales`, `low_rank`, `outliers`, `residual`, `spare`,
            `dense`, ...).
        devices (`dict[str, int]`): bytes per device.
        dense_bytes (`int`): bytes that `DynamicCache` would hold of the same tokens in the same dtype.
        num_values (`int`): key and value numbers that those tokens have.
        shared (`dict[str, int]`, *optional*): bytes by name of what all caches of a model share, each counted once
            (`calibration`). They are in none of the numbers above, and of those below in `kv_percent_with_shared`
            alone.
    """

    parts: dict[str, int]
    devices: dict[str, int]
    dense_bytes: int
    num_values: int
    shared: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes stored, metadata, buffers and spare capacity included."""
        return sum(self.parts.values())

    @property
    def compression_ratio(self) -> float:
        """How many times smaller than `DynamicCache` in the same dtype; 1.0 for an empty cache."""
        return self.dense_bytes / self.total_bytes if self.total_bytes else 1.0

    @property
    def kv_percent(self) -> float:
        """Percentage of a cache at 16 bits a value, as the papers count (float32 caches are at 200)."""
        return 100 * self.total_bytes / (2 * self.num_values) if self.num_values else 0.0

    @property
    def kv_percent_with_shared(self) -> float:
        """Share of the dense bytes with shared tensors counted too, as if there were no other cache."""
        held = self.total_bytes + sum(self.shared.values())
        return 100 * held / (2 * self.num_values) if self.num_values else 0.0

    @property
    def bits_per_value(self) -> float:
        """Bits stored for every key and value number."""
        return 8 * self.total_bytes / self.num_values if self.num_values else 0.0

    def __str__(self) -> str:
        """The size, and what each part takes of it: exact tokens are `residual` or `dense`."""
        whole = f"{self.total_bytes / 1e6:.1f} MB, {self.kv_percent:.1f} % of a cache at 16 bits"
        if not self.num_values:
            return whole
        shares = {part: 50 * number / self.num_values for part, number in self.parts.items()}
        largest_first = sorted(shares.items(), key=lambda item: -item[1])
        return f"{whole}: {', '.join(f'{part} {share:.1f} %' for part, share in largest_first)}"

    def _repr_html_(self) -> str:
        return self.to_html("MemoryReport")

    def to_html(self, title: str, counters: Mapping[str, StatValue] | None = None) -> str:
        """
        Renders a stacked bar of the parts that hold something, the ratios and the numbers, as notebooks show them,
        behind a title; with counters, as of a cache's `stats()`, if there are any. All names are escaped.
        """
        held = {part: num_bytes for part, num_bytes in self.parts.items() if num_bytes}
        lines = [f"<b>{escape(title)}</b>: holds nothing yet"]
        if held:
            lines = [
                f"<b>{escape(title)}</b>: {self.total_bytes / 1e6:.2f} MB, {self.kv_percent:.1f} % of a cache at 16 "
                f"bits a value; dense {self.dense_bytes / 1e6:.2f} MB, {self.compression_ratio:.2f} times as much",
                _bar_and_table(held),
                _pairs("devices", {name: f"{size / 1e6:.2f} MB" for name, size in self.devices.items()}),
            ]
        if self.shared:
            shared = {name: f"{size / 1e6:.2f} MB" for name, size in self.shared.items()}
            lines.append(_pairs("shared by all caches", shared))
        if counters:
            lines.append(_pairs("counters", {name: _shown(value) for name, value in counters.items()}))
        blocks = "\n".join(f"<div>{line}</div>" for line in lines)
        return f'<div style="color:currentColor;max-width:48em">\n{blocks}\n</div>'


def measure_memory(cache: Cache | Sequence[Cache]) -> MemoryReport:
    """
    Measures what any cache of Transformers holds, of this project, of Transformers or of a third party.

    Layers that extend `LazyLayer` name their parts; of others every reachable tensor is counted, once, as `dense` or,
    where the layer quantizes, as `quantized`. Of several caches together, what they share (see `GEARCache.fork`) is
    counted once.
    """
    caches = [cache] if isinstance(cache, Cache) else cache
    parts: Counter[str] = Counter()
    devices: Counter[str] = Counter()
    dense_bytes = num_values = 0
    shared: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    seen_shared: set[tuple[torch.device, int, int]] = set()
    for layer in (layer for each in caches for layer in each.layers):
        named = list(layer.named_tensors() if isinstance(layer, LazyLayer) else _tensors_of_other_layer(layer))
        for part, tensor in named:
            if len(caches) > 1 and not tensor.is_meta:
                place = tensor.data_ptr(), tensor.nbytes
                if place in seen:
                    continue
                seen.add(place)
            parts[part] += tensor.nbytes
            devices[str(tensor.device)] += tensor.nbytes
        for part, tensor in layer.shared_tensors() if isinstance(layer, LazyLayer) else ():
            region = tensor.device, tensor.data_ptr(), tensor.nbytes
            if region not in seen_shared:
                seen_shared.add(region)
                shared[part] += tensor.nbytes
        layer_values, itemsize = _dense_equivalent(layer, named)
        num_values += layer_values
        dense_bytes += layer_values * itemsize
    return MemoryReport(
        parts=dict(parts), devices=dict(devices), dense_bytes=dense_bytes, num_values=num_values, shared=dict(shared)
    )


class ReportingMixin:
    """Adds `memory()` and `stats()` to a cache of Transformers."""

    def memory(self) -> MemoryReport:
        """Measures all that the cache holds."""
        return measure_memory(self)  # type: ignore[arg-type]

    def stats(self) -> Mapping[str, StatValue]:
        """Counters that show the cache was used."""
        layers: list[CacheLayerMixin] = self.layers  # type: ignore[attr-defined]
        lengths = [layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)]
        quantized = [layer.get_seq_length() for layer in layers if getattr(layer, "_quantized_keys", None) is not None]
        return {
            "num_layers": len(layers),
            "tokens_cached": max(lengths, default=0),
            "layers_quantized": len(quantized),
        }

    def __repr__(self) -> str:
        memory, layers = self.memory(), self.layers  # type: ignore[attr-defined]
        lengths = [layer.get_seq_length() for layer in layers if isinstance(layer, CacheLayerMixin)]
        held = (
            f"{memory.bits_per_value:.2f} bits a value, {max(lengths, default=0)} tokens, {memory.total_bytes} bytes"
        )
        if memory.shared:
            held += f", and {sum(memory.shared.values())} that all caches of the model share"
        return f"{type(self).__name__}({held if memory.total_bytes else 'empty'})"

    def _repr_html_(self) -> str:
        return self.memory().to_html(type(self).__name__, self.stats())


# What may be referred to without being held: the model, and what is no data
_NOT_HELD = (torch.nn.Module, type, str, bytes, int, float, complex, torch.dtype, torch.device)


def reachable_tensors(value: object) -> Iterator[torch.Tensor]:
    """
    Yields every tensor that holds data and can be reached from `value` through attributes, slots, items, closures and
    tensor subclasses, once each; modules are not entered.
    """
    # Kept alive, so that no other object can get the same id
    seen: dict[int, object] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if item is None or id(item) in seen or isinstance(item, _NOT_HELD):
            continue
        seen[id(item)] = item
        # A subclass holds its data in tensors that it refers to
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


def _tensors_of_other_layer(layer: object) -> Iterator[tuple[str, torch.Tensor]]:
    quantized = {
        id(tensor)
        for name in ("_quantized_keys", "_quantized_values")
        for tensor in reachable_tensors(getattr(layer, name, None))
    }
    for tensor in reachable_tensors(layer):
        yield ("quantized" if id(tensor) in quantized else "dense"), tensor


def _dense_equivalent(layer: Any, named: list[tuple[str, torch.Tensor]]) -> tuple[int, int]:
    """Numbers that a dense layer would hold, and bytes a number."""
    if isinstance(layer, LazyLayer):
        return (layer.num_values(), layer.dtype.itemsize) if layer.is_initialized else (0, 0)
    quantized_keys = getattr(layer, "_quantized_keys", None)
    if quantized_keys is not None:
        per_token = sum(map(_quantized_numel_per_token, (quantized_keys, layer._quantized_values)))
        # Not `dtype`, which such a layer has no more since 5.24
        return per_token * layer.get_seq_length(), layer.keys.dtype.itemsize
    stored = [tensor for _, tensor in named if tensor.is_floating_point()]
    return sum(tensor.numel() for tensor in stored), (stored[0].element_size() if stored else 0)


def _quantized_numel_per_token(states: torch.Tensor | tuple[Any, ...]) -> int:
    """Counts numbers a token in what quantized layers store: a tensor (quanto), or one with metadata (others)."""
    shape = states.shape if isinstance(states, torch.Tensor) else states[0].shape
    if isinstance(states, tuple) and isinstance(states[1], dict):
        shape = states[1]["shape"]
    return shape[0] * shape[1] * shape[3]


# Neither black nor white: one of them would be lost on every page
_PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#8C564B", "#7F7F7F")
_BLUE, _SKY, _GREEN, _VERMILION, _PURPLE, _ORANGE, _BROWN, _GREY = _PALETTE
# No two that one cache has are alike
_COLOURS = {
    "codes": _BLUE,
    "quantized": _BLUE,
    "kept": _BLUE,
    "pool": _BLUE,
    "scales": _SKY,
    "low_rank": _GREEN,
    "scoring": _GREEN,
    "outliers": _VERMILION,
    "correction": _VERMILION,
    "residual": _PURPLE,
    "dense": _ORANGE,
    "index": _BROWN,
    "spare": _GREY,
}
# Pages give tables a colour and a font of their own
_TABLE = "color:inherit;font:inherit;background:transparent;border:none;margin:0"
_CELL = "padding:0 1em 0 0;background:transparent;border:none"


def _bar_and_table(held: Mapping[str, int]) -> str:
    """Renders parts with bytes as a bar and a table, the known ones first and in their order, in colours."""
    known = [part for part in _COLOURS if part in held]
    free = [colour for colour in _PALETTE if colour not in {_COLOURS[part] for part in known}] or list(_PALETTE)
    others = zip(sorted(held.keys() - _COLOURS.keys()), cycle(free), strict=False)
    segments, rows = "", ""
    for part, colour in [*((part, _COLOURS[part]) for part in known), *others]:
        name, percent = escape(part), 100 * held[part] / sum(held.values())
        segments += f'<div title="{name}" style="width:{percent:.4f}%;height:1.2em;background-color:{colour}"></div>'
        rows += (
            f'<tr style="background:transparent"><td style="{_CELL};text-align:left"><span style="display:'
            f'inline-block;width:0.8em;height:0.8em;background-color:{colour}"></span> {name}</td>'
            f'<td style="{_CELL};text-align:right">{held[part]:,} bytes</td>'
            f'<td style="{_CELL};text-align:right">{percent:.1f} %</td></tr>'
        )
    bar = f'<div style="display:flex;width:100%;margin:0.4em 0">{segments}</div>'
    return f'{bar}<table style="{_TABLE}">{rows}</table>'


def _pairs(name: str, values: Mapping[str, str]) -> str:
    shown = ", ".join(f"{escape(key)}&#160;{escape(value)}" for key, value in values.items())
    return f"<small>{name}: {shown}</small>"


def _shown(value: float | str | Mapping[str, float]) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_shown(each)}' for key, each in value.items())})"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
