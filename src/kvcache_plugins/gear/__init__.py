"""GEAR: quantized backbone, low-rank correction and sparse outliers."""

from functools import partial
from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import GEARCache


__all__ = ["GEARCache"]

_CACHE = "kvcache_plugins.gear.cache:GEARCache"
__getattr__, __dir__ = lazy_attributes(__name__, {"GEARCache": _CACHE})


# A cache that is made without a model checks its options
_register = partial(register_cache, factory=_CACHE, check=_CACHE)
_register("gear", summary="GEAR, the paper's defaults: 4 bits, low rank and outliers")
# At equal bytes, bits are worth more than a low rank and outliers if sink tokens are exact and values rotated: on
# every model and text that was tried
_register(
    "gear-k4v3",
    summary="Keys in 4 bits, rotated values in 3, sink tokens exact",
    key_nbits=4,
    value_nbits=3,
    backbone="kivi",
    num_sink_tokens=4,
    rotate_values=True,
    rank=0,
    sparsity=0.0,
)
_register("kcvt-4bit", summary="KCVT grouping alone", nbits=4, backbone="kcvt", rank=0, sparsity=0.0)
for _nbits in (4, 2):
    _register(f"gear-{_nbits}bit", summary=f"GEAR at {_nbits} bits: backbone, low rank and outliers", nbits=_nbits)
    _register(f"gear-l-{_nbits}bit", summary="GEAR without outliers", nbits=_nbits, sparsity=0.0)
    _register(
        f"kivi-{_nbits}bit", summary="KIVI's grouping alone", nbits=_nbits, backbone="kivi", rank=0, sparsity=0.0
    )
    _register(
        f"per-token-{_nbits}bit",
        summary="Per-token grouping alone (FlexGen)",
        nbits=_nbits,
        backbone="per-token",
        rank=0,
        sparsity=0.0,
    )
