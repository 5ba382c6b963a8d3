"""GEAR: quantized backbone, low-rank correction and sparse outliers."""

from typing import TYPE_CHECKING, Any

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import GEARCache


__all__ = ["GEARCache"]

_CACHE = "kvcache_plugins.gear.cache:GEARCache"
__getattr__, __dir__ = lazy_attributes(__name__, {"GEARCache": _CACHE})

_PLAIN: dict[str, Any] = {"rank": 0, "sparsity": 0.0}
_PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    "gear": ({}, "GEAR, the paper's defaults: 4 bits, low rank and outliers"),
    # At equal bytes bits are worth more than a low rank and outliers, once sink tokens are exact and values rotated,
    # on every model and text tried
    "gear-k4v3": (
        {
            "key_nbits": 4,
            "value_nbits": 3,
            "backbone": "kivi",
            "num_sink_tokens": 4,
            "rotate_values": True,
            **_PLAIN,
        },
        "Keys in 4 bits, rotated values in 3, sink tokens exact",
    ),
    "kcvt-4bit": ({"nbits": 4, "backbone": "kcvt", **_PLAIN}, "KCVT grouping alone"),
}
for _nbits in (4, 2):
    _bits = {"nbits": _nbits}
    _PRESETS |= {
        f"gear-{_nbits}bit": (_bits, f"GEAR at {_nbits} bits: backbone, low rank and outliers"),
        f"gear-l-{_nbits}bit": ({**_bits, "sparsity": 0.0}, "GEAR without outliers"),
        f"kivi-{_nbits}bit": ({**_bits, "backbone": "kivi", **_PLAIN}, "KIVI's grouping alone"),
        f"per-token-{_nbits}bit": ({**_bits, "backbone": "per-token", **_PLAIN}, "Per-token grouping alone (FlexGen)"),
    }
for _name, (_options, _summary) in _PRESETS.items():
    # A cache that is made without a model has checked its options
    register_cache(_name, _CACHE, check=_CACHE, summary=_summary, **_options)
