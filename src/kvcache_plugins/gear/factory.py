"""What the registry makes of GEAR's names: the cache, with the class's own options."""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.registry import get_config

from .cache import GEARCache
from .forms import is_default
from .transform.calibrations import AUTO, check_calibrated
from .transform.config import BACKBONE


def create_gear(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> GEARCache:
    """GEAR: transform coding, or a quantized backbone with low rank and outliers"""
    if model is not None:
        get_config(model)
    return GEARCache(model, **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_gear.__signature__ = inspect.signature(GEARCache)  # type: ignore[attr-defined]


def check_gear(*, calibration: object = None, **options: Any) -> None:
    """Raises a `ValueError` for what can be told to be wrong without a model."""
    GEARCache(**options)
    backbone = options.pop("backbone", None)
    check_calibrated(calibration, BACKBONE if is_default(backbone, options) else backbone, options)
    if isinstance(calibration, (str, Path)) and calibration != AUTO and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")
