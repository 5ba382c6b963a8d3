"""Which form a `GEARCache` takes where `backbone` does not say: transform coding, or GEAR's quantized backbone.

The default is the best balance of bytes and KL that was measured. Whoever sets what only a quantized backbone has (its
bits, groups, low rank, outliers) means GEAR as in its paper.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from kvcache_plugins.registry import unwrap_model
from kvcache_plugins.user_warnings import warn_user

from .config import GEARConfig
from .transform.calibration import TransformCalibration
from .transform.calibrations import check_calibrated, find_calibration, resolve_calibration
from .transform.config import BACKBONE, TransformConfig, transform_config


# Both forms have these, so that they do not tell which one is meant
_SHARED = ("residual_length", "num_sink_tokens", "quantizer", "sliding")
_DEFAULT_NBITS = 4
# As `gear-t25` has
_DEFAULT_RESIDUAL_LENGTH = 20

Calibration = TransformCalibration | str | Path | None
Form = tuple[GEARConfig | TransformConfig, TransformCalibration | None]


def is_default(backbone: str | None, options: Mapping[str, object]) -> bool:
    """Whether nothing is set that tells one form from the other; `None` is what was not given."""
    return backbone is None and all(value is None for name, value in options.items() if name not in _SHARED)


def resolve_form(
    backbone: str | None,
    options: dict[str, Any],
    calibration: Calibration,
    model: PreTrainedConfig | torch.nn.Module | None,
) -> Form:
    """
    The config of a cache, and the calibration that it takes.

    Args:
        backbone (`str`, *optional*): as of `GEARCache`.
        options (`dict`): the others of its options by name, `None` where one was not given.
        calibration (`TransformCalibration`, `str` or `Path`, *optional*): as of `GEARCache`.
        model (`PreTrainedConfig` or `PreTrainedModel`, *optional*): the model.

    Raises:
        ValueError: if an option is out of range, or has no meaning in that form.
    """
    by_default = is_default(backbone, options)
    if by_default:
        backbone = BACKBONE
        if options["residual_length"] is None:
            options = {**options, "residual_length": _DEFAULT_RESIDUAL_LENGTH}
    check_calibrated(calibration, backbone, options)
    if backbone != BACKBONE:
        nbits = _DEFAULT_NBITS if options["nbits"] is None else options["nbits"]
        return GEARConfig.from_flat(backbone, {**options, "nbits": nbits}), None
    is_asked_for = not by_default or calibration is not None
    found = resolve_calibration(calibration, model) if is_asked_for else _own_calibration(model)
    return transform_config(options, is_calibrated=found is not None), found


def _own_calibration(model: PreTrainedConfig | torch.nn.Module | None) -> TransformCalibration | None:
    """
    That of the model, if the user has made one; nothing is said if not. Those of this package are for who asks for
    them: a default that is another one for two models would make what is measured of it untrue for all others.
    """
    # A config cannot tell whose weights they are
    if model is None or isinstance(model, PreTrainedConfig):
        return None
    try:
        return find_calibration(unwrap_model(model), is_own=True)
    except ValueError as error:
        warn_user(f"the cache goes without a calibration: {error}")
        return None
