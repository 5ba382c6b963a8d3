"""The tasks' files: rows as files and the hub hold them, and lm-eval's command line with them, offline."""

import json
import shutil
import sys
from functools import partial
from math import exp
from pathlib import Path

import pytest


pytest.importorskip("lm_eval")

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from kvcache_plugins.eval.context_tasks import TASKS
from kvcache_plugins.eval.tasks import FOLDER, find_task, loaders, task_files


CHOICES = ["by night", "at noon", "in May", "on foot"]
HUB_CHOICES = {"text": CHOICES, "label": ["A", "B", "C", "D"]}
# A row of every set's file, fields that the hub has otherwise or besides, and text, choices and target of both
ROWS: dict[str, tuple[dict[str, object], dict[str, object], tuple[object, object, object]]] = {
    "copa": (
        {
            "question": "cause",
            "premise": "The glass fell.",
            "choice1": "It was hit.",
            "choice2": "It sang.",
            "label": 0,
        },
        {},
        ("The glass fell because", ["it was hit.", "it sang."], 0),
    ),
    "piqa": (
        {"goal": "Boil water", "sol1": "heat it", "sol2": "freeze it", "label": 0},
        {},
        ("Question: Boil water\nAnswer:", ["heat it", "freeze it"], 0),
    ),
    "rte": (
        {"sentence1": "It rains.", "sentence2": "It is dry.", "label": 1},
        {"idx": 3},
        ("It rains.\nQuestion: It is dry. True or False?\nAnswer:", ["True", "False"], 1),
    ),
    "openbookqa": (
        {"question": "Owls hunt", "choices": CHOICES, "label": 0},
        {"question_stem": "Owls hunt", "choices": HUB_CHOICES, "answerKey": "A "},
        ("Owls hunt", CHOICES, 0),
    ),
    "arc_challenge": (
        {"question": "When do owls hunt?", "choices": CHOICES, "label": 3},
        {"question": "When do owls hunt?", "choices": {**HUB_CHOICES, "label": list("1234")}, "answerKey": "4"},
        ("Question: When do owls hunt?\nAnswer:", CHOICES, 3),
    ),
    "winogrande": (
        {"sentence": "The cup fit in the bag as the _ was small.", "option1": "cup", "option2": "bag", "answer": "1"},
        {},
        # The number of the right beginning, the beginnings, and the common ending
        (0, ["The cup fit in the bag as the cup", "The cup fit in the bag as the bag"], "was small."),
    ),
    "gsm8k": (
        {"question": "One and one?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
        {},
        ("Q: One and one?\nA:", None, "2"),
    ),
}
FILES = {
    **{"copa": "dev test", "piqa": "valid", "rte": "dev", "openbookqa": "test", "arc_challenge": "test"},
    **{"winogrande": "dev", "gsm8k": "test"},
}
NUM_ROWS = 40


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set of every kind, laid out as a person's own folder would be."""
    folder = tmp_path_factory.mktemp("data")
    contents = {
        f"{name}/{part}.jsonl": [ROWS[name][0]] * NUM_ROWS for name, parts in FILES.items() for part in parts.split()
    }
    contents["lost_in_the_middle/kv_retrieval_75_keys_100.jsonl"] = [
        {"ordered_kv_records": [["a", "one"], ["b", "two"], ["c", "three"]], "key": "b", "value": "two"}
    ]
    contents["longchat_lines/200_lines.jsonl"] = [
        {
            "random_idx": ["calm-sea", 1],
            "expected_number": 24,
            "prompt": "Record:\nline a-b: REGISTER_CONTENT is <7>\nline calm-sea: REGISTER_CONTENT is <24>",
        }
    ]
    for file, rows in contents.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    (folder / "moby_dick").mkdir()
    (folder / "moby_dick" / "moby_dick.txt").write_text("Call me Ishmael. " * 800, encoding="utf-8")
    (folder / "wikitext2").mkdir()
    text = " \n = First = \n \n Some words . \n \n = = Part = = \n More . \n \n = Second = \n \n Other words . \n"
    (folder / "wikitext2" / "wiki.test.raw").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_files_and_of_the_hub_give_equal_prompts(name: str, data_folder: Path) -> None:
    own, hub, expected = ROWS[name]
    config, manager = find_task(f"kv_{name}", {"data_folder": str(data_folder), "pretrained": "ignored"})
    task = manager.load([config])["tasks"][f"kv_{name}"]
    for row in (own, hub if "answerKey" in hub else own | hub):
        choices = None if expected[1] is None else task.doc_to_choice(row)
        assert (task.doc_to_text(row), choices, task.doc_to_target(row)) == expected
    # Sets of one file give some rows to the examples, and no row to both
    counts = {split: len(rows) for split, rows in task.dataset.items()}
    assert counts == {"train": NUM_ROWS if name == "copa" else 32, "test": NUM_ROWS if name == "copa" else 8}


@pytest.mark.parametrize("name", task_files())
def test_every_task_builds_its_requests(name: str, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHE_PLUGINS_DATA", str(data_folder))
    text_file = str(data_folder / "moby_dick" / "moby_dick.txt")
    config, manager = find_task(name, {"text_file": text_file} if name == "kv_text" else None)
    assert config["task"] == name
    task = manager.load([config])["tasks"][name]
    task.build_all_requests(limit=2, rank=0, world_size=1)
    first = task.instances[0].args
    expected = {
        "kv_winogrande": " was small.",
        "kv_copa": " it was hit.",
        "kv_rte": " True",
        "kv_arc_challenge": " by night",
        "kv_openbookqa": " by night",
        "kv_piqa": " heat it",
    }
    if name in expected:
        assert first[1] == expected[name]
        # Five examples come before the question
        assert first[0].count("\n\n") >= 5
    elif name == "kv_gsm8k":
        assert first[0].count("Q: ") == 9 and first[0].endswith("Q: One and one?\nA:")
    elif name.removeprefix("kv_") in TASKS:
        # About three characters a token are counted where no model is named
        assert first[1].endswith("\n") and 5500 < len(first[0]) <= 3 * 2048 + 2
    elif name in ("kv_pairs", "kv_lines", "kv_passkey"):
        asked = {"kv_pairs": 'Corresponding value: "', "kv_lines": "calm-sea is <", "kv_passkey": "The pass key is"}
        assert first[0].endswith(asked[name])
    else:
        assert name in ("kv_text", "kv_wikitext") and len(first) == 1


def test_passkeys_are_at_their_depths(data_folder: Path) -> None:
    rows = loaders.passkey(data_folder=str(data_folder), words=100, questions=5)["test"]
    places = [row["context"].split().index(f"{row['answer']}.") for row in rows]
    assert places == [4, 29, 54, 79, 104]
    assert rows["answer"] == loaders.passkey(data_folder=str(data_folder), words=100, questions=5)["test"]["answer"]


def test_pages_of_wikitext_are_joined_again(data_folder: Path) -> None:
    pages = loaders.wikitext(data_folder=str(data_folder))["test"]["page"]
    assert [page.split(" = ")[1] for page in pages] == ["First", "Second"]
    assert "= = Part = =" in pages[0]


def test_perplexity_of_answers_is_by_byte() -> None:
    config, manager = find_task("kv_records", {"samples": 2, "length": 200})
    task = manager.load([config])["tasks"]["kv_records"]
    found = [
        task.process_results({"answer": answer}, [(-number, False)])
        for answer, number in (("a" * 30, 6.0), ("b" * 50, 10.0))
    ]
    assert task.aggregation()["byte_perplexity"]([each["byte_perplexity"] for each in found]) == pytest.approx(
        exp(0.2)
    )
    assert [each["acc"] for each in found] == [0, 0]
    assert task.process_results({"answer": "b"}, [(-1.0, True)])["acc"] == 1
    asked = [path for path in task_files().values() if "loaders.make_context" in path.read_text(encoding="utf-8")]
    assert len(asked) == len(TASKS) and all("score_answer" in path.read_text(encoding="utf-8") for path in asked)


def load_copa(data_folder: str) -> object:
    return loaders.load_rows({"train": "copa/dev.jsonl"}, ["no/hub"], data_folder=data_folder)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda folder: load_copa("/no/such"), "`data_folder` is `/no/such`"),
        (lambda folder: load_copa(str(folder / "copa")), "`data_folder`: .*dev.jsonl cannot be read"),
        (lambda folder: loaders.load_questions("a/b"), "`data_folder`: a/b is on no hub.*KVCACHE_PLUGINS_DATA"),
        (lambda folder: loaders.wikitext(), "`data_folder`: EleutherAI.* hub, which cannot be reached"),
        (lambda folder: loaders.text(), "`text_file`: name the text"),
        (lambda folder: loaders.passkey(data_folder=str(folder), words=9999), "`words` is 9999, but .* has 2400"),
    ],
)
def test_missing_data_is_named(call, complaint, data_folder, monkeypatch):
    monkeypatch.delenv("KVCACHE_PLUGINS_DATA", raising=False)
    with pytest.raises(ValueError, match=complaint):
        call(data_folder)


def read_results(folder: Path) -> dict[str, object]:
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture
def own_files_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep lm-eval from reading its own thousands of tasks, which takes seconds."""
    monkeypatch.setattr("lm_eval.tasks.TaskManager", partial(TaskManager, include_defaults=False))


@pytest.mark.slow
@pytest.mark.usefixtures("own_files_unread")
@pytest.mark.parametrize("model", ["tiny_folder", pytest.param("smollm2", marks=pytest.mark.long)])
def test_command_line_writes_task_results(model, request, tmp_path, data_folder, monkeypatch, run) -> None:
    name = request.getfixturevalue("tiny_folder") if model == "tiny_folder" else model
    arguments = ["run", "--model", "kvcache", "--model_args", f"pretrained={name},cache=gear-2bit", "--limit", "2"]
    # The rows are short: it takes many examples to leave the exact buffer
    arguments += ["--tasks", "kv_copa,kv_openbookqa", "--num_fewshot", "20", "--output_path", str(tmp_path / "out")]
    monkeypatch.setenv("KVCACHE_PLUGINS_DATA", str(data_folder))
    monkeypatch.setattr(sys, "argv", sys.argv)
    shown = run("eval", *arguments).stdout
    assert "kv_copa" in shown and "kv_openbookqa" in shown
    cache = read_results(tmp_path / "out")["config"]["cache"]
    assert cache["cache"] == "gear-2bit"
    # All rows of a task are alike, and so are their contexts: each is prefilled once
    assert cache["counters"]["contexts"] == cache["counters"]["contexts_exercised"] == 2
    assert cache["counters"]["continuations"] == 2 * 2 + 2 * 4


# Read one folder of lm-eval's tasks alone: its thousands of files take long
STOCK = """
from functools import partial
import lm_eval.tasks
lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
from kvcache_plugins.cli import main
main()
"""


@pytest.mark.slow
def test_model_names_work_with_lm_evals_own_tasks(saved_with_tokenizer, tmp_path, data_folder, run_python):
    # A folder in place of the data set that the task loads from the hub
    (tmp_path / "aps").mkdir()
    shutil.copytree(data_folder / "copa", tmp_path / "aps" / "super_glue")
    files = [{"split": split, "path": f"{file}.jsonl"} for split, file in (("train", "dev"), ("validation", "test"))]
    card = yaml.safe_dump({"configs": [{"config_name": "copa", "data_files": files}]})
    (tmp_path / "aps" / "super_glue" / "README.md").write_text(f"---\n{card}---\n")
    arguments = ["eval", "run", "--model", "kvcache", "--tasks", "copa", "--limit", "2"]
    arguments += ["--model_args", f"pretrained={saved_with_tokenizer('llama')},cache=dynamic"]
    arguments += ["--include_path", Path(lm_eval.tasks.__file__).parent / "super_glue" / "copa"]
    variables = {"CUDA_VISIBLE_DEVICES": "", "HF_DATASETS_CACHE": tmp_path / "datasets"}
    run_python("-c", STOCK, *arguments, "--output_path", tmp_path / "out", cwd=tmp_path, **variables)
    assert read_results(tmp_path / "out")["config"]["cache"]["counters"]["continuations"] == 4


@pytest.mark.slow
@pytest.mark.usefixtures("own_files_unread")
def test_the_stock_command_finds_the_model_through_a_file(
    saved_with_tokenizer, tmp_path, data_folder, monkeypatch, run, run_python
):
    folder = saved_with_tokenizer("llama")
    arguments = ["lm_eval", "run", "--model", "kvcache", "--model_args", f"pretrained={folder},cache=h2o"]
    arguments += ["--tasks", str(FOLDER / "copa.yaml"), "--limit", "2"]
    variables = {"KVCACHE_PLUGINS_DATA": data_folder, "HF_DATASETS_CACHE": tmp_path / "datasets"}
    command = ["-P", "-m", *arguments, "--output_path", tmp_path / "out"]
    run_python(*command, cwd=tmp_path, CUDA_VISIBLE_DEVICES="", **variables)
    assert read_results(tmp_path / "out")["config"]["cache"]["cache"] == "h2o"
    # A buffer that is longer than all contexts: one line, with the reason
    arguments[arguments.index("--model_args") + 1] += ",cache_min_tokens=4000"
    monkeypatch.setenv("KVCACHE_PLUGINS_DATA", str(data_folder))
    monkeypatch.setattr(sys, "argv", sys.argv)
    last = run("eval", *arguments[1:], code=2).stderr.splitlines()[-1]
    assert "Error: The cache `h2o` was not exercised" in last


def test_yaml_files_hold_nothing_but_tasks() -> None:
    for name, path in task_files().items():
        fields = yaml.load(path.read_text(encoding="utf-8").replace("!function", ""), Loader=yaml.SafeLoader)
        assert fields["task"] == name
        assert {"custom_dataset", "test_split", "output_type", "metric_list"} <= fields.keys()
