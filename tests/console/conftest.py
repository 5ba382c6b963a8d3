"""Commands run in this process, and what holds of a user's error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from kvcache_plugins import cli


SCHEMAS = Path(__file__).parent / "schemas"


@pytest.fixture
def run() -> Callable[..., Result]:
    """Runs a command line, given as words, and checks what it exits with."""

    def call(*words: str, code: int | None = 0, **options: Any) -> Result:
        result = CliRunner().invoke(cli.app, list(words), **options)
        assert code is None or result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def read(run: Callable[..., Result]) -> Callable[..., Any]:
    """Runs a command line with `--json` and reads standard output, which holds one document and nothing else."""

    def call(*words: str, schema: str | None = None, **options: Any) -> Any:
        content = json.loads(run(*words, "--json", **options).stdout)
        if schema is not None:
            described = json.loads((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8"))
            jsonschema.validate(content, described, cls=jsonschema.Draft202012Validator)
        return content

    return call


@pytest.fixture
def refuse(run: Callable[..., Result]) -> Callable[..., None]:
    """Runs a command line whose error is the user's: one line on standard error, with `message` in it."""

    def call(message: str, *words: str) -> None:
        result = run(*words, code=2)
        last = result.stderr.splitlines()[-1]
        assert last.startswith("Error: ") and message in last
        assert result.stdout == "" and "Traceback" not in result.stderr

    return call
