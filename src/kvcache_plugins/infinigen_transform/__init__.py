"""InfiniGen over transform-coded rows: a composition of two methods that do not depend on each other."""

from typing import TYPE_CHECKING

from kvcache_plugins.lazy_imports import lazy_attributes
from kvcache_plugins.registry import register_cache


if TYPE_CHECKING:
    from .cache import InfiniGenTransformCache


__all__ = ["InfiniGenTransformCache"]

__getattr__, __dir__ = lazy_attributes(
    __name__, {"InfiniGenTransformCache": "kvcache_plugins.infinigen_transform.cache:InfiniGenTransformCache"}
)

register_cache(
    "infinigen-transform",
    "kvcache_plugins.infinigen_transform.cache:InfiniGenTransformCache",
    check="kvcache_plugins.infinigen_transform.cache:check_options",
    summary="InfiniGen with transform-coded keys and values",
)
