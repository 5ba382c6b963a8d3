"""The small real models that the demo and the tests run on, by a short name.

Two small models are carried by packages of the registry, as GGUF files. Reading one takes up to a minute, nearly all
of it spent on parsing and dequantizing, so the model is written once as safetensors into the user's cache folder, and
every later load is an ordinary `from_pretrained` of that folder.

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
# How long the hub may take for its answer
_HUB_SECONDS = 10
# What says where a checkpoint is found, as opposed to how the model is built: the tokenizer needs it too.
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
    Loads a causal language model, in eval mode, and its tokenizer.

    Args:
        name_or_path (`str`): `smollm2` or `gemma3-270m`, which come from the package that carries them when it is
            installed and from the hub otherwise; anything else goes to `from_pretrained` as it is. A local folder that
            happens to have one of these two names is reached as `./smollm2`.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`): Where the model goes. With a `device_map`
            among the other keywords, leave it alone.
        from_pretrained_kwargs (`object`, *optional*): What else `AutoModelForCausalLM.from_pretrained` understands.

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
        # The decorator that Transformers puts on `to` loses its `self` in the eyes of mypy.
        model = model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def load_config(model: ModelSource) -> PreTrainedConfig:
    """The config of a model, which is converted if need be; a `ValueError` if there is none, or it cannot be read."""
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
    """The dtype of a key or value of `DTYPES`; any other is a `ValueError`."""
    parsed = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if parsed not in DTYPES.values():
        accepted = ", ".join(f"`{each}`" for each in DTYPES)
        raise ValueError(f"`dtype` must be one of {accepted}, but got `{dtype}`")
    assert parsed is not None
    return parsed


def reference_models() -> dict[str, bool]:
    """The short names that `load_model` knows, each with whether the package that carries the model is installed."""
    return {name: model.installed_version() is not None for name, model in PACKAGED_MODELS.items()}


def resolve_model(name_or_path: str, cache_dir: str | Path | None = None) -> str:
    """
    Resolves a name for `from_pretrained`: a folder, converted here if need be, a hub name, or the name itself. A name
    of the hub is a `ValueError` if `cache_dir`, of the hub's files, lacks the model and the hub cannot be reached.
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
    """Tells whether a model is a folder, or in the cache of the hub's files, or named by no name of the hub."""
    if os.path.isdir(source):
        return True
    try:
        return isinstance(try_to_load_from_cache(source, "config.json", cache_dir), str)
    except HFValidationError:
        return True


def _reaches_hub() -> bool:
    """Asks the hub for an answer once: `from_pretrained` asks for most of a minute before it gives up."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_SECONDS).close()
    except HTTPError:
        return True
    except OSError as error:
        # Certificates that the hub's own client knows may be unknown here
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
    """The folder of this package's files in the user's cache; `None` if nothing names it and the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(os.environ.get("KVCACHE_PLUGINS_HOME") or os.path.join(cache, "kvcache_plugins"))
    return None if folder.startswith("~") else Path(folder)


def user_folder() -> Path:
    """The same for what needs it; a `ValueError` if there is none."""
    folder = find_user_folder()
    if folder is None:
        raise ValueError("`KVCACHE_PLUGINS_HOME` has to name a folder in full, as this user has no home folder")
    return folder


def converted_folder(name: str, version: str) -> Path:
    """Where the packaged model `name` of a version of its package is, once it has been converted."""
    return user_folder() / "models" / f"{name}-{version}-float32"


def is_converted(name: str, version: str) -> bool:
    """Tells whether a packaged model of a version of its package has been converted."""
    return find_user_folder() is not None and converted_folder(name, version).is_dir()


def _convert_once(packaged: PackagedModel, name: str, folder: Path) -> None:
    """Converts into a folder beside `folder` and renames it: `folder` is either whole or not there."""
    if find_spec("gguf") is None:
        raise ImportError(
            f"Reading `{name}` from its package needs gguf: `pip install '.[reference]'` in a clone of the repository."
        )
    partial = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _say(f"Converting {name} (once, about a minute; or waiting for another process that does) ...")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return
        # What is left of a process that was killed: the lock is ours, so nobody is writing it.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            # Transformers draws bars, not all of which a switch turns off. What goes wrong is raised, not printed.
            with redirect_stderr(io.StringIO()):
                _convert(packaged, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _say(f"Converted {name} to {folder}: later loads take seconds.")


def _say(text: str) -> None:
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
