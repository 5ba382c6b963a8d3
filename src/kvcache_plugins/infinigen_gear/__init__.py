"""InfiniGen over GEAR's rows: the composition of two methods that know nothing of each other."""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import InfiniGenGEARCache


__all__ = ["InfiniGenGEARCache"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"InfiniGenGEARCache": "kvcache_plugins.infinigen_gear.cache:InfiniGenGEARCache"}
)

register_cache(
    "infinigen-gear",
    "kvcache_plugins.infinigen_gear.cache:InfiniGenGEARCache",
    check="kvcache_plugins.infinigen_gear.cache:check_options",
    summary="InfiniGen with keys and values in codes",
)
