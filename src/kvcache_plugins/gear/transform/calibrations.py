"""Where the calibrations of models are kept, and which one a cache takes."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint
from kvcache_plugins.models.reference_model import models_folder
from kvcache_plugins.registry import unwrap_model

from .calibration import TransformCalibration


# Takes the model's own, if it was calibrated, and none otherwise
AUTO = "auto"
_DIGITS = 16


def calibration_path(model: PreTrainedModel) -> Path:
    """Where in the user's cache folder a model's calibration is written to."""
    name = f"{_prefix(model.config)}{fingerprint(model)[:_DIGITS]}.safetensors"
    return _folder() / name


def find_calibration(model: PreTrainedModel) -> TransformCalibration | None:
    """The calibration in that folder that was made for a model, in whatever dtype, the newest if there are several."""
    paths = sorted(_folder().glob(f"{_prefix(model.config)}*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(paths):
        calibration = TransformCalibration.read(path)
        if calibration.mismatch(model) is None:
            return calibration
    return None


def _folder() -> Path:
    return models_folder().parent / "calibrations"


def _prefix(config: PreTrainedConfig) -> str:
    return f"gear-{config_fingerprint(config)[:_DIGITS]}-"


def check_calibrated(calibration: object, backbone: str | None, options: dict[str, Any]) -> None:
    """Raises a `ValueError` if a calibration is given with options that it leaves no meaning to."""
    if calibration is None:
        return
    if not isinstance(calibration, (TransformCalibration, str, Path)):
        raise ValueError(
            f'`calibration` has to be a `TransformCalibration`, a file, "{AUTO}" or None but got {calibration!r}'
        )
    if backbone != "transform":
        raise ValueError(f"`calibration` is for the `transform` backbone, but `backbone` is {backbone!r}")
    for name in ("key_nbits", "value_nbits"):
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}` has no meaning with a `calibration`: it shares `nbits` between keys and values"
            )
    if options.get("quantizer") == "trellis":
        raise ValueError(
            '`quantizer="trellis"` cannot be had with a `calibration`, whose `quantizer` has to be "lloyd-max" or None'
        )


def resolve_calibration(
    calibration: TransformCalibration | str | Path | None, model: PreTrainedConfig | torch.nn.Module | None
) -> TransformCalibration | None:
    """
    The calibration that a cache for a model takes.

    Args:
        calibration (`TransformCalibration`, `str` or `Path`, *optional*): it, or its file, or `"auto"`.
        model (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model.

    Raises:
        ValueError: if it is another model's, or cannot be read.
    """
    if calibration is None or (calibration == AUTO and model is None):
        return None
    if model is None:
        raise ValueError("`calibration` needs `config`: the model that it was made for, or its config")
    own = model if isinstance(model, PreTrainedConfig) else unwrap_model(model)
    if isinstance(calibration, TransformCalibration):
        problem = calibration.mismatch(own)
        if problem:
            raise ValueError(f"`calibration` {problem}")
        return calibration
    if calibration != AUTO:
        return TransformCalibration.load(calibration, own)
    # A config cannot tell whose weights they are
    found = None if isinstance(own, PreTrainedConfig) else find_calibration(own)
    if found is not None:
        return found
    warnings.warn(
        "this model has no calibration: its prompts alone say how they are coded, and less is kept at the same bytes; "
        "`kvcache-plugins calibrate --cache gear` makes one",
        stacklevel=4,
    )
    return None
