"""Compressed caches for many requests at once: Transformers' continuous batching over coded rows."""

from .context import CompressedBatching, compressed_batching


__all__ = ["CompressedBatching", "compressed_batching"]
