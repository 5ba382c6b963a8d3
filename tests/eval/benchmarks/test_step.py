"""The benchmark of decode steps: contexts that were read, and those that were filled in."""

import json

import pytest
from typer.testing import CliRunner

from kvcache_plugins import cli


@pytest.fixture
def run(tiny_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + number * number % 90) for number in range(300)), encoding="utf-8")

    def invoke(*arguments):
        options = ["--model", tiny_folder, "--text-file", str(text), "--steps", "3", "--json"]
        return CliRunner().invoke(cli.app, ["bench", "step", *options, *arguments])

    return invoke


@pytest.mark.parametrize(("read", "context"), [([], 150), (["--read", "100"], 450)])
def test_every_cache_holds_the_context(run, read, context):
    names = ["dynamic", "gear-4bit", "infinigen"]
    result = run("--context", str(context), *read, *(word for name in names for word in ("--cache", name)))
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert [row["cache"] for row in content["rows"]] == names
    assert [row["stats"]["tokens_cached"] for row in content["rows"]] == [context + 3] * 3
    assert content["settings"].get("read") == (100 if read else None)


def test_a_text_that_is_too_short_is_refused(run):
    result = run("--context", "450", "--cache", "dynamic")
    assert result.exit_code != 0 and "tokens, but 453 are needed" in result.output
