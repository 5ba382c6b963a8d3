"""InfiniGen over GEAR's codes: the composition of two methods that know nothing of each other."""

import inspect

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.registry import register_cache

from .cache import InfiniGenGEARCache


__all__ = ["InfiniGenGEARCache"]


def create_infinigen_gear(
    model: PreTrainedModel | PreTrainedConfig | None = None, **options: object
) -> InfiniGenGEARCache:
    """InfiniGen with keys and values in codes"""
    return InfiniGenGEARCache(model, **options)  # type: ignore[arg-type]


def _signature() -> inspect.Signature:
    """The class's own options and InfiniGen's, so that a misspelt one is named before anything is built."""
    own = inspect.signature(InfiniGenGEARCache).parameters.values()
    inherited = inspect.signature(InfiniGenCache).parameters.values()
    named = [parameter for parameter in own if parameter.kind is not parameter.VAR_KEYWORD]
    known = {parameter.name for parameter in named} | InfiniGenGEARCache.excluded_options
    return inspect.Signature([*named, *(parameter for parameter in inherited if parameter.name not in known)])


create_infinigen_gear.__signature__ = _signature()  # type: ignore[attr-defined]

register_cache("infinigen-gear", create_infinigen_gear)
