"""What the registry makes of GEAR's names: the cache, with the class's own options."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config

from .cache import GEARCache


def create_gear(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> GEARCache:
    """GEAR: quantized backbone, low rank and outliers"""
    return GEARCache(get_config(model), **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_gear.__signature__ = inspect.signature(GEARCache)  # type: ignore[attr-defined]
