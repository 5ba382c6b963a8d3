"""What the registry makes of `infinigen-gear`: the cache, with its own options and InfiniGen's."""

import inspect
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.infinigen import InfiniGenCache
from kvcache_plugins.infinigen.factory import check_infinigen

from .cache import InfiniGenGEARCache
from .config import CodingConfig


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


def check_infinigen_gear(
    *, key_nbits: int = 4, value_nbits: int = 4, q_group_size: int | None = None, **options: Any
) -> None:
    """Raises a `ValueError` for what can be told to be wrong without a model."""
    CodingConfig(key_nbits=key_nbits, value_nbits=value_nbits, q_group_size=q_group_size)
    check_infinigen(**options)
