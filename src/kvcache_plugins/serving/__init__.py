"""Transformers' server with caches of the registry: `kvcache-plugins serve`."""

from .server import CacheServer


__all__ = ["CacheServer"]
