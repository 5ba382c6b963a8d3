"""Transformers' server with caches of the registry: `kvcache-plugins serve`."""

from .server import BatchingOptions, CacheServer


__all__ = ["BatchingOptions", "CacheServer"]
