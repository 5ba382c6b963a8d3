"""A model of its config alone: its layers stand on the device `meta`, where tensors have shapes and no data."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvcache_plugins.models.packaged_models import check_model_name
from kvcache_plugins.models.reference_model import resolve_model


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What a model's code, or a cache's, raises where it needs numbers that there are not
NO_DATA_ERRORS = (ArithmeticError, AttributeError, ImportError, LookupError, RuntimeError, TypeError, ValueError)

ModelSource = str | Path | PreTrainedConfig | PreTrainedModel


def load_config(model: ModelSource) -> PreTrainedConfig:
    """
    The config of a model. The first time, a packaged model that has not been converted yet is converted.

    Raises:
        ValueError: if there is no such model, or its config cannot be read.
    """
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"`model` has to be a name, a folder, a config or a model but got {model!r}")
    is_path = isinstance(model, Path) or model.startswith(("/", "./", "../", "~"))
    check_model_name(str(Path(model).absolute()) if isinstance(model, Path) else model)
    source = str(Path(model).expanduser()) if is_path else resolve_model(str(model))
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"`model` is `{model}`, but its config cannot be had: {error}") from error


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of a key or value of `DTYPES`; any other is a `ValueError`."""
    parsed = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed not in DTYPES.values():
        accepted = ", ".join(f"`{each}`" for each in DTYPES)
        raise ValueError(f"`dtype` must be one of {accepted}, but got `{dtype}`")
    assert parsed is not None
    return parsed


def build_without_weights(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model in eval mode; a `ValueError` if the config is of no decoder."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()  # type: ignore[no-any-return]
        except NO_DATA_ERRORS as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"`model` is no decoder that can be built from its config: {reason}") from error
