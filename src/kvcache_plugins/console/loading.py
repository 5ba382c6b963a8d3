"""The model that a command's options name, with its dtype and device: checked, then loaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


DTYPES = ("float32", "bfloat16", "float16")


def load_for_evaluation(
    name: str, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Loads the model and tokenizer that a command's options name.

    Args:
        name (`str`): A short name, a folder or a hub name, see `load_model`.
        dtype (`str`, *optional*): One of `DTYPES`. Defaults to `float32` on CPU and `bfloat16` elsewhere.
        device (`str`, *optional*): Defaults to a CUDA device where there is one.
    """
    from transformers.utils import logging

    from kvcache_plugins.models.packaged_models import check_model_name
    from kvcache_plugins.models.reference_model import load_model

    from .compilation import announce_compilation

    chosen = parse_device(device or default_device())
    parsed_dtype = parse_dtype(dtype or ("float32" if chosen.type == "cpu" else "bfloat16"))
    check_model_name(name)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    announce_compilation(chosen.type)
    return load_model(name, dtype=parsed_dtype, device=chosen)


def default_device() -> str:
    """`cuda` where torch finds a GPU, else `cpu`."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parse_dtype(text: str) -> torch.dtype:
    """The dtype that one of `DTYPES` names. Any other is a `ValueError`."""
    if text not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(f'`{each}`' for each in DTYPES)}, but got `{text}`")
    import torch

    return getattr(torch, text)  # type: ignore[no-any-return]


def parse_device(text: str) -> torch.device:
    """The device that `text` names. One that torch does not know or find is a `ValueError`."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ValueError(
            f"`device` must be one that torch knows, such as `cpu` or `cuda:0`, but got `{text}`"
        ) from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`device` is `{text}`, but torch finds no CUDA device")
    return device
