"""Where the calibrations of models are kept, and which one a cache takes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvcache_plugins.files.atomic import RefusedFile
from kvcache_plugins.gear.config import GEARConfig, TransformConfig
from kvcache_plugins.models.fingerprint import config_fingerprint, fingerprint
from kvcache_plugins.models.reference_model import models_folder
from kvcache_plugins.registry import unwrap_model
from kvcache_plugins.user_warnings import warn_user

from .calibration import TransformCalibration


# Takes the model's own, if it was calibrated, and none otherwise
AUTO = "auto"
_DIGITS = 16
# Those of the models that `load_model` has short names for
_PACKAGED = Path(__file__).resolve().parent / "reference_calibrations"


def calibration_path(model: PreTrainedModel) -> Path:
    """Where in the user's cache folder a model's calibration is written to."""
    name = f"{_prefix(model.config)}{fingerprint(model)[:_DIGITS]}.safetensors"
    return _folder() / name


def find_calibration(model: PreTrainedModel, *, is_own: bool = False) -> TransformCalibration | None:
    """The calibration of a model in whatever dtype: the user's newest or, unless `is_own`, that of this package."""
    return next((each for each in _known(model.config, is_own) if each.mismatch(model) is None), None)


def _known(config: PreTrainedConfig, is_own: bool = False) -> Iterator[TransformCalibration]:
    """Yields calibrations for models of `config`: the user's folder's, the newest first, then this package's."""
    paths = sorted(_folder().glob(f"{_prefix(config)}*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    for path in [*reversed(paths), *([] if is_own else sorted(_PACKAGED.glob("*.safetensors")))]:
        yield TransformCalibration.read(path)


def calibration_of_file(
    config: GEARConfig | TransformConfig,
    digest: str | None,
    given: TransformCalibration | None,
    model: PreTrainedModel | PreTrainedConfig,
) -> dict[str, Any]:
    """
    The options of a cache that a file holds, its calibration among them, of which it has the `digest` and the caller
    may have `given` one. To be called within `refusals`: raises a `ValueError` if that is another one, or not found.
    """
    if digest is None:
        if given is not None:
            raise RefusedFile("was made without a calibration, so `calibration` has no meaning")
        return config.to_options()
    if not isinstance(config, TransformConfig) or config.key_nbits != config.value_nbits:
        raise ValueError("it names a calibration, but its options have none")
    if given is not None and given.digest != digest:
        raise RefusedFile(f"was made with another calibration than the one given ({digest[:_DIGITS]})")
    own = model if isinstance(model, PreTrainedConfig) else model.config
    found = given or next((each for each in _known(own) if each.digest == digest), None)
    if found is None:
        raise RefusedFile(
            f"was made with a calibration ({digest[:_DIGITS]}) that is not among those kept in {_folder()}: give it "
            "as `calibration`"
        )
    return {**config.to_calibrated_options(), "calibration": found}


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


def resolve_calibration(
    calibration: TransformCalibration | str | Path | None,
    model: PreTrainedConfig | torch.nn.Module | None,
    *,
    by_default: bool,
) -> TransformCalibration | None:
    """
    The calibration that a cache for a model takes, given it, its file, `"auto"` or none; a `ValueError` if it is
    another model's, or cannot be read.

    Where no option says how the cache compresses (`by_default`), none stands for that of the model, if the user has
    made one. Those of this package are for who asks for them: a default that is another one for two models would make
    what is measured of it untrue for all others.
    """
    # A config cannot tell whose weights they are
    if calibration is None and by_default and model is not None and not isinstance(model, PreTrainedConfig):
        try:
            return find_calibration(unwrap_model(model), is_own=True)
        except ValueError as error:
            warn_user(f"the cache goes without a calibration: {error}")
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
    found = None if isinstance(own, PreTrainedConfig) else find_calibration(own)
    if found is not None:
        return found
    warn_user(
        "this model has no calibration: its prompts alone say how they are coded, and less is kept at the same bytes; "
        "`kvcache-plugins calibrate --cache gear` makes one"
    )
    return None
