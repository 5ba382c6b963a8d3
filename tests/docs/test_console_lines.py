"""Every console line of the README and of `docs/` is one that can be typed: commands, options, caches and files exist.

Lines are parsed by the commands' own parsers, up to the point where a command would begin to work. In blocks of a
shell (`bash`) every line has to be known; in unmarked blocks, which also hold file trees, those that begin like a
command.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from sybil import Document
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from kvcache_plugins.cli import app
from kvcache_plugins.cli.evaluate import LM_EVAL_COMMANDS
from kvcache_plugins.eval.tasks import task_files
from kvcache_plugins.lazy_imports import load
from kvcache_plugins.registry import check_cache, parse_cache_spec, parse_option


ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```" in path.read_text(encoding="utf-8")
]
SHELLS = ("bash", "console", "sh", "shell")
# Options of launchers before `-m MODULE`; what follows the module is ours
LAUNCHERS = {"torchrun": ("--nproc-per-node", "--nproc_per_node"), "accelerate": ("--num-processes", "--multi_gpu")}
MODULES = {
    "kvcache_plugins.kv_runahead": "kvcache_plugins.kv_runahead.__main__:main",
    "kvcache_plugins.eval.tables": "kvcache_plugins.eval.tables:main",
    "kvcache_plugins.eval.gpu": "kvcache_plugins.eval.gpu:run_on_gpu",
}
# Modules without options
BARE_MODULES = ("kvcache_plugins.contract",)
SCRIPTS = ("docs/figures/draw.py",)
# Known to every shell, or not this project's
OTHERS = ("cat", "cd", "export", "git")


def console_lines(text: str) -> Iterator[str]:
    """Commands in the fenced blocks of a page, continued lines joined, comments and redirections left off."""
    for region in FencedCodeBlockLexer(r".*", mapping={"language": "language", "source": "source"})(
        Document(text, "page.md")
    ):
        language, source = region.lexemes["language"].strip(), str(region.lexemes["source"])
        for line in source.replace("\\\n", " ").splitlines():
            for command in split_commands(line) if language in SHELLS or not language else ():
                is_known = command[0] in HANDLERS or command[0] in OTHERS
                if language in SHELLS or is_known:
                    yield shlex.join(command)


def split_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line: comments, settings of the environment and redirections left off."""
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.commenters = "#"
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        # An apostrophe of prose
        return
    command: list[str] = []
    is_target = False
    for word in [*words, ";"]:
        if set(word) <= set("|&;"):
            if command:
                yield command
            command = []
        elif set(word) <= set("<>"):
            is_target = True
        elif is_target or (not command and re.fullmatch(r"\w+=.*", word)):
            is_target = False
        else:
            command.append(word)


def check_line(line: str) -> None:
    """Raises whatever the command's parser raises, or an `AssertionError` for what is not there."""
    words = shlex.split(line)
    if words[0] not in OTHERS:
        HANDLERS[words[0]](words[1:])


def check_kvcache_plugins(words: list[str]) -> None:
    if words and words[0] == "eval" and words[1:2] and (words[1] in LM_EVAL_COMMANDS or words[1].startswith("-")):
        check_lm_eval(words[1:])
    else:
        parse(typer.main.get_command(app), words)


def parse(command: typer.core.TyperCommand, words: list[str]) -> None:
    """Parses words as a command or, in a group, as one of its subcommands, which are not called."""
    if words in (["--help"], ["--version"]):
        return
    context = command.make_context("kvcache-plugins", list(words))
    while hasattr(context.command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        if not left:
            return
        name, command, left = context.command.resolve_command(context, left)
        if left == ["--help"]:
            return
        context = command.make_context(name, left, parent=context)
    check_values(context.params)


def check_values(params: dict[str, object]) -> None:
    """Caches and their options are known."""
    caches = params.get("cache") or []
    for spec in [caches] if isinstance(caches, str) else caches:
        name, own = parse_cache_spec(spec)
        # Of a file that another line writes
        own.pop("calibration", None)
        check_cache(name, **own)


def check_lm_eval(words: list[str]) -> None:
    """lm-eval's options are known to lm-eval, our tasks to us, and the cache and its options to the registry."""
    from lm_eval._cli.ls import List
    from lm_eval._cli.run import Run
    from lm_eval._cli.validate import Validate

    parser = argparse.ArgumentParser(exit_on_error=False)
    commands = parser.add_subparsers()
    for command in (Run, List, Validate):
        command.create(commands)
    if words[0] not in LM_EVAL_COMMANDS:
        words = ["run", *words]
    arguments = vars(parser.parse_args(words))
    if words[0] != "run":
        return
    tasks = arguments["tasks"]
    for task in tasks.split(",") if isinstance(tasks, str) else tasks:
        assert not task.startswith("kv_") or task in task_files(), task
    given = arguments["model_args"]
    pairs = dict(parse_option(pair) for pair in given.split(",")) if isinstance(given, str) else dict(given)
    own = ("cache_mode", "cache_chunk", "cache_check")
    options = {
        name.removeprefix("cache_"): value
        for name, value in pairs.items()
        if name.startswith("cache_") and name not in own
    }
    if "cache" in pairs:
        name, named = parse_cache_spec(str(pairs["cache"]))
        check_cache(name, **{**named, **options})


def check_launcher(launcher: str, words: list[str]) -> None:
    words = words[1:] if launcher == "accelerate" and words[0] == "launch" else words
    index = words.index("-m")
    for word in words[:index]:
        assert not word.startswith("-") or word in LAUNCHERS[launcher], f"{launcher} {word}"
    check_module(words[index + 1], words[index + 2 :])


def check_python(words: list[str]) -> None:
    words = [word for word in words if word != "-P"]
    if words[0] != "-m":
        assert words[0] in SCRIPTS and (ROOT / words[0]).is_file(), words[0]
    elif words[1] == "pip":
        check_pip(words[2:])
    else:
        check_module(words[1], words[2:])


def check_module(name: str, words: list[str]) -> None:
    if name in BARE_MODULES:
        assert not words, words
        import_module(name)
        return
    if name == "kvcache_plugins.eval":
        check_lm_eval(words)
        return
    command = typer.Typer(add_completion=False)
    command.command()(load(MODULES[name]))
    parse(typer.main.get_command(command), words)


def check_pip(words: list[str]) -> None:
    """Extras that are asked for are declared."""
    assert words[0] == "install", words
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for word in words[1:]:
        match = re.fullmatch(r"(?:\.|kvcache-plugins)\[(?P<extras>[\w,-]+)\]", word)
        for extra in match["extras"].split(",") if match else ():
            assert re.search(rf"^{extra} = \[", declared, re.MULTILINE), extra


def check_make(words: list[str]) -> None:
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        assert "=" in word or re.search(rf"^{word}:", targets, re.MULTILINE), word


HANDLERS = {
    "kvcache-plugins": check_kvcache_plugins,
    "torchrun": lambda words: check_launcher("torchrun", words),
    "accelerate": lambda words: check_launcher("accelerate", words),
    "python": check_python,
    "python3": check_python,
    "pip": check_pip,
    "make": check_make,
}


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_a_page_can_be_typed(page):
    for line in console_lines((ROOT / page).read_text(encoding="utf-8")):
        try:
            check_line(line)
        except Exception as error:
            # A parser says what is wrong, and not where it stands
            error.add_note(f"{page}: {line}") if hasattr(error, "add_note") else None
            raise


def test_lines_are_found_and_cut():
    shell = "```bash\nA=1 kvcache-plugins list 'gear*' > out.txt  # all\nmake \\\n  test | cat\n```"
    tree = "```\nsrc/\nmake demo\n```"
    assert list(console_lines(f"{shell}\n\n{tree}")) == [
        "kvcache-plugins list 'gear*'",
        "make test",
        "cat",
        "make demo",
    ]


LM_EVAL = "kvcache-plugins eval run --model kvcache"
WRONG = {
    "an option": "kvcache-plugins generate --kache gear",
    "a value": "kvcache-plugins compare --max-new-tokens many",
    "a missing option": "kvcache-plugins plan --world-size 2",
    "a command": "kvcache-plugins compress",
    "a subcommand": "kvcache-plugins bench nothing",
    "a cache": "kvcache-plugins compare --cache geer-2bit",
    "an option of a cache": "kvcache-plugins compare --cache gear-2bit:ranks=4",
    "an option of lm-eval": f"{LM_EVAL} --model_args cache=gear --tasks kv_copa --limits 4",
    "a task": f"{LM_EVAL} --model_args cache=gear --tasks kv_nothing",
    "a cache of lm-eval": f"{LM_EVAL} --model_args cache=gear,cache_ranks=2 --tasks kv_copa",
    "a module's option": "torchrun --nproc-per-node 2 -m kvcache_plugins.kv_runahead --prompt x --hops 4",
    "a launcher's option": "torchrun --nothing 2 -m kvcache_plugins.kv_runahead --prompt x",
    "a module": "python -m kvcache_plugins.nothing",
    "a script": "python docs/figures/nothing.py",
    "an extra": "pip install 'kvcache-plugins[nothing]'",
    "a target": "make nothing",
    "a program": "kvcache list",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_line_fails(line):
    with pytest.raises((Exception, SystemExit)):
        check_line(line)
