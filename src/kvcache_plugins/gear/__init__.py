"""GEAR: quantized backbone, low rank and outliers."""

from .cache import GEARCache


__all__ = ["GEARCache"]
