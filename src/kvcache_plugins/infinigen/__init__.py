"""InfiniGen: the cache in host memory, and only the tokens that matter fetched."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import register_cache

from .cache import InfiniGenCache
from .calibration import Calibration, calibrate


__all__ = ["Calibration", "InfiniGenCache", "calibrate"]


def create_infinigen(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> InfiniGenCache:
    """InfiniGen: in host memory, important tokens fetched"""
    return InfiniGenCache(model, **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_infinigen.__signature__ = inspect.signature(InfiniGenCache)  # type: ignore[attr-defined]

register_cache("infinigen", create_infinigen)
register_cache(
    "infinigen-paper",
    create_infinigen,
    summary="InfiniGen by the paper's rule and partial keys",
    alpha=4.0,
    partial_ratio=0.3,
    skewing="query-svd",
)
