"""Fixtures of evaluation: commands run in this process on a tiny model and a short text."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvcache_plugins import cli


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
def bench(tiny_folder: str, text_file: Path) -> Callable[..., Result]:
    """Runs a benchmark on the tiny model and the text: `bench("step --context 40")`."""

    def run(words: str, *more: str) -> Result:
        name, *options = words.split()
        given = ["--model", tiny_folder, "--text-file", str(text_file), *options, *more, "--json"]
        return CliRunner().invoke(cli.app, ["bench", name, *given])

    return run


@pytest.fixture
def rows_of(bench: Callable[..., Result]) -> Callable[..., list[dict]]:
    """Runs a benchmark and returns the rows of its result."""

    def run(words: str, *more: str) -> list[dict]:
        result = bench(words, *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["rows"]

    return run


@pytest.fixture
def assert_refused(bench: Callable[..., Result]) -> Callable[[str, str], None]:
    """Checks that a benchmark ends with exit code 2 and one line that says why."""

    def check(words: str, message: str) -> None:
        result = bench(words)
        assert result.exit_code == 2 and message in result.stderr, result.output
        assert result.stderr.splitlines()[-1].startswith("Error: ")

    return check
