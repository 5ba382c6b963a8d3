"""Compressed caches for many requests at once: Transformers' continuous batching over coded rows."""

try:
    from .context import CompressedBatching, compressed_batching
except ImportError as error:
    raise ImportError("`compressed_batching` needs the paged cache of Transformers 5.23 or newer") from error


__all__ = ["CompressedBatching", "compressed_batching"]
