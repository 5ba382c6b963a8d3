"""What holds for every command: help with examples that work, errors in one line, exit codes, pipes that close."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvcache_plugins import cli
from kvcache_plugins.console.commands import DONE, INTERRUPTED, READER_GONE, USER_ERROR
from kvcache_plugins.registry import check_cache, parse_cache_spec


SCRIPT = Path(sys.executable).parent / "kvcache-plugins"
# Without `--json`: what they write is Markdown, a folder of files, lm-eval's matter, or one number
WITHOUT_JSON = {"bench gpu", "eval report", "eval run", "eval ls", "eval validate", "store clear"}


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command and group by its words, the whole program as an empty text."""
    yield " ".join(path), command
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from walk(command.get_command(None, name), (*path, name))


TREE = dict(walk(typer.main.get_command(cli.app)))
GROUPS = [path for path, command in TREE.items() if hasattr(command, "list_commands")]
LEAVES = [path for path in TREE if path not in GROUPS]


def examples(path: str) -> list[str]:
    """The command lines below `Examples:` in a command's help, those that go on with a backslash joined."""
    text = TREE[path].help.replace("\\\n", " ")
    found = re.search(r"\n\s*Examples?:\n((?:[ ]+\S.*(?:\n|$))+)", text)
    return [] if found is None else [" ".join(line.split()) for line in found.group(1).splitlines()]


EXAMPLES = list(dict.fromkeys(line for path in TREE for line in examples(path)))


def run(*arguments: str, **options: Any) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), **options)


def assert_one_line_error(result: Result, message: str) -> None:
    assert result.exit_code == USER_ERROR, result.output
    assert result.stderr.startswith("Error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def words_after_program(line: str) -> list[str]:
    """The arguments of the program in a shell line with pipes, redirections and variables around it."""
    words = shlex.split(line)
    words = words[words.index("kvcache-plugins") + 1 :]
    ends = [index for index, word in enumerate(words) if word in ("|", ">", "&&")]
    return words[: ends[0]] if ends else words


def test_the_tree_is_walked() -> None:
    assert GROUPS == ["", "store", "bench", "eval"]
    assert {"list", "doctor", "generate", "compare", "calibrate", "plan", "bench kernels", "eval run"} <= {*LEAVES}


@pytest.mark.parametrize("path", TREE)
def test_every_command_has_help_and_examples(path: str) -> None:
    own = [line for line in examples(path) if f"kvcache-plugins {path}".strip() in line]
    assert own, f"`{path}` has no example of itself"
    result = run(*path.split(), "--help")
    assert result.exit_code == DONE
    assert all(" ".join(line.split()) in " ".join(result.stdout.replace("\\\n", " ").split()) for line in own)


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_parse(line: str) -> None:
    words = words_after_program(line)
    named = next(" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in LEAVES)
    command = TREE[named]
    rest = words[len(named.split()) :]
    # Raises what the console would report
    context = command.make_context(named, rest)
    given = context.params.get("cache") or []
    for spec in [given] if isinstance(given, str) else given:
        name, options = parse_cache_spec(spec)
        # Of a file that another example writes
        options.pop("calibration", None)
        check_cache(name, **options)


def test_examples_that_do_not_parse_are_found() -> None:
    with pytest.raises(Exception, match="No such option: --cashe"):
        test_examples_parse("kvcache-plugins compare --cashe gear --prompt x")
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        test_examples_parse("cat x | kvcache-plugins compare --cache gaer --prompt x | head")


@pytest.mark.parametrize("path", GROUPS)
def test_no_arguments_show_help(path: str) -> None:
    result = run(*path.split())
    assert result.exit_code == DONE
    assert result.stdout == run(*path.split(), "--help").stdout
    assert "Examples:" in result.stdout


def test_commands_that_find_something_print_json() -> None:
    without = {path for path in LEAVES if "--json" not in [name for each in TREE[path].params for name in each.opts]}
    assert without == WITHOUT_JSON


def test_exit_codes_are_in_the_help() -> None:
    lines = [line.split() for line in run("--help").stdout.splitlines()]
    codes = [int(words[0]) for words in lines if words and words[0].isdecimal()]
    assert codes == [DONE, 1, USER_ERROR, INTERRUPTED, READER_GONE]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lst"], "No such command 'lst'"),
        (["list", "--jsn"], "No such option: --jsn"),
        (["bench", "step", "--jsn"], "bench step --help`)"),
        (["list", "a", "b"], "Got unexpected extra argument"),
        (["compare", "--max-new-tokens", "many"], "Invalid value for '--max-new-tokens'"),
        (["compare", "--cache"], "Option '--cache' requires an argument"),
        (["calibrate", "--out", "file"], "`text_file` has to be given with `cache` infinigen"),
        (["calibrate", "--text-file", "LICENSE"], "`out` has to be given with `cache` infinigen"),
        (["bench", "kernls"], "No such command 'kernls'"),
        (["bench", "step", "--steps", "1"], "Invalid value for '--steps'"),
        (["eval", "fidelity", "--cache", "gear"], "Missing option '--text-file'"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str) -> None:
    assert_one_line_error(run(*arguments), message)


def test_out_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ["bench", "predict", "--bandwidth", "1"]
    assert_one_line_error(run(*options, "--out", str(tmp_path)), "`out` is to be a file, but")
    assert_one_line_error(run(*options, "--out", str(tmp_path / "file" / "p.json")), "exists")


class OutputOfClosedPipe:
    """Standard output whose reader has gone, in this process."""

    def __enter__(self) -> io.TextIOWrapper:
        reader, writer = os.pipe()
        os.close(reader)
        self.stream = os.fdopen(writer, "w")
        return self.stream

    def __exit__(self, *_: object) -> None:
        self.stream.close()


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json"], ["bench"]], ids=" ".join)
def test_a_closed_pipe_is_no_error(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kvcache-plugins", *arguments])
    with OutputOfClosedPipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            cli.app()
        assert ended.value.code == READER_GONE
    assert capsys.readouterr().err == ""


def test_the_console_script_survives_head() -> None:
    process = subprocess.Popen([SCRIPT, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == READER_GONE


def test_ctrl_c_ends_long_work_with_one_line(tiny_folder: str) -> None:
    arguments = ["compare", "--model", tiny_folder, "--prompt", "x" * 300, "--max-new-tokens", "7000"]
    process = subprocess.Popen(
        [SCRIPT, *arguments, "--cache", "dynamic"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    said = ""
    # What it does is announced when it begins: from here on it takes minutes
    while not said.endswith("] dynamic\n"):
        line = process.stderr.readline()
        assert line, f"ended by itself: {said}"
        said += line
    process.send_signal(signal.SIGINT)
    rest, output = process.stderr.read(), process.stdout.read()
    assert process.wait(timeout=120) == INTERRUPTED
    assert rest == "Interrupted\n"
    assert output == ""
