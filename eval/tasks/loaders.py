"""Rows of the tasks in this folder. lm-eval loads this file by its path, so what it imports is named in full.

Loading it registers the model `kvcache`: so `lm_eval --model kvcache --tasks path/to/copa.yaml` works with releases of
lm-eval that look for no plug-ins.
"""

import json
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.wikitext import preprocess_wikitext
from transformers import AutoTokenizer

import kvcache_plugins.eval.lm_eval_model  # noqa: F401 - registers the model
from kvcache_plugins.eval.context_tasks import TASKS, make_sample
from kvcache_plugins.eval.measures.retrieval import read_questions
from kvcache_plugins.models.reference_model import resolve_model


DATA_VARIABLE = "KVCACHE_PLUGINS_DATA"
# Rows set apart for few-shot examples, where a set has no file of its own for them
NUM_EXAMPLES = 32

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """
    The rows of a set: files of JSON lines by split (one without `train` gives its first rows to it), or path and name
    of the hub's data set with its name of `test`; `convert` makes of a row what lm-eval sees.
    """

    files: Mapping[str, str]
    hub: tuple[str, str | None]
    hub_test: str
    convert: Callable[[Row], Row]
    has_examples: bool = True

    def load(self, name: str, data_folder: str | None = None, **_: object) -> datasets.DatasetDict:
        """Loads the splits `train`, for examples, and `test`. What else stands in lm-eval's metadata is not for us."""
        folder = _find_folder(data_folder)
        if folder is None:
            rows = datasets.load_dataset(*self.hub)
            names = {"train": "train", "test": self.hub_test} if self.has_examples else {"test": self.hub_test}
            return _as_splits({split: map(self.convert, rows[each]) for split, each in names.items()})
        splits = {split: _read_lines(folder / name / file) for split, file in self.files.items()}
        if "train" not in splits:
            splits = {"train": splits["test"][:NUM_EXAMPLES], "test": splits["test"][NUM_EXAMPLES:]}
        return _as_splits({split: map(self.convert, rows) for split, rows in splits.items()})


def _find_folder(data_folder: str | None) -> Path | None:
    named = data_folder or os.environ.get(DATA_VARIABLE)
    if named is None:
        return None
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise ValueError(f"`data_folder` is `{named}`, but there is no such folder")
    return folder


def _need_folder(data_folder: str | None, what: str) -> Path:
    folder = _find_folder(data_folder)
    if folder is None:
        raise ValueError(
            f"`data_folder`: {what} is on no hub. Name its folder in `--metadata` or in ${DATA_VARIABLE}."
        )
    return folder


def _read_lines(path: Path) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"`data_folder`: there is no file {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _as_splits(splits: Mapping[str, Iterable[Row]]) -> datasets.DatasetDict:
    return datasets.DatasetDict({split: datasets.Dataset.from_list(list(rows)) for split, rows in splits.items()})


# Rows of multiple-choice sets: what comes before the choices, the choices, and the number of the right one


def _copa_row(row: Row) -> Row:
    connector = {"cause": "because", "effect": "therefore"}[row["question"]]
    choices = [row[name][0].lower() + row[name][1:] for name in ("choice1", "choice2")]
    return {"query": f"{row['premise'].strip()[:-1]} {connector}", "choices": choices, "label": row["label"]}


def _piqa_row(row: Row) -> Row:
    query = f"Question: {row['goal']}\nAnswer:"
    return {"query": query, "choices": [row["sol1"], row["sol2"]], "label": row["label"]}


def _rte_row(row: Row) -> Row:
    query = f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:"
    return {"query": query, "choices": ["True", "False"], "label": row["label"]}


def _openbookqa_row(row: Row) -> Row:
    question = row.get("question_stem", row.get("question"))
    return {"query": question, **_choices(row)}


def _arc_row(row: Row) -> Row:
    return {"query": f"Question: {row['question']}\nAnswer:", **_choices(row)}


def _choices(row: Row) -> Row:
    choices = row["choices"]
    if isinstance(choices, Mapping):
        # The hub's form: texts, and letters or digits of which `answerKey` is one
        return {"choices": choices["text"], "label": choices["label"].index(row["answerKey"].strip())}
    return {"choices": choices, "label": row["label"]}


def _winogrande_row(row: Row) -> Row:
    """The choices differ before what is scored: the beginnings with each option, and the common ending."""
    beginning, ending = row["sentence"].split("_", 1)
    choices = [beginning + row[name] for name in ("option1", "option2")]
    return {"choices": choices, "ending": ending.strip(), "label": int(row["answer"]) - 1}


def _gsm8k_row(row: Row) -> Row:
    return {"question": row["question"], "target": row["answer"].split("####")[-1].strip()}


_TRAIN_AND_TEST = {"train": "dev.jsonl", "test": "test.jsonl"}
SOURCES = {
    "copa": Source(_TRAIN_AND_TEST, ("aps/super_glue", "copa"), "validation", _copa_row),
    "piqa": Source({"test": "valid.jsonl"}, ("baber/piqa", None), "validation", _piqa_row),
    "rte": Source({"test": "dev.jsonl"}, ("nyu-mll/glue", "rte"), "validation", _rte_row),
    "openbookqa": Source({"test": "test.jsonl"}, ("allenai/openbookqa", "main"), "test", _openbookqa_row),
    "arc_challenge": Source({"test": "test.jsonl"}, ("allenai/ai2_arc", "ARC-Challenge"), "test", _arc_row),
    "winogrande": Source(
        {"test": "dev.jsonl"}, ("allenai/winogrande", "winogrande_xl"), "validation", _winogrande_row
    ),
    "gsm8k": Source({"test": "test.jsonl"}, ("openai/gsm8k", "main"), "test", _gsm8k_row, has_examples=False),
}


# What the YAML files name; lm-eval calls it with its metadata, the model arguments among them

copa, piqa, rte, openbookqa, arc_challenge, winogrande, gsm8k = (
    partial(source.load, name) for name, source in SOURCES.items()
)


def gsm8k_examples() -> list[Row]:
    """The eight worked examples that lm-eval's own task has."""
    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    examples: list[Row] = load_yaml(path, resolve_func=False)["fewshot_config"]["samples"]
    return examples


def pairs(data_folder: str | None = None, records: int | None = None, **_: object) -> datasets.DatasetDict:
    """Lost in the middle: the value of one of 75 keys; of fewer with `records`."""
    file = "lost_in_the_middle/kv_retrieval_75_keys_100.jsonl"
    return _questions(_need_folder(data_folder, "key-value retrieval") / file, records)


def lines(data_folder: str | None = None, records: int | None = None, **_: object) -> datasets.DatasetDict:
    """LongChat's lines: the number in one of 200; of fewer with `records`."""
    return _questions(_need_folder(data_folder, "line retrieval") / "longchat_lines" / "200_lines.jsonl", records)


def _questions(path: Path, records: int | None) -> datasets.DatasetDict:
    # The last character of an answer is where generation stops
    rows = [{"context": each.context, "answer": each.answer[:-1]} for each in read_questions(path, records)]
    return _as_splits({"test": rows})


def passkey(
    data_folder: str | None = None, text_file: str | None = None, words: int = 1500, questions: int = 20, **_: object
) -> datasets.DatasetDict:
    """A number hidden in a text, at depths spread evenly from its beginning to its end."""
    path = Path(text_file) if text_file else _need_folder(data_folder, "the text") / "moby_dick" / "moby_dick.txt"
    haystack = path.read_text(encoding="utf-8").split()[:words]
    if len(haystack) < words:
        raise ValueError(f"`words` is {words}, but {path} has {len(haystack)}")
    draw = random.Random(42)
    rows = []
    for number in range(questions):
        key, place = draw.randrange(10_000, 100_000), words * number // max(questions - 1, 1)
        hidden = ["The", "pass", "key", "is", f"{key}.", "Remember", "it."]
        text = " ".join([*haystack[:place], *hidden, *haystack[place:]])
        rows.append({"context": f"{text}\n\nWhat is the pass key? The pass key is", "answer": str(key)})
    return _as_splits({"test": rows})


def make_context(
    task: str, length: int = 2048, samples: int = 20, scored: int = 128, pretrained: str | None = None, **_: object
) -> datasets.DatasetDict:
    """
    Samples that need much of their context, at places spread over their answers. The model's tokenizer counts tokens
    if the metadata name it; else three characters are one.
    """
    count_tokens: Callable[[str], int] = lambda text: len(text) // 3  # noqa: E731
    if pretrained is not None:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(pretrained))
        count_tokens = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    made = (make_sample(task, count_tokens, length, scored, (i + 0.5) / samples, i) for i in range(samples))
    return _as_splits({"test": [each._asdict() for each in made]})


records, needles, table, copying, variables, words = (partial(make_context, task) for task in TASKS)


def wikitext(data_folder: str | None = None, **_: object) -> datasets.DatasetDict:
    """WikiText-2, a page a row."""
    folder = _find_folder(data_folder)
    if folder is None:
        rows = datasets.load_dataset("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")["test"]
        return _as_splits({"test": rows})
    text = (folder / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    # A page begins with its title between single equals signs
    pages = re.split(r"(?m)^(?= = [^=\n]+ = *$)", text)
    return _as_splits({"test": [{"page": page} for page in pages if page.strip()]})


def text(text_file: str | None = None, **_: object) -> datasets.DatasetDict:
    """One's own text, as one row."""
    if text_file is None:
        raise ValueError("`text_file`: name the text to score in `--metadata`")
    return _as_splits({"test": [{"page": Path(text_file).expanduser().read_text(encoding="utf-8")}]})


def detokenize(row: Row) -> str:
    """A page of WikiText as lm-eval's own task has it."""
    page: str = preprocess_wikitext.wikitext_detokenizer(row)
    return page


def perplexities(row: Row, results: tuple[float]) -> Row:
    """Divides a page's log-likelihood as lm-eval does: per word and byte of the page as it was."""
    scores: Row = preprocess_wikitext.process_results(row, results)
    return scores
