"""What the registry makes of `h2o`: the cache, with the class's own options."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config

from .h2o import H2OCache


def create_h2o(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> H2OCache:
    """H2O: heavy hitters and newest tokens, the others dropped"""
    return H2OCache(get_config(model), **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_h2o.__signature__ = inspect.signature(H2OCache)  # type: ignore[attr-defined]
