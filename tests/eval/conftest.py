"""Fixtures of evaluation: commands run in this process on a tiny model and a short text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text of 3000 characters that does not repeat itself; of the tiny tokenizer each is a token."""
    path = tmp_path / "text.txt"
    path.write_text("".join(chr(33 + number * number % 90) for number in range(3000)), encoding="utf-8")
    return path


class Characters:
    """A tokenizer of one ASCII character a token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> "Characters":
        self.input_ids = [ord(character) for character in text]
        return self

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


@pytest.fixture
def characters() -> Characters:
    """Makes a tokenizer of one ASCII character a token."""
    return Characters()


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Writes rows with a `text` each, and makes a task of lm-eval of them, of multiple choice; the first is right."""

    def make(name: str, rows: list[dict[str, Any]], choices: list[str], **fields: Any) -> dict[str, Any]:
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        files = {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "hf")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        task |= {"output_type": "multiple_choice", "doc_to_text": "text", "doc_to_choice": choices}
        return {**task, "doc_to_target": 0, "metric_list": [{"metric": "acc"}], **fields}

    return make


@pytest.fixture
def bench(tiny_folder: str, text_file: Path) -> Callable[..., list[str]]:
    """Makes the words of a benchmark on the tiny model and the text: `bench("step --context 40")`."""

    def words(line: str, *more: str) -> list[str]:
        name, *options = line.split()
        return ["bench", name, "--model", tiny_folder, "--text-file", str(text_file), *options, *more]

    return words


@pytest.fixture
def rows_of(bench: Callable[..., list[str]], read: Callable[..., Any]) -> Callable[..., list[dict]]:
    """Runs a benchmark and returns the rows of its result."""
    return lambda line, *more: read(*bench(line, *more))["rows"]


@pytest.fixture
def assert_refused(bench: Callable[..., list[str]], refuse: Callable[..., None]) -> Callable[[str, str], None]:
    """Checks that a benchmark ends with exit code 2 and one line that says why."""
    return lambda line, message: refuse(message, *bench(line), "--json")
