"""What the registry makes of InfiniGen's names: the cache, with the class's own options."""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .cache import InfiniGenCache
from .config import InfiniGenConfig


def create_infinigen(model: PreTrainedModel | PreTrainedConfig | None = None, **options: object) -> InfiniGenCache:
    """InfiniGen: in host memory, important tokens fetched"""
    return InfiniGenCache(model, **options)  # type: ignore[arg-type]


# The options are the class's own, so that a misspelt one is named before anything is built
create_infinigen.__signature__ = inspect.signature(InfiniGenCache)  # type: ignore[attr-defined]


def check_infinigen(*, calibration: object = None, attention_mask: object = None, **options: Any) -> None:
    """Raises a `ValueError` for what can be told to be wrong without a model."""
    InfiniGenConfig(**options)
    if isinstance(calibration, (str, Path)) and not Path(calibration).is_file():
        raise ValueError(f"`calibration` is `{calibration}`, but there is no such file")
