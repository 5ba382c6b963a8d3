"""Transform coding: rows of bytes for tokens, with more bits for channels of more energy."""

from functools import partial
from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .block_codec import BlockCodec
    from .cache import TransformCodingCache
    from .calibration import TransformCalibration, calibrate_transform


__all__ = ["BlockCodec", "TransformCalibration", "TransformCodingCache", "calibrate_transform"]

_CACHE = "kvcache_plugins.transform_coding.cache:TransformCodingCache"
_CHECK = "kvcache_plugins.transform_coding.cache:check_options"
_CALIBRATION = "kvcache_plugins.transform_coding.calibration"
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "BlockCodec": "kvcache_plugins.transform_coding.block_codec:BlockCodec",
        "TransformCodingCache": _CACHE,
        "TransformCalibration": f"{_CALIBRATION}:TransformCalibration",
        "calibrate_transform": f"{_CALIBRATION}:calibrate_transform",
    },
)

# Presets for which 128 would take more bytes while decoding than eight or twenty exact tokens in place of recent rows
_FEWER_RECENT = 80
# A preset's number is the largest percentage of a 16-bit cache that it takes after 1024 tokens in bfloat16 with head
# dimension 64. All bytes count but those of a calibration, which all caches of a model share. Spare bytes go to exact
# tokens. Here are the bits of calibrated presets
_CALIBRATED = {12: 1.59, 16: 2.23, 20: 2.87, 28: 4.15}


_register = partial(register_cache, factory=_CACHE, check=_CHECK)
_register("transform", summary="Transform coding, 25 % of 16 bits")
_register(
    "transform-16",
    summary="Transform coding, 16 % of 16 bits",
    key_nbits=2.375,
    value_nbits=2.0,
    recent_length=_FEWER_RECENT,
)
_register("transform-22", summary="Transform coding, 22 % of 16 bits", key_nbits=3.25, value_nbits=3.0)
_register(
    "transform-30",
    summary="Transform coding, 30 % of 16 bits",
    key_nbits=4.625,
    value_nbits=4.125,
    recent_length=_FEWER_RECENT,
)
for _percent, _nbits in _CALIBRATED.items():
    _register(
        f"calibrated-{_percent}",
        summary=f"Transform coding in calibrated bases, {_percent} % of 16 bits",
        nbits=_nbits,
        calibration="auto",
        recent_length=_FEWER_RECENT,
    )
