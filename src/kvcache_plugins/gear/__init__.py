"""GEAR: quantized backbone, low rank and outliers."""

import inspect
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config, register_cache

from .cache import GEARCache


__all__ = ["GEARCache"]


def create_gear(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> GEARCache:
    """GEAR: quantized backbone, low rank and outliers"""
    return GEARCache(get_config(model), **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_gear.__signature__ = inspect.signature(GEARCache)  # type: ignore[attr-defined]

_PLAIN: dict[str, Any] = {"rank": 0, "sparsity": 0.0}
for _nbits in (4, 2):
    register_cache(f"gear-{_nbits}bit", create_gear, nbits=_nbits)
    register_cache(f"gear-l-{_nbits}bit", create_gear, summary="GEAR without outliers", nbits=_nbits, sparsity=0.0)
    register_cache(
        f"kivi-{_nbits}bit", create_gear, summary="KIVI's grouping alone", nbits=_nbits, backbone="kivi", **_PLAIN
    )
    register_cache(
        f"per-token-{_nbits}bit",
        create_gear,
        summary="Per-token grouping alone (FlexGen)",
        nbits=_nbits,
        backbone="per-token",
        **_PLAIN,
    )
# At equal bytes bits are worth more than a low rank and outliers, once sink tokens are exact and values rotated, on
# every model and text tried: so the short name is one of these
_BEYOND: dict[str, Any] = {"backbone": "kivi", "num_sink_tokens": 4, "rotate_values": True, **_PLAIN}
for _key_nbits, _value_nbits in ((4, 4), (4, 3), (3, 2), (2, 2)):
    _bits: dict[str, Any] = {"nbits": _key_nbits}
    if _value_nbits != _key_nbits:
        _bits["value_nbits"] = _value_nbits
    register_cache(
        f"gear-k{_key_nbits}v{_value_nbits}",
        create_gear,
        summary=f"Keys in {_key_nbits} bits, rotated values in {_value_nbits}, sink tokens exact",
        **_bits,
        **_BEYOND,
    )
register_cache("gear", create_gear, summary="The same as gear-k4v4", nbits=4, **_BEYOND)
register_cache(
    "gear-k4v4-g32",
    create_gear,
    summary="As gear-k4v4, in groups of 32: nearest to the dense cache",
    nbits=4,
    q_group_size=32,
    **_BEYOND,
)
# At most so many percent of 16 bits, after 1024 tokens in bfloat16 with head dimension 64, all that is held included
for _percent, _key_nbits, _value_nbits in ((16, 2.375, 2.0), (22, 3.25, 3.0), (25, 4.0, 3.25), (30, 4.625, 4.125)):
    register_cache(
        f"gear-t{_percent}",
        create_gear,
        summary=f"Transform-coded, tokens one by one: {_percent} % of 16 bits",
        backbone="transform",
        key_nbits=_key_nbits,
        value_nbits=_value_nbits,
    )
register_cache("kcvt-4bit", create_gear, summary="KCVT grouping alone", nbits=4, backbone="kcvt", **_PLAIN)
