"""Help and version import neither Torch nor Transformers, and say of commands what those say."""

import inspect
import subprocess
import sys
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from kvcache_plugins import cli
from kvcache_plugins.console.commands import read_function


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


def command_at(path: tuple[str, ...]) -> Any:
    command = ROOT
    for name in path:
        command = command.get_command(None, name)
    return command


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


@pytest.mark.parametrize(
    "path", [path for path in walk(ROOT) if hasattr(command_at(path), "lazy_commands")], ids=" ".join
)
def test_a_group_says_of_a_command_how_its_help_begins(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    group = command_at(path)
    shown = CliRunner().invoke(cli.app, [*path, "--help"]).output.partition("Commands:")[2].strip().splitlines()
    lines = dict(line.split(maxsplit=1) for line in shown)
    assert list(lines) == list(group.lazy_commands)
    for name, summary in lines.items():
        # A whole sentence in one line
        assert summary.endswith(".") and not summary.endswith("...")
        assert " ".join(group.get_command(None, name).help.split()).startswith(summary)


def test_a_function_is_read_without_its_module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_module.py").write_text(
        '''
import nothing_of_this_name
from typing import Annotated, Any as Anything
SIZES = [1, 2]
Sizes = Annotated[list[int], "sizes"]

@nothing_of_this_name.decorator
def measure(sizes: Sizes = SIZES, **more: Anything) -> dict[str, Anything]:
    """Measure."""
    return {}
'''
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = read_function("heavy_module:measure")
    parameter = inspect.signature(function).parameters["sizes"]
    assert (parameter.annotation, parameter.default) == (Annotated[list[int], "sizes"], [1, 2])
    assert function.__doc__ == "Measure."
    assert "heavy_module" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        function()
    assert read_function("heavy_module:SIZES") is None
    with pytest.raises(ImportError, match="there is no module none_such"):
        read_function("none_such:measure")


@pytest.mark.parametrize(
    ("words", "message"),
    [("lst", "No such command 'lst'. Did you mean 'list'?"), ("bench kernls", "Did you mean 'kernels'?")],
)
def test_a_misspelt_command_is_suggested(words: str, message: str) -> None:
    result = CliRunner().invoke(cli.app, words.split())
    assert result.exit_code == 2
    assert message in result.stderr
