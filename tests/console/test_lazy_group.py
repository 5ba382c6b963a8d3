"""Help and version import neither Torch nor Transformers, and say of commands what those say."""

import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvcache_plugins import cli


HEAVY = ("torch", "transformers", "lm_eval", "rich.table", "matplotlib")
ROOT = typer.main.get_command(cli.app)
# One process for all of them: each is a context of the whole program, as a shell's is
SCRIPT = """
import sys
from kvcache_plugins import cli

def call(words):
    try:
        cli.app(words)
    except SystemExit as ended:
        assert ended.code == 0, (words, ended.code)

for line in sys.argv[1:]:
    call(line.split())
    print("imported:", line, *(name for name in {heavy!r} if name in sys.modules), sep="|")
"""


def walk(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    names = command.list_commands(None) if hasattr(command, "list_commands") else ()
    return [path, *(each for name in names for each in walk(command.get_command(None, name), (*path, name)))]


def imported_by(*lines: str) -> dict[str, list[str]]:
    arguments = [sys.executable, "-c", SCRIPT.format(heavy=HEAVY), *lines]
    finished = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    found = [line.split("|") for line in finished.stdout.splitlines() if line.startswith("imported:|")]
    return {line: names for _, line, *names in found}


def test_help_and_version_import_nothing_heavy() -> None:
    lines = ["--version", *(" ".join([*path, "--help"]) for path in walk(ROOT))]
    found = imported_by(*lines)
    assert found == dict.fromkeys(lines, [])
    assert len(lines) > 25


def test_the_list_needs_no_transformers() -> None:
    found = imported_by("list gear* --json", "list gear*", "list")
    assert not {"torch", "transformers"} & {*found["list gear*"]}
    # Whether there is a GPU only Torch can tell: what is imported is noticed
    assert "torch" in found["list"] and "transformers" not in found["list"]


@pytest.mark.parametrize("path", [path for path in walk(ROOT) if path], ids=" ".join)
def test_a_group_says_of_a_command_what_it_says_of_itself(path: tuple[str, ...]) -> None:
    group = ROOT
    for name in path[:-1]:
        group = group.get_command(None, name)
    summary = group.lazy_commands[path[-1]].summary
    own = " ".join(group.get_command(None, path[-1]).help.split())
    assert own.startswith(summary)
    # One line of a terminal of 80 columns
    assert len(summary) <= 80 - 2 - max(map(len, group.lazy_commands)) - 2


@pytest.mark.parametrize(
    ("words", "message"),
    [("lst", "No such command 'lst'. Did you mean 'list'?"), ("bench kernls", "Did you mean 'kernels'?")],
)
def test_a_misspelt_command_is_suggested(words: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 2
    assert message in result.stderr
