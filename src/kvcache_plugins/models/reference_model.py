"""Load a model by a short name, a folder or a hub name.

Two small models, on which the demo and the tests run, are distributed as Python packages with a GGUF file. Parsing and
dequantizing one takes up to a minute. So the first load converts the model to safetensors in the user's cache folder,
and later loads are an ordinary `from_pretrained` of that folder.

The cache folder is `KVCACHE_PLUGINS_HOME`, or else `kvcache_plugins` in `XDG_CACHE_HOME`, or else in `~/.cache`.
"""

import io
import os
import shutil
import ssl
import sys
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import torch
import transformers
from filelock import FileLock
from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .packaged_models import PACKAGED_MODELS, PackagedModel, check_model_name


ModelSource = str | Path | PreTrainedConfig | PreTrainedModel
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Time limit of a request to the hub
_HUB_SECONDS = 10
# Options that locate a checkpoint, and so apply to the tokenizer too
_SOURCE_OPTIONS = (
    *("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"),
)


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **from_pretrained_kwargs: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name_or_path (`str`): `smollm2` or `gemma3-270m`, which are loaded from their package if it is installed, else
            from the hub; any other name goes to `from_pretrained`. Write `./smollm2` for a local folder of that name.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): device of the model. Not to be given
            together with `device_map`.
        from_pretrained_kwargs (`object`, *optional*): further options of `AutoModelForCausalLM.from_pretrained`.

    Example:

    ```python
    >>> from kvcache_plugins.models.reference_model import load_model

    >>> model, tokenizer = load_model("smollm2")
    ```
    """
    has_device_map = from_pretrained_kwargs.get("device_map") is not None
    if has_device_map and torch.device(device) != torch.device("cpu"):
        raise ValueError(f"`device` has to be left at its default when `device_map` is given, but got {device}")
    source = resolve_model(name_or_path, from_pretrained_kwargs.get("cache_dir"))  # type: ignore[arg-type]
    source_options = {name: from_pretrained_kwargs[name] for name in _SOURCE_OPTIONS if name in from_pretrained_kwargs}
    tokenizer = AutoTokenizer.from_pretrained(source, **source_options)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **from_pretrained_kwargs)
    if not has_device_map:
        # mypy: the decorator that Transformers puts on `to` loses its `self`
        model = model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def load_config(model: ModelSource) -> PreTrainedConfig:
    """Return the config of a model; raise a `ValueError` if there is no such model, or its config cannot be read."""
    if isinstance(model, PreTrainedModel):
        return model.config
    if isinstance(model, PreTrainedConfig):
        return model
    if not isinstance(model, (str, Path)) or not str(model):
        raise ValueError(f"`model` has to be a name, a folder, a config or a model but got {model!r}")
    name = str(model.absolute()) if isinstance(model, Path) else model
    check_model_name(name)
    source = os.path.expanduser(resolve_model(name))
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"`model` is `{model}`, but its config cannot be had: {error}") from error


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype of a name of `DTYPES`; raise a `ValueError` for other names and dtypes."""
    parsed = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed not in DTYPES.values():
        accepted = ", ".join(f"`{each}`" for each in DTYPES)
        raise ValueError(f"`dtype` must be one of {accepted}, but got `{dtype}`")
    assert parsed is not None
    return parsed


def reference_models() -> dict[str, bool]:
    """Return the short names that `load_model` accepts; the value is true if the model's package is installed."""
    return {name: model.installed_version() is not None for name, model in PACKAGED_MODELS.items()}


def resolve_model(name_or_path: str, cache_dir: str | Path | None = None) -> str:
    """
    Return the folder or hub name to load by `from_pretrained`, converting a packaged model first. Raise a `ValueError`
    for a hub name if the hub's local cache (`cache_dir`) lacks the model and the hub cannot be reached.
    """
    packaged = PACKAGED_MODELS.get(name_or_path)
    version = None if packaged is None else packaged.installed_version()
    if packaged is None or version is None:
        source = name_or_path if packaged is None else packaged.hub_name
        if not _is_here(source, cache_dir) and not _reaches_hub():
            raise ValueError(_explain_unreachable(name_or_path, source))
        return source
    folder = converted_folder(name_or_path, version)
    if not folder.is_dir():
        _convert_once(packaged, name_or_path, folder)
    return str(folder)


def _is_here(source: str, cache_dir: str | Path | None) -> bool:
    """Return true for a folder, a model in the hub's local cache, and a name that no hub model can have."""
    if os.path.isdir(source):
        return True
    try:
        return isinstance(try_to_load_from_cache(source, "config.json", cache_dir), str)
    except HFValidationError:
        return True


def _reaches_hub() -> bool:
    """Send one request to the hub; `from_pretrained` would retry for most of a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_SECONDS).close()
    except HTTPError:
        return True
    except OSError as error:
        # The hub's own client may have certificates that Python does not have
        return isinstance(error, URLError) and isinstance(error.reason, ssl.SSLError)
    return True


def _explain_unreachable(name: str, source: str) -> str:
    place = "on the hub" if name == source else f"on the hub as `{source}`"
    packages = ", ".join(f"`{short}` (`{model.install}`)" for short, model in PACKAGED_MODELS.items())
    return (
        f"`model` is `{name}`, which is {place}, and the hub cannot be reached. Give a folder, or a model that comes "
        f"as a package: {packages}; reading these needs `pip install '.[reference]'` in a clone of the repository."
    )


def find_user_folder() -> Path | None:
    """Return this package's folder in the user's cache; `None` if no variable names it and the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("KVCACHE_PLUGINS_HOME") or os.path.join(cache, "kvcache_plugins"))
    return None if folder.startswith("~") else Path(folder)


def user_folder() -> Path:
    """Return this package's folder in the user's cache; raise a `ValueError` if there is none."""
    folder = find_user_folder()
    if folder is None:
        raise ValueError("`KVCACHE_PLUGINS_HOME` has to name a folder in full, as this user has no home folder")
    return folder


def converted_folder(name: str, version: str) -> Path:
    """Return the folder for the converted model of a version of its package."""
    return user_folder() / "models" / f"{name}-{version}-float32"


def is_converted(name: str, version: str) -> bool:
    """Return true if the model of a version of its package has been converted."""
    return find_user_folder() is not None and converted_folder(name, version).is_dir()


def _convert_once(packaged: PackagedModel, name: str, folder: Path) -> None:
    """Convert into a temporary folder and rename it, so that `folder` is never incomplete."""
    if find_spec("gguf") is None:
        raise ImportError(
            f"Reading `{name}` from its package needs gguf: `pip install '.[reference]'` in a clone of the repository."
        )
    partial = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _report(f"Converting {name} (once, about a minute; or waiting for another process that does) ...")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return
        # Left by a process that was killed: no other process writes here, as this one has the lock
        shutil.rmtree(partial, ignore_errors=True)
        try:
            # Transformers has progress bars without a switch; errors are raised, not printed
            with redirect_stderr(io.StringIO()):
                _convert(packaged, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _report(f"Converted {name} to {folder}: later loads take seconds.")


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _convert(packaged: PackagedModel, folder: Path) -> None:
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    file = packaged.locate_gguf(scratch)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.float32,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(scratch)
