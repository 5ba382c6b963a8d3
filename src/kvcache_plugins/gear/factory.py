"""What the registry makes of GEAR's names: the cache, with the class's own options."""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config

from .cache import GEARCache
from .transform.calibrations import AUTO, check_calibrated


def create_gear(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> GEARCache:
    """GEAR: quantized backbone, low rank and outliers"""
    if model is not None:
        get_config(model)
    return GEARCache(model, **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_gear.__signature__ = inspect.signature(GEARCache)  # type: ignore[attr-defined]


def check_gear(*, calibration: object = None, **options: Any) -> None:
    """Raises a `ValueError` for what can be told to be wrong without a model."""
    GEARCache(**options)
    check_calibrated(calibration, options.get("backbone"), options)
    if isinstance(calibration, (str, Path)) and calibration != AUTO and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")
