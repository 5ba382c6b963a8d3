"""lm-eval's own command line, with the model `kvcache` registered and this project's tasks known by name."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from .tasks import FOLDER, task_files


def run_lm_eval(arguments: Sequence[str]) -> None:
    """
    Runs lm-eval's command line with the model `kvcache` registered and this project's tasks known by name.

    Args:
        arguments (`Sequence[str]`): As after `lm_eval`.
    """
    if find_spec("lm_eval") is None:
        raise ImportError("`eval` needs lm-eval: `pip install 'kvcache-plugins[eval]'`")
    from lm_eval.__main__ import cli_evaluate

    from . import lm_eval_model  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *_with_task_files(arguments)]
    cli_evaluate()


def _with_task_files(arguments: Sequence[str]) -> list[str]:
    """Names of this project's tasks replaced by their files, which lm-eval reads wherever they are."""
    if arguments and arguments[0] != "run":
        has_path = any(each.split("=")[0] == "--include_path" for each in arguments)
        return [*arguments, *([] if has_path else ["--include_path", str(FOLDER)])]
    files, replaced, is_task = task_files(), [], False
    for each in arguments:
        option, separator, value = each.partition("=")
        if each.startswith("-"):
            is_task = option in ("--tasks", "-t")
            each = f"{option}={_replace(value, files)}" if is_task and separator else each
        elif is_task:
            each = _replace(each, files)
        replaced.append(each)
    return replaced


def _replace(names: str, files: dict[str, Any]) -> str:
    return ",".join(str(files.get(name, name)) for name in names.split(","))
