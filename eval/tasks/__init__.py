"""lm-eval tasks of the papers' sets: from files, as a person may have them, or from the hub's data sets.

A task is a YAML file beside this one, and `loaders.py` reads its rows. They come from `data_folder` of lm-eval's
`--metadata`, or from the folder that the environment variable `KVCACHE_PLUGINS_DATA` names, or else from the hub.

    kvcache-plugins eval run --model kvcache --model_args pretrained=smollm2,cache=gear-2bit --tasks kv_copa
    lm_eval run --model kvcache --model_args ... --tasks path/to/eval/tasks/copa.yaml --metadata data_folder=../data
"""

from pathlib import Path


FOLDER = Path(__file__).resolve().parent


def task_files() -> dict[str, Path]:
    """The YAML file of every task, by the task's name."""
    return {f"kv_{path.stem}": path for path in sorted(FOLDER.glob("*.yaml"))}
