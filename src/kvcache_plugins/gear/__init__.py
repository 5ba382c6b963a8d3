"""GEAR: quantized backbone, low rank and outliers; and transform coding."""

from typing import TYPE_CHECKING, Any

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import GEARCache
    from .transform.calibration import TransformCalibration, calibrate_transform


__all__ = ["GEARCache", "TransformCalibration", "calibrate_transform"]

_CALIBRATION = "kvcache_plugins.gear.transform.calibration"
__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "GEARCache": "kvcache_plugins.gear.cache:GEARCache",
        "TransformCalibration": f"{_CALIBRATION}:TransformCalibration",
        "calibrate_transform": f"{_CALIBRATION}:calibrate_transform",
    },
)

_CACHE = "kvcache_plugins.gear.cache:GEARCache"
# Made without a model it has checked its options
_CHECK = "kvcache_plugins.gear.cache:check_gear"
_PLAIN: dict[str, Any] = {"rank": 0, "sparsity": 0.0}
for _nbits in (4, 2):
    register_cache(
        f"gear-{_nbits}bit",
        _CACHE,
        check=_CHECK,
        summary="GEAR: quantized backbone, low rank and outliers",
        nbits=_nbits,
    )
    register_cache(
        f"gear-l-{_nbits}bit", _CACHE, check=_CHECK, summary="GEAR without outliers", nbits=_nbits, sparsity=0.0
    )
    register_cache(
        f"kivi-{_nbits}bit",
        _CACHE,
        check=_CHECK,
        summary="KIVI's grouping alone",
        nbits=_nbits,
        backbone="kivi",
        **_PLAIN,
    )
    register_cache(
        f"per-token-{_nbits}bit",
        _CACHE,
        check=_CHECK,
        summary="Per-token grouping alone (FlexGen)",
        nbits=_nbits,
        backbone="per-token",
        **_PLAIN,
    )
# At equal bytes bits are worth more than a low rank and outliers, once sink tokens are exact and values rotated, on
# every model and text tried
_BEYOND: dict[str, Any] = {"backbone": "kivi", "num_sink_tokens": 4, "rotate_values": True, **_PLAIN}
for _key_nbits, _value_nbits in ((4, 4), (4, 3), (3, 2), (2, 2)):
    _bits: dict[str, Any] = {"nbits": _key_nbits}
    if _value_nbits != _key_nbits:
        _bits["value_nbits"] = _value_nbits
    register_cache(
        f"gear-k{_key_nbits}v{_value_nbits}",
        _CACHE,
        check=_CHECK,
        summary=f"Keys in {_key_nbits} bits, rotated values in {_value_nbits}, sink tokens exact",
        **_bits,
        **_BEYOND,
    )
# What `GEARCache()` is
register_cache(
    "gear", _CACHE, check=_CHECK, summary="The default: gear-t25, in calibrated bases if you have made them"
)
register_cache(
    "gear-k4v4-g32",
    _CACHE,
    check=_CHECK,
    summary="As gear-k4v4, in groups of 32: nearest to the dense cache",
    nbits=4,
    q_group_size=32,
    **_BEYOND,
)
# At most so many percent of 16 bits, after 1024 tokens in bfloat16 with head dimension 64, all that is held included.
# What that leaves is for exact tokens, which is worth the more the less the others err. Those of 25 are the default's
_OF_PROMPTS: dict[int, dict[str, Any]] = {
    16: {"key_nbits": 2.375, "value_nbits": 2.0},
    22: {"key_nbits": 3.25, "value_nbits": 3.0, "residual_length": 20},
    25: {"residual_length": 20},
    30: {"key_nbits": 4.625, "value_nbits": 4.125},
}
for _percent, _bits in _OF_PROMPTS.items():
    register_cache(
        f"gear-t{_percent}",
        _CACHE,
        check=_CHECK,
        summary=f"Transform-coded, tokens one by one: {_percent} % of 16 bits",
        backbone="transform",
        **_bits,
    )
_IN_TRELLIS: dict[int, dict[str, Any]] = {
    12: {"key_nbits": 1.75, "value_nbits": 1.375},
    14: {"key_nbits": 2.0, "value_nbits": 1.75},
    **{_percent: _OF_PROMPTS[_percent] for _percent in (16, 22, 25)},
}
for _percent, _bits in _IN_TRELLIS.items():
    register_cache(
        f"gear-t{_percent}-trellis",
        _CACHE,
        check=_CHECK,
        summary=f"Transform-coded in trellis codes: {_percent} % of 16 bits, coded twice as long",
        backbone="transform",
        quantizer="trellis",
        **_bits,
    )
# The same, bases and means of the model aside, which all caches share
for _percent, _mean_nbits in ((12, 1.59), (16, 2.23), (18, 2.55), (20, 2.87), (28, 4.15)):
    register_cache(
        f"gear-c{_percent}",
        _CACHE,
        check=_CHECK,
        summary=f"Transform-coded in calibrated bases: {_percent} % of 16 bits",
        backbone="transform",
        nbits=_mean_nbits,
        calibration="auto",
    )
for _percent, _mean_nbits in ((10, 1.27), (12, 1.59), (16, 2.23)):
    register_cache(
        f"gear-c{_percent}-trellis",
        _CACHE,
        check=_CHECK,
        summary=f"Calibrated bases, in trellis codes: {_percent} % of 16 bits, coded three times as long",
        backbone="transform",
        nbits=_mean_nbits,
        calibration="auto",
        quantizer="trellis",
    )
register_cache("kcvt-4bit", _CACHE, check=_CHECK, summary="KCVT grouping alone", nbits=4, backbone="kcvt", **_PLAIN)
