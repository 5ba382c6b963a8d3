"""Baselines that other methods are measured against: H2O, which drops tokens for good."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config, register_cache

from .h2o import H2OCache


__all__ = ["H2OCache"]


def create_h2o(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> H2OCache:
    """H2O: heavy hitters and newest tokens, the others dropped"""
    return H2OCache(get_config(model), **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_h2o.__signature__ = inspect.signature(H2OCache)  # type: ignore[attr-defined]

register_cache("h2o", create_h2o)
