"""Transformers' server with caches of the registry: `kvcache-plugins serve`."""

try:
    from .server import CacheServer
except ModuleNotFoundError as error:
    raise ImportError("`kvcache-plugins serve` knows the servers of Transformers 5.23 and 5.24") from error


__all__ = ["CacheServer"]
