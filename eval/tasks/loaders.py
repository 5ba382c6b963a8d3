"""Rows of the tasks in this folder. lm-eval loads this file by its path, so that imports are absolute.

Loading it registers the model `kvcache`, so that `lm_eval --model kvcache --tasks path/to/copa.yaml` works in releases
of lm-eval without entry points for models.
"""

import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset, DatasetDict, load_dataset
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.wikitext import preprocess_wikitext
from transformers import AutoTokenizer

import kvcache_plugins.eval.lm_eval_model  # noqa: F401 - registers the model
from kvcache_plugins.eval.context_tasks import make_sample
from kvcache_plugins.eval.harness import read_rows
from kvcache_plugins.eval.measures.answers import read_questions
from kvcache_plugins.models.reference_model import resolve_model


DATA_VARIABLE = "KVCACHE_PLUGINS_DATA"
# First rows that are few-shot examples, if a set has no file for them
NUM_EXAMPLES = 32
_BOOK = "moby_dick/moby_dick.txt"

Row = dict[str, Any]


def load_rows(
    files: Mapping[str, str], hub: Sequence[str], hub_test: str = "test", data_folder: str | None = None, **_: object
) -> DatasetDict:
    """
    Load the splits `train`, for examples, and `test` of a set: from `files` of JSON lines by split (without `train`
    the first rows of `test`), or from the `hub`, by path and name; its name of `test` is `hub_test`.
    """
    folder = _find_folder(data_folder)
    if folder is None:
        rows = _load_from_hub(*hub)
        return DatasetDict({"train": rows["train"], "test": rows[hub_test]})
    splits = {split: read_rows(folder / file, "data_folder") for split, file in files.items()}
    if "train" not in splits:
        splits = {"train": splits["test"][:NUM_EXAMPLES], "test": splits["test"][NUM_EXAMPLES:]}
    return _as_splits(splits)


def _load_from_hub(path: str, name: str | None = None) -> DatasetDict:
    try:
        return load_dataset(path, name)
    except ConnectionError as error:
        raise ValueError(
            f"`data_folder`: {path} is read from the hub, which cannot be reached. Name a folder that holds the set "
            f"by `--metadata data_folder=DIR` or ${DATA_VARIABLE}."
        ) from error


def _find_folder(data_folder: str | None) -> Path | None:
    named = data_folder or os.environ.get(DATA_VARIABLE)
    folder = None if named is None else Path(os.path.expanduser(named))
    if folder is not None and not folder.is_dir():
        raise ValueError(f"`data_folder` is `{named}`, but there is no such folder")
    return folder


def _find_file(data_folder: str | None, file: str) -> Path:
    folder = _find_folder(data_folder)
    if folder is None:
        raise ValueError(
            f"`data_folder`: {file} is on no hub. Name the folder it is in by `--metadata` or ${DATA_VARIABLE}."
        )
    return folder / file


def _as_splits(splits: Mapping[str, Iterable[Row]]) -> DatasetDict:
    return DatasetDict({split: Dataset.from_list(list(rows)) for split, rows in splits.items()})


def gsm8k_examples() -> list[Row]:
    """Return the eight worked examples of lm-eval's own task."""
    path = Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k-cot.yaml"
    return load_yaml(path, resolve_func=False)["fewshot_config"]["samples"]


def load_questions(file: str, data_folder: str | None = None, records: int | None = None, **_: object) -> DatasetDict:
    """Load questions for one of many lines, or for the value of one of many keys; `records` limits their number."""
    # The last character of an answer is where generation stops
    asked = read_questions(_find_file(data_folder, file), records)
    return _as_splits({"test": [{"context": each.context, "answer": each.answer[:-1]} for each in asked]})


def passkey(
    data_folder: str | None = None, text_file: str | None = None, words: int = 1500, questions: int = 20, **_: object
) -> DatasetDict:
    """Make questions for a number in a text, at depths spread evenly from its beginning to its end."""
    path = Path(text_file) if text_file else _find_file(data_folder, _BOOK)
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
) -> DatasetDict:
    """Make samples at places spread over their answers; without `pretrained` a token counts as three characters."""
    count_tokens: Callable[[str], int] = lambda text: len(text) // 3  # noqa: E731
    if pretrained is not None:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(pretrained))
        count_tokens = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
    made = (make_sample(task, count_tokens, length, scored, (i + 0.5) / samples, i) for i in range(samples))
    return _as_splits({"test": [each._asdict() for each in made]})


def score_answer(doc: Row, results: Sequence[tuple[float, bool]]) -> dict[str, object]:
    """Score an answer by its bytes, so that short and long ones compare, and by whether greedy decoding gives it."""
    ((log_likelihood, is_greedy),) = results
    return {"byte_perplexity": (log_likelihood, len(doc["answer"].encode("utf-8"))), "acc": float(is_greedy)}


def wikitext(data_folder: str | None = None, **_: object) -> DatasetDict:
    """Load WikiText-2, with a page in each row."""
    folder = _find_folder(data_folder)
    if folder is None:
        rows = _load_from_hub("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")["test"]
        return _as_splits({"test": rows})
    text = (folder / "wikitext2" / "wiki.test.raw").read_text(encoding="utf-8")
    # A page begins with its title between single equals signs
    pages = re.split(r"(?m)^(?= = [^=\n]+ = *$)", text)
    return _as_splits({"test": [{"page": page} for page in pages if page.strip()]})


def text(text_file: str | None = None, **_: object) -> DatasetDict:
    """Load the user's text, as one row."""
    if text_file is None:
        raise ValueError("`text_file`: name the text to score in `--metadata`")
    return _as_splits({"test": [{"page": Path(os.path.expanduser(text_file)).read_text(encoding="utf-8")}]})


# A page of WikiText as lm-eval's own task has it, and its log-likelihood divided by the words and bytes of that page
detokenize, perplexities = preprocess_wikitext.wikitext_detokenizer, preprocess_wikitext.process_results
