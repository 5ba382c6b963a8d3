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
# Where 128 would take more bytes while decoding than eight or twenty exact tokens in the place of recent rows do
_FEWER_RECENT = {"recent_length": 80}
# Transform-coded: at most so many percent of 16 bits, after 1024 tokens in bfloat16 with head dimension 64, all that
# is held included; of calibrated presets bases and means of the model aside, which all caches share. What that leaves
# is for exact tokens, worth the more the less the others err. `quantizer="trellis"` is an option of all of them.
_OF_PROMPTS: dict[int, dict[str, Any]] = {
    16: {"key_nbits": 2.375, "value_nbits": 2.0, **_FEWER_RECENT},
    22: {"key_nbits": 3.25, "value_nbits": 3.0},
    25: {},
    30: {"key_nbits": 4.625, "value_nbits": 4.125, **_FEWER_RECENT},
}
_CALIBRATED = {12: 1.59, 16: 2.23, 20: 2.87, 28: 4.15}
# Every preset: what it stands for, and in a line what that is
_PRESETS: dict[str, tuple[dict[str, Any], str]] = {
    # What `GEARCache()` is
    "gear": ({}, "The default: gear-t25, in calibrated bases if you have made them"),
    **{
        f"gear-t{percent}": ({"backbone": "transform", **bits}, f"Transform-coded, one by one: {percent} % of 16 bits")
        for percent, bits in _OF_PROMPTS.items()
    },
    **{
        f"gear-c{percent}": (
            {"backbone": "transform", "nbits": nbits, "calibration": "auto", **_FEWER_RECENT},
            f"Transform-coded in calibrated bases: {percent} % of 16 bits",
        )
        for percent, nbits in _CALIBRATED.items()
    },
    # At equal bytes bits are worth more than a low rank and outliers, once sink tokens are exact and values rotated,
    # on every model and text tried
    "gear-k4v3": (
        {"nbits": 4, "value_nbits": 3, "backbone": "kivi", "num_sink_tokens": 4, "rotate_values": True, **_PLAIN},
        "Keys in 4 bits, rotated values in 3, sink tokens exact",
    ),
    "kcvt-4bit": ({"nbits": 4, "backbone": "kcvt", **_PLAIN}, "KCVT grouping alone"),
}
for _nbits in (4, 2):
    _bits = {"nbits": _nbits}
    _PRESETS |= {
        f"gear-{_nbits}bit": (_bits, "GEAR: quantized backbone, low rank and outliers"),
        f"gear-l-{_nbits}bit": ({**_bits, "sparsity": 0.0}, "GEAR without outliers"),
        f"kivi-{_nbits}bit": ({**_bits, "backbone": "kivi", **_PLAIN}, "KIVI's grouping alone"),
        f"per-token-{_nbits}bit": ({**_bits, "backbone": "per-token", **_PLAIN}, "Per-token grouping alone (FlexGen)"),
    }
for _key_nbits, _value_nbits in ((4, 4), (4, 3), (4, 2), (2, 2)):
    _PRESETS[f"kvarn-k{_key_nbits}v{_value_nbits}"] = (
        {
            **{"backbone": "kvarn", "key_nbits": _key_nbits, "value_nbits": _value_nbits, **_PLAIN},
            **{"q_group_size": 128, "residual_length": 128},
        },
        f"KVarN: rotated, variances of tiles normalized, keys in {_key_nbits} bits, values in {_value_nbits}",
    )
for _name, (_options, _summary) in _PRESETS.items():
    register_cache(_name, _CACHE, check=_CHECK, summary=_summary, **_options)
