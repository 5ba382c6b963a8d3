"""Two processes, as `accelerate launch` starts them: the scores of one, and every request answered once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


pytest.importorskip("lm_eval")

import yaml

from kvcache_plugins.eval.lm_eval_model import find_rank


CONTEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 3
# What `accelerate launch` starts on GPUs; on CPUs it starts one process alone
LAUNCH = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Five questions, so that one process has one more; the last contexts are too short for a cache to compress."""
    lengths = (200, 150, 180, 20, 10)
    rows = [{"text": CONTEXT[number:][:length]} for number, length in enumerate(lengths)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = {
        "task": "five",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": [" yes", " no", " perhaps"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    path = tmp_path / "five.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def evaluate(model: str, task: Path, folder: Path, launch: tuple[str, ...] = ()) -> tuple[dict, list[dict]]:
    arguments = f"pretrained={model},cache=gear-2bit"
    command = [*launch, "kvcache_plugins.eval", "run", "--model", "kvcache", "--model_args", arguments]
    command += ["--tasks", str(task), "--output_path", str(folder), "--log_samples", "--device", "cpu"]
    environment = {
        **os.environ,
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "KVCACHE_PLUGINS_KERNELS": "torch",
    }
    finished = subprocess.run(
        [sys.executable, "-P", "-m", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    (results,), (samples,) = (list(folder.rglob(f"{name}_*")) for name in ("results", "samples"))
    return json.loads(results.read_text()), [json.loads(line) for line in samples.read_text().splitlines()]


@pytest.mark.long
def test_two_processes_score_as_one(tiny_folder: str, task: Path, tmp_path: Path) -> None:
    one, alone = evaluate(tiny_folder, task, tmp_path / "one")
    two, shared = evaluate(tiny_folder, task, tmp_path / "two", LAUNCH)
    assert two["results"]["five"]["acc,none"] == one["results"]["five"]["acc,none"]
    assert sorted(sample["doc_id"] for sample in shared) == [0, 1, 2, 3, 4]
    by_document = {sample["doc_id"]: sample["filtered_resps"] for sample in shared}
    for sample in alone:
        answers = by_document[sample["doc_id"]], sample["filtered_resps"]
        found, expected = ([float(score) for score, _ in each] for each in answers)
        assert found == pytest.approx(expected, abs=1e-4)
    assert [each["config"]["cache"]["processes"] for each in (one, two)] == [1, 2]
    counters = [each["config"]["cache"]["counters"] for each in (one, two)]
    assert [each["contexts"] for each in counters] == [5, 5]
    assert [each["contexts_exercised"] for each in counters] == [3, 3]
    held = [each["config"]["cache"]["memory_of_longest"] for each in (one, two)]
    assert held[0] == held[1]


def test_rank_is_the_launchers_where_processes_share_a_machine_without_gpus() -> None:
    own = SimpleNamespace(rank=0, world_size=1)
    assert find_rank(own) == (0, 1)
    launched = SimpleNamespace(rank=0, world_size=1, accelerator=SimpleNamespace(process_index=1, num_processes=2))
    assert find_rank(launched) == (1, 2)
