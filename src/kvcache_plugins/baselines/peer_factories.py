"""What the registry makes of `turboquant-*` and `llamacpp-*`: the caches, with the classes' own options."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config

from .llamacpp import LlamaCppCache
from .turboquant import TurboQuantCache


Model = PreTrainedModel | PreTrainedConfig | None


def create_turboquant(model: Model = None, **options: object) -> TurboQuantCache:
    """TurboQuant: rotated unit vectors rounded to Lloyd-Max codebooks"""
    return TurboQuantCache(get_config(model), **options)  # type: ignore[arg-type]


def create_llamacpp(model: Model = None, **options: object) -> LlamaCppCache:
    """llama.cpp's types of a quantized cache"""
    return LlamaCppCache(get_config(model), **options)  # type: ignore[arg-type]


# The options are the classes' own, so that a misspelt one is named before anything is built
create_turboquant.__signature__ = inspect.signature(TurboQuantCache)  # type: ignore[attr-defined]
create_llamacpp.__signature__ = inspect.signature(LlamaCppCache)  # type: ignore[attr-defined]
