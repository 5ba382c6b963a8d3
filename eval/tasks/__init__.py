"""lm-eval tasks of the papers' sets, read from local files or from the hub's data sets.

A task is a YAML file beside this one, and `loaders.py` reads its rows. They come from `data_folder` of lm-eval's
`--metadata`, or from the folder that the environment variable `KVCACHE_PLUGINS_DATA` names, or else from the hub.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=transform --tasks kv_copa
    lm_eval run --model kvcache --model_args ... --tasks path/to/eval/tasks/copa.yaml --metadata data_folder=../data
"""

import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).resolve().parent


def task_files() -> dict[str, Path]:
    """Return the YAML file of every task, by the task's name."""
    return {f"kv_{path.stem}": path for path in sorted(FOLDER.glob("*.yaml"))}


def find_task(task: str | Path, metadata: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return a task of this project, of a YAML file or of lm-eval, and its manager, which passes on `metadata`."""
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    path = task_files().get(str(task), Path(task))
    is_file = path.suffix == ".yaml"
    # Reading lm-eval's own thousands of files takes seconds
    manager = TaskManager(metadata=dict(metadata or {}), include_defaults=not is_file)
    return (load_yaml(path, resolve_func=True) if is_file else str(task)), manager


def run_lm_eval(arguments: Sequence[str]) -> None:
    """Run `lm_eval` with `arguments`, with the model `kvcache` and this project's tasks by name."""
    if find_spec("lm_eval") is None:
        raise ImportError("`eval` needs lm-eval: `pip install '.[eval]'` in a clone of the repository")
    from lm_eval.__main__ import cli_evaluate

    import kvcache_plugins.eval.lm_eval_model  # noqa: F401 - registers the model

    sys.argv = ["lm_eval", *_with_task_files(arguments)]
    cli_evaluate()


def _with_task_files(arguments: Sequence[str]) -> list[str]:
    """Replace names of this project's tasks by their files, which lm-eval can read."""
    if arguments and arguments[0] != "run":
        has_path = any(each.split("=")[0] == "--include_path" for each in arguments)
        return [*arguments, *([] if has_path else ["--include_path", str(FOLDER)])]
    files, replaced, is_task = task_files(), [], False
    for each in arguments:
        is_task = each.partition("=")[0] in ("--tasks", "-t") if each.startswith("-") else is_task
        # Names have commas between them, and may stand behind `--tasks=`
        named = re.sub("[^,=]+", lambda found: str(files.get(found[0], found[0])), each)
        replaced.append(named if is_task else each)
    return replaced
