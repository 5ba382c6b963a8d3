"""Models that packages carry as GGUF, written once into folders that `from_pretrained` reads."""

import io
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock, Timeout
from packaging.version import Version
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from .packaged_models import PackagedModel


def convert_once(packaged: PackagedModel, name: str, folder: Path) -> None:
    """Converts into a folder beside `folder` and renames it: `folder` is either whole or not there."""
    if find_spec("gguf") is None:
        raise ImportError(f"Reading `{name}` from its package needs gguf: `pip install kvcache-plugins[reference]`.")
    if Version(transformers.__version__) < Version(packaged.oldest_reader):
        raise ImportError(
            f"Transformers {transformers.__version__} misreads the tokenizer of `{name}` in its package: "
            f"`pip install 'transformers>={packaged.oldest_reader}'`."
        )
    partial = folder.with_name(f"{folder.name}.partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock"), name):
        if folder.is_dir():
            return
        # What is left of a process that was killed: the lock is ours, so nobody is writing it.
        shutil.rmtree(partial, ignore_errors=True)
        _say(f"Converting {name} (once, about a minute) ...")
        had_progress_bar = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            _convert(packaged, partial)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if had_progress_bar:
                logging.enable_progress_bar()
    _say(f"Converted {name} to {folder}: later loads take seconds.")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    """Holds the lock file at `path`, and says so when another process has to be waited for."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"Another process is converting {name}: waiting for it.")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _convert(packaged: PackagedModel, folder: Path) -> None:
    """Writes the packaged model and its tokenizer into `folder` as `from_pretrained` reads them."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True)
    file = packaged.locate_gguf(scratch)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    options = {"gguf_file": file.name, "dtype": torch.float32, **_dequantized()}
    # Transformers draws a bar of its own here that no switch turns off. What goes wrong is raised, not printed.
    with redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(file.parent, **options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.rmtree(scratch)


def _dequantized() -> dict[str, Any]:
    """Makes the arguments by which `from_pretrained` loads a GGUF file as ordinary weights."""
    try:
        from transformers import GgufConfig
    except ImportError:
        # Releases before 5.17 know no other way
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}
