"""Models that packages carry as GGUF, written once, with a progress bar, into folders that `from_pretrained` reads."""

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
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from .packaged_models import PackagedModel


def convert_once(packaged: PackagedModel, name: str, folder: Path) -> None:
    """Convert into a folder beside `folder` and rename it: `folder` is either whole or not there."""
    if find_spec("gguf") is None:
        raise ImportError(f"Reading `{name}` from its package needs gguf: `pip install kvcache-plugins[reference]`.")
    if Version(transformers.__version__) < Version(packaged.oldest_reader):
        raise ImportError(
            f"Transformers {transformers.__version__} misreads the tokenizer of `{name}` in its package: "
            f"`pip install 'transformers>={packaged.oldest_reader}'`."
        )
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
    """Makes the arguments by which `from_pretrained` loads a GGUF file as ordinary weights."""
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
