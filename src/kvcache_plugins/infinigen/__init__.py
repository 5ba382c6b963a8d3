"""InfiniGen: the cache in host memory, and only the tokens that matter fetched."""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import InfiniGenCache
    from .calibration import Calibration, calibrate


__all__ = ["Calibration", "InfiniGenCache", "calibrate"]

__getattr__, __dir__ = lazy_attributes(
    __name__,
    {
        "Calibration": "kvcache_plugins.infinigen.calibration:Calibration",
        "InfiniGenCache": "kvcache_plugins.infinigen.cache:InfiniGenCache",
        "calibrate": "kvcache_plugins.infinigen.calibration:calibrate",
    },
)

_CACHE = "kvcache_plugins.infinigen.cache:InfiniGenCache"
_CHECK = "kvcache_plugins.infinigen.config:check_options"

register_cache("infinigen", _CACHE, check=_CHECK, summary="InfiniGen: in host memory, important tokens fetched")
register_cache(
    "infinigen-paper",
    _CACHE,
    check=_CHECK,
    summary="InfiniGen by the paper's rule and partial keys",
    alpha=4.0,
    partial_ratio=0.3,
    skewing="query-svd",
    # The paper speculates on every device; the default does not if the pool is in the model's own memory
    speculate=True,
)
