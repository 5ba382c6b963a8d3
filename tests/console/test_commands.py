"""Every command has help with examples that work, late imports, errors in one line, and lets pipes close; Ctrl-C at
several moments of its life is one line and 130, whatever is being imported or done.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import typer

from kvcache_plugins import cli
from kvcache_plugins.console.commands import DONE, INTERRUPTED, READER_GONE, USER_ERROR, make_app
from kvcache_plugins.console.interrupts import interrupts_are_ours
from kvcache_plugins.console.results import prepare_file
from kvcache_plugins.models import reference_model
from kvcache_plugins.registry import check_cache, parse_cache_spec


SCRIPT = Path(sys.executable).parent / "kvcache-plugins"
# Without `--json`: what they write is Markdown, a folder of files, lm-eval's or clients' matter, or one number
WITHOUT_JSON = {"bench gpu", "serve", "eval report", "eval run", "eval ls", "eval validate", "store clear"}
HEAVY = ("torch", "transformers", "lm_eval", "rich.table", "matplotlib")


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


@pytest.mark.parametrize("path", TREE)
def test_every_command_has_help_and_examples(path: str, run) -> None:
    own = [line for line in examples(path) if f"kvcache-plugins {path}".strip() in line]
    assert own, f"`{path}` has no example of itself"
    # Click leaves two of a terminal's 80 columns free, and typer's runner does not
    shown = run(*path.split(), "--help", terminal_width=78).stdout
    assert max(map(len, shown.splitlines())) <= 80
    shown = " ".join(shown.replace("\\\n", " ").split())
    assert all(" ".join(line.split()) in shown for line in own)


def parse_example(line: str) -> None:
    """Raises what the console would report."""
    words = shlex.split(line)
    words = words[words.index("kvcache-plugins") + 1 :]
    words = words[: next((index for index, word in enumerate(words) if word in ("|", ">", "&&")), None)]
    named = next(" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in LEAVES)
    given = TREE[named].make_context(named, words[len(named.split()) :]).params.get("cache") or []
    for spec in [given] if isinstance(given, str) else given:
        name, options = parse_cache_spec(spec)
        # The file is one that another example writes
        options.pop("calibration", None)
        check_cache(name, **options)


@pytest.mark.parametrize("line", EXAMPLES)
def test_examples_parse(line: str) -> None:
    parse_example(line)


def test_examples_that_do_not_parse_are_found() -> None:
    with pytest.raises(Exception, match="No such option: --cashe"):
        parse_example("kvcache-plugins compare --cashe gear --prompt x")
    with pytest.raises(ValueError, match="Unknown cache `gaer`"):
        parse_example("cat x | kvcache-plugins compare --cache gaer --prompt x | head")


@pytest.mark.parametrize("path", GROUPS)
def test_groups_show_help(path: str, run) -> None:
    """Show help without arguments too, with the whole first sentence of each command in one line."""
    shown = run(*path.split(), terminal_width=78).stdout
    assert shown == run(*path.split(), "--help", terminal_width=78).stdout and "Examples:" in shown
    lines = dict(line.split(maxsplit=1) for line in shown.partition("Commands:")[2].strip().splitlines())
    assert list(lines) == list(TREE[path].lazy_commands)
    for name, summary in lines.items():
        assert summary.endswith(".") and not summary.endswith("...")
        assert " ".join(TREE[f"{path} {name}".strip()].help.split()).startswith(summary)


def test_all_but_listed_commands_print_json() -> None:
    without = {path for path in LEAVES if "--json" not in [name for each in TREE[path].params for name in each.opts]}
    assert without == WITHOUT_JSON


def test_exit_codes_are_in_the_help(run) -> None:
    lines = [line.split() for line in run("--help").stdout.splitlines()]
    codes = [int(words[0]) for words in lines if words and words[0].isdecimal()]
    assert codes == [DONE, 1, USER_ERROR, INTERRUPTED, READER_GONE]


# One process for all of them: each is a context of the whole program, as a shell's is
IMPORTS = """
import sys
from kvcache_plugins import cli

for line in sys.argv[1:]:
    try:
        cli.app(line.split())
    except SystemExit as ended:
        assert ended.code == 0, (line, ended.code)
    print("imported:", line, *(name for name in {heavy!r} if name in sys.modules), sep="|")
"""


@pytest.fixture
def imported_by(run_python):
    """Says what is imported of what is heavy when lines have been typed, by line."""

    def call(*lines: str) -> dict[str, list[str]]:
        said = run_python("-c", IMPORTS.format(heavy=HEAVY), *lines, timeout=300).stdout.splitlines()
        found = [line.split("|") for line in said if line.startswith("imported:|")]
        return {line: names for _, line, *names in found}

    return call


def test_help_and_version_import_nothing_heavy(imported_by) -> None:
    lines = ["--version", *(f"{path} --help" for path in TREE)]
    found = imported_by(*lines)
    assert list(found.values()) == [[]] * len(lines) and len(lines) > 25


def test_unexpected_imports_of_a_command_are_detected(imported_by) -> None:
    assert {"torch", "transformers"} <= {*imported_by("list fp8")["list fp8"]}


# Torch reads the variable when it is loaded: print its value then, and load nothing
WAITING = """
import importlib, os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"))
            os._exit(0 if sys.stdout.flush() is None else 1)

sys.meta_path.insert(0, Watch())
module, name, *sys.argv[1:] = sys.argv[1:]
getattr(importlib.import_module(module), name)()
"""


@pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize(
    "words",
    ["kvcache_plugins.cli main doctor", "kvcache_plugins.cli main list", "kvcache_plugins.eval.__main__ app ls tasks"],
)
def test_waiting_threads_sleep_by_default(words, own, expected, run_python) -> None:
    assert run_python("-c", WAITING, *words.split(), OMP_WAIT_POLICY=own).stdout == f"{expected}\n"


def test_only_commands_with_results_have_result_options(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_commands.py").write_text(
        '''
def measure(size: int = 3) -> dict[str, int]:
    """Measure."""
    return {"size": size}

def show(size: int = 3) -> None:
    """Show."""
'''
    )
    monkeypatch.syspath_prepend(tmp_path)
    targets = {"measure": "some_commands:measure", "show": "some_commands:show", "none": "none_such:measure"}
    group = typer.main.get_command(make_app(targets, "Help."))
    names = {name: [each.name for each in group.get_command(None, name).params] for name in ("measure", "show")}
    assert names == {"measure": ["size", "out", "as_json"], "show": ["size"]}
    with pytest.raises(SystemExit):
        group(["measure", "--size", "5", "--out", str(tmp_path / "folder" / "results.json")])
    assert json.loads((tmp_path / "folder" / "results.json").read_text()) == {"size": 5}
    with pytest.raises(ModuleNotFoundError, match="none_such"):
        group.get_command(None, "none")


# Command lines, where `MODEL` stands for a tiny model's folder and `TEXT` for a short text's file; and the messages
WRONG = {
    "lst": "No such command 'lst'. Did you mean 'list'?",
    "bench kernls": "No such command 'kernls'. Did you mean 'kernels'?",
    "list --jsn": "No such option: --jsn",
    "bench step --jsn": "bench step --help`)",
    "list a b": "Got unexpected extra argument",
    "list no-such*": "No cache matches `no-such*`. See `kvcache-plugins list`",
    "compare --max-new-tokens many": "Invalid value for '--max-new-tokens'",
    "compare --cache": "Option '--cache' requires an argument",
    "calibrate --cache infinigen --out file": "`text_file` has to be given with `cache` infinigen",
    "calibrate --cache infinigen --text-file TEXT": "`out` has to be given with `cache` infinigen",
    "calibrate --text-file TEXT --out /proc/a": "/proc/a",
    "calibrate --rank 8": "`rank` and `min_recall` are of `cache` infinigen",
    "plan --world-size 1 --lengths 64 --out /proc/a": "/proc/a",
    "bench kernels --out /proc/a.json": "/proc/a.json",
    "bench kernels --out /tmp": "`out` is to be a file, but",
    "bench kernels --out TEXT/p.json": "exists",
    "bench step --cache dynamic": "`text_file` has to be given, or `shape`",
    "bench step --steps 1": "Invalid value for '--steps'",
    "bench step --context -1 --cache transform --text-file TEXT": "'--context'",
    "bench step --model MODEL --cache dynamic --text-file TEXT": "the text has 159 tokens, but 4136 are needed",
    "bench kernels --context 0": "'--context'",
    "bench kernels --head-dim 63": "`head_dim` has to be even",
    "bench kernels --cache transform:": "has the form `name`",
    "bench kernels --dtype int4": "`dtype` must be one of `float32`",
    "bench kernels --device gpu": "`device` must be one that torch knows",
    "eval fidelity --cache transform": "Missing option '--text-file'",
    "eval fidelity --windows 0 --cache transform --text-file TEXT": "'--windows'",
    "eval order --order turns:3 --cache transform --text-file TEXT": "`order` has to be `prompt`, `turn:N` or",
    "generate --prompt x --temperature 0": "`temperature` has to be a number above 0",
    "generate --prompt x --temperature nan": "`temperature` has to be a number above 0",
    "generate --prompt x --max-kl 0": "`max_kl` has to be a number above 0",
    "generate --prompt x --seed -1": "Invalid value for '--seed'",
    "generate --prompt x --device meta": "`device` is `meta`",
    "generate --prompt x --cache ''": "has the form `name`",
    "generate --prompt x --cache gear:nbits=2,nbits=4": "each option once",
    "generate --prompt x --model smollm": "did you mean `smollm2`?",
    "generate --prompt x --model /no/such": "`model` is `/no/such`, but there is no such folder",
    "generate --prompt x --model /tmp": "`model` is the folder `/tmp`, but there is no `config.json` in it",
    "generate --prompt x --cache transform:rnk=2": "Unknown option `rnk` for the cache `transform`",
    "generate --prompt x --cache gear:rank": "`key=value`",
    "generate --prompt x --cache gear:nbits=5": "`nbits`",
    "generate --prompt x --max-kl .1 --cache transform": "`max_kl` chooses the cache",
    "generate --prompt x --max-kl .1 --store s": "`store` keeps prompts by the cache",
    "recommend --memory 8q --context 5": "`memory` has to be a number of bytes",
    "recommend --memory 1GB --context 5 --host-memory much": "`host_memory` has to be a number of bytes",
    "recommend --memory 1GB --context 5 --model /no/such": "`model` is `/no/such`, but there is no such folder",
    "recommend --memory 1GB --context 0": "Invalid value for '--context'",
    "recommend --memory 1GB --context 5 --cache gaer": "Unknown cache `gaer`. Did you mean `gear`? See `kvcache",
    "recommend --memory 1GB --context 5 --dtype int4": "`dtype` must be one of `float32`",
    "recommend --memory 1GB --context 5 --device gpu": "`device` has to be one of ['cuda', 'cpu']",
    "recommend --memory 1GB --context 99999999": "`context` has to be at most 16777216",
    "recommend --memory 1GB --context 5 --new-tokens 5": "they have to be fewer than 5 but are 5",
}
WRONG |= {
    f"{command} --model MODEL {words}": message
    for command in ("generate", "compare")
    for words, message in {
        "--cache gaer --prompt x": "Unknown cache `gaer`. Did you mean `gear`? See `kvcache",
        "--prompt-file no-such-file": "`prompt_file`: no-such-file cannot be read (No such file or directory)",
        "": "Give a prompt with `--prompt`, `--prompt-file` or both",
        "--prompt ''": "The prompt is empty",
        "--prompt x --max-new-tokens 0": "Invalid value for '--max-new-tokens'",
        "--prompt x --dtype int4": "`dtype` must be one of `float32`, `bfloat16`, `float16`",
        "--prompt x --device gpu": "`device` must be one that torch knows",
        "--prompt x --chat": "`chat` needs a tokenizer with a chat template",
    }.items()
}


@pytest.mark.parametrize(("line", "message"), WRONG.items(), ids=WRONG)
def test_errors_of_the_user_are_one_line(line: str, message: str, refuse, tiny_folder: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 3)
    text = str(tmp_path / "text.txt")
    refuse(message, *(word.replace("MODEL", tiny_folder).replace("TEXT", text) for word in shlex.split(line)))


READERS = ["bench step", "bench prompts", "eval fidelity", "eval perplexity", "eval order --order prompt"]


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what modules of commands import by name: one that is first imported here would keep it
    monkeypatch.setattr(reference_model, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.mark.parametrize("command", ["generate", "compare", *READERS])
def test_caches_are_checked_before_a_model_is_loaded(command: str, no_model_is_loaded: None, refuse) -> None:
    text = ["--text-file", "LICENSE"] if command in READERS else ["--prompt", "x"]
    for cache in ("gaer", "gear:rnk=1", "gear:nbits=5", "gear:"):
        refuse(cache.partition(":")[0], *command.split(), *text, "--cache", cache)


@pytest.mark.parametrize("command", [*READERS, "generate"])
def test_texts_are_read_before_a_model_is_loaded(command, no_model_is_loaded, tmp_path, refuse):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n")
    wrong = {"binary": "binary is no text in UTF-8 (byte 0:", "nothing": "nothing", "empty": "there is no text in "}
    option = "--text-file" if command in READERS else "--prompt-file"
    for name, message in list(wrong.items())[: 3 if command in READERS else 2]:
        refuse(message, *command.split(), "--cache", "transform", option, str(tmp_path / name))


def test_a_store_is_opened_before_a_model_is_loaded(no_model_is_loaded, tmp_path, refuse):
    (tmp_path / "file").touch()
    refuse("`store`: ", "generate", "--prompt", "x", "--store", str(tmp_path / "file"))
    refuse("`store` keeps presets of", "generate", "--prompt", "x", "--cache", "h2o", "--store", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    prepare_file(tmp_path / "old.json")
    prepare_file(tmp_path / "new" / "new.json")
    assert (tmp_path / "old.json").read_text() == "{}"
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["list"], ["list", "--json"], ["bench"]], ids=" ".join)
def test_a_closed_pipe_is_no_error(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kvcache-plugins", *arguments])
    # Standard output whose reader has gone, in this process
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as ended:
            cli.app()
        assert ended.value.code == READER_GONE
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_long_work_with_one_line(tiny_folder: str) -> None:
    arguments = ["compare", "--model", tiny_folder, "--prompt", "x" * 300, "--max-new-tokens", "7000"]
    process = subprocess.Popen(
        [SCRIPT, *arguments, "--cache", "dynamic"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    said = ""
    # The command announces what it begins: from here on it takes minutes
    while not said.endswith("] dynamic\n"):
        line = process.stderr.readline()
        assert line, f"ended too early: {said}"
        said += line
    process.send_signal(signal.SIGINT)
    rest, output = process.stderr.read(), process.stdout.read()
    assert process.wait(timeout=600) == INTERRUPTED
    assert (rest, output) == ("Interrupted\n", "")


# Python says of each module when it is imported: so a moment is one for certain, however busy the machine is
COMMAND = [sys.executable, "-X", "importtime", "-m", "kvcache_plugins.cli"]
MOMENTS = {
    "typer": "typer",
    "the root": "kvcache_plugins.cli.root",
    "inside torch": "torch._C",
    "late in torch": "torch.nn.functional",
    "inside transformers": "transformers.utils.logging",
}


def interrupt_at(module: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit code and standard error of a command that gets Ctrl-C when `module` has been imported."""
    process = subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    said = []
    is_sent = False
    for line in process.stderr:
        if not line.startswith("import time:"):
            said.append(line)
        elif line.split("|")[-1].strip() == module and not is_sent:
            process.send_signal(signal.SIGINT)
            is_sent = True
    code = process.wait(timeout=600)
    assert is_sent, f"{module} was never imported"
    return code, said


@pytest.mark.parametrize("module", MOMENTS.values(), ids=MOMENTS)
def test_ctrl_c_during_imports_ends_with_one_line(module: str) -> None:
    code, said = interrupt_at(module, "doctor")
    assert (code, said) == (INTERRUPTED, ["Interrupted\n"])


# In a process of its own: a handler is a process's
IN_PYTHON = """
import os, signal, sys, time
from kvcache_plugins import cli
from kvcache_plugins.console import interrupts
{before}
interrupts.end_at_interrupt()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(20)
except KeyboardInterrupt:
    print("closed")
{after}
"""


AT_THE_END = "interrupts.end_at_once()\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(20)"
IGNORING = "signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep = lambda _: None"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # Outside of imports what is open is closed
        ("", "", (0, "closed\n", "")),
        ("", AT_THE_END, (INTERRUPTED, "closed\n", "Interrupted\n")),
        # A process that ignores it still does
        (IGNORING, "print('went on')", (0, "went on\n", "")),
    ],
    ids=["outside", "at the end", "ignored"],
)
def test_ctrl_c_before_and_after_imports_is_handled(before: str, after: str, expected: tuple[int, str, str]) -> None:
    code = IN_PYTHON.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_child_processes_ignore_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_are_ours():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before

    # Handlers belong to the main thread: in another nothing is touched
    def look() -> object:
        with interrupts_are_ours():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(look).result() is before
