"""Transform coding: every token a row of bytes, with bits where channels have energy."""

from typing import TYPE_CHECKING, Any

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import TransformCodingCache
    from .calibration import TransformCalibration, calibrate_transform


__all__ = ["TransformCalibration", "TransformCodingCache", "calibrate_transform"]

_CACHE = "kvcache_plugins.transform_coding.cache:TransformCodingCache"
_CHECK = "kvcache_plugins.transform_coding.cache:check_options"
_CALIBRATION = "kvcache_plugins.transform_coding.calibration"
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "TransformCodingCache": _CACHE,
        "TransformCalibration": f"{_CALIBRATION}:TransformCalibration",
        "calibrate_transform": f"{_CALIBRATION}:calibrate_transform",
    },
)

# Where 128 would take more bytes while decoding than eight or twenty exact tokens in the place of recent rows do
_FEWER_RECENT: dict[str, Any] = {"recent_length": 80}
# A preset's number is the largest percentage of a 16-bit cache that it takes after 1024 tokens in bfloat16 with head
# dimension 64, all that it holds included, but bases and means of a calibration, which all caches of a model share.
# Bytes that are left below it go to exact tokens.
_FITTED: dict[int, dict[str, Any]] = {
    16: {"key_nbits": 2.375, "value_nbits": 2.0, **_FEWER_RECENT},
    22: {"key_nbits": 3.25, "value_nbits": 3.0},
    30: {"key_nbits": 4.625, "value_nbits": 4.125, **_FEWER_RECENT},
}
_CALIBRATED = {12: 1.59, 16: 2.23, 20: 2.87, 28: 4.15}

register_cache("transform", _CACHE, check=_CHECK, summary="Transform coding, 25 % of 16 bits")
for _percent, _bits in _FITTED.items():
    register_cache(
        f"transform-{_percent}",
        _CACHE,
        check=_CHECK,
        summary=f"Transform coding, {_percent} % of 16 bits",
        **_bits,
    )
for _percent, _nbits in _CALIBRATED.items():
    register_cache(
        f"calibrated-{_percent}",
        _CACHE,
        check=_CHECK,
        summary=f"Transform coding in calibrated bases, {_percent} % of 16 bits",
        nbits=_nbits,
        calibration="auto",
        **_FEWER_RECENT,
    )
