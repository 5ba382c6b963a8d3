"""Baselines: H2O, TurboQuant, llama.cpp's types, KVarN, OSCAR, SAW-INT4, and Transformers' own caches by name."""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import CUDA, register_cache


if TYPE_CHECKING:
    from .coded_cache import LlamaCppCache, TurboQuantCache
    from .h2o import H2OCache
    from .kvarn import KVarNCache
    from .oscar import OscarCache
    from .saw_int4 import SawInt4Cache


__all__ = ["H2OCache", "KVarNCache", "LlamaCppCache", "OscarCache", "SawInt4Cache", "TurboQuantCache"]

_H2O = "kvcache_plugins.baselines.h2o:H2OCache"
_KVARN = "kvcache_plugins.baselines.kvarn:KVarNCache"
_OSCAR = "kvcache_plugins.baselines.oscar:OscarCache"
_SAW_INT4 = "kvcache_plugins.baselines.saw_int4:SawInt4Cache"
_LLAMACPP = "kvcache_plugins.baselines.coded_cache:LlamaCppCache"
_TURBOQUANT = "kvcache_plugins.baselines.coded_cache:TurboQuantCache"
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "H2OCache": _H2O,
        "KVarNCache": _KVARN,
        "LlamaCppCache": _LLAMACPP,
        "OscarCache": _OSCAR,
        "SawInt4Cache": _SAW_INT4,
        "TurboQuantCache": _TURBOQUANT,
    },
)

_TRANSFORMERS = "kvcache_plugins.baselines.transformers_caches"
register_cache(
    "h2o",
    _H2O,
    # A cache that is made without a model checks its options
    check=_H2O,
    summary="H2O: heavy hitters and newest tokens, the others dropped",
)
register_cache(
    "dynamic", f"{_TRANSFORMERS}:create_dynamic", summary="Transformers' DynamicCache: dense, the reference"
)
register_cache(
    "offloaded",
    f"{_TRANSFORMERS}:create_offloaded",
    summary="Transformers' DynamicCache with all but one layer kept in CPU memory",
    requires=CUDA,
)
# Axes that measured best on SmolLM2 and WikiText-2. quanto: `axis_key=-1`, keys per channel (perplexity 17.2 against
# 17.6 with Transformers' default 0 at 4 bits, 27 against 202 at 2 bits). hqq: `axis_key=0` at 2 bits (68 against 123),
# the documented 1 at 4 bits, where 0 is no better.
for _nbits in (4, 2):
    register_cache(
        f"quanto-{_nbits}bit",
        f"{_TRANSFORMERS}:create_quanto",
        summary="Transformers' QuantizedCache on optimum-quanto, keys per channel",
        requires="optimum-quanto",
        nbits=_nbits,
    )
_HQQ_SUMMARY = "Transformers' QuantizedCache on hqq"
register_cache("hqq-4bit", f"{_TRANSFORMERS}:create_hqq", summary=_HQQ_SUMMARY, requires="hqq", nbits=4)
register_cache("hqq-2bit", f"{_TRANSFORMERS}:create_hqq", summary=_HQQ_SUMMARY, requires="hqq", nbits=2, axis_key=0)
register_cache(
    "fp8",
    f"{_TRANSFORMERS}:create_fp8",
    summary="Transformers' QuantizedCache, 8-bit floats with one scale a tensor",
    requires="transformers>=5.21",
)
for _nbits in (2, 3, 4):
    register_cache(
        f"turboquant-{_nbits}bit",
        _TURBOQUANT,
        check=_TURBOQUANT,
        summary=f"TurboQuant: rotated unit vectors in {_nbits}-bit Lloyd-Max codes",
        nbits=_nbits,
    )
for _type in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
    register_cache(
        f"llamacpp-{_type}",
        _LLAMACPP,
        check=_LLAMACPP,
        summary=f"llama.cpp's cache type {_type}, rotated as there",
        type=_type,
    )
for _key_nbits, _value_nbits in ((4, 4), (4, 3), (4, 2), (2, 2)):
    register_cache(
        f"kvarn-k{_key_nbits}v{_value_nbits}",
        _KVARN,
        check=_KVARN,
        summary=f"KVarN: normalized tiles, keys in {_key_nbits} bits, values in {_value_nbits}",
        key_nbits=_key_nbits,
        value_nbits=_value_nbits,
    )
register_cache("oscar-2bit", _OSCAR, summary="OSCAR: calibrated rotations, clipped 2-bit codes by token")
register_cache("saw-int4", _SAW_INT4, summary="SAW-INT4: keys rotated by Hadamard blocks, 4-bit codes by token")
