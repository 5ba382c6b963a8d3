"""Every path and dotted name of this project that a document mentions leads somewhere, and pages recommend alike.
Every block of Python in the README and in `docs/` runs, and every console line is one that can be typed.
"""

import argparse
import doctest
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import typer
from sybil import Document, Example, Sybil
from sybil.evaluators.python import PythonEvaluator, pad
from sybil.parsers.markdown import CodeBlockParser
from sybil.parsers.markdown.lexers import FencedCodeBlockLexer

from kvcache_plugins import list_caches
from kvcache_plugins.cli import app
from kvcache_plugins.cli.evaluate import LM_EVAL_COMMANDS
from kvcache_plugins.eval.tasks import task_files
from kvcache_plugins.lazy_imports import load
from kvcache_plugins.registry import check_cache, parse_cache_spec, parse_option


ROOT = Path(__file__).resolve().parents[2]
# Folders that paths in documents may be relative to
STARTS = (ROOT, ROOT / "src" / "kvcache_plugins", ROOT / "triton_kernels", ROOT / "eval")
TOP_FOLDERS = ("src", "eval", "triton_kernels", "tests", "docs", "notebooks")
# Columns of a line of code; `docs/layout.md` is a drawn tree
CODE_WIDTH = 88
# Made by a command, or of a user's own cache
NOT_KEPT = {"site/", "build/"}
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name != "changelog.md"
] + ["eval/results/contract_grid.md"]

_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
_BARE_FILE = re.compile(r"[\w*]+\.(?:py|yaml|ipynb)")
_IN_BLOCK = re.compile(rf"(?<![\w./-])((?:{'|'.join(TOP_FOLDERS)})/[\w./*-]*[\w*/])")
_DOTTED = re.compile(r"kvcache_plugins(?:\.\w+)+")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def exists(path: str, page: Path) -> bool:
    """Return True if a path or pattern leads to a file or folder from one of the usual starts."""
    folders = (*STARTS, page.parent)
    return any(next(iter(folder.glob(path.rstrip("/"))), None) is not None for folder in folders)


def mentioned_paths(text: str) -> Iterator[str]:
    """Paths in backticks that have a folder in them, and those in fenced blocks that start with a folder of ours."""
    prose = _FENCE.sub("", text)
    for span in _SPAN.findall(prose):
        if "/" not in span or "..." in span or not _PATH.fullmatch(span):
            continue
        is_file = Path(span).suffix in (".py", ".yaml", ".ipynb")
        if is_file or span.endswith("/") or span.partition("/")[0] in TOP_FOLDERS:
            yield span
    for block in _FENCE.findall(text):
        yield from _IN_BLOCK.findall(block)


def tree_entries(block: str) -> Iterator[tuple[str, list[str]]]:
    """Each line of a drawn tree: the path in front, and the files that the text behind it names."""
    parents: list[tuple[int, str]] = []
    for line in block.splitlines():
        match = re.match(r"(\s*)([\w./, *-]+?)(?:\s{2,}(.*))?$", line)
        if not match or not match[2].strip():
            continue
        indent = len(match[1])
        if indent > 20:
            # The text of the line above goes on
            continue
        while parents and parents[-1][0] >= indent:
            parents.pop()
        names = [name.strip() for name in match[2].split(",") if name.strip(" .")]
        prefix = "".join(parent for _, parent in parents)
        for name in names:
            yield prefix + name, re.findall(r"[\w*]+\.(?:py|md)", match[3] or "")
        if match[2].endswith("/"):
            parents.append((indent, match[2]))


@pytest.mark.parametrize("page", PAGES)
def test_paths_in_docs_exist(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    missing = {each for each in mentioned_paths(text) if each not in NOT_KEPT and not exists(each, path)}
    # Bare names of files of code may be anywhere in the project
    names = {span for span in _SPAN.findall(_FENCE.sub("", text)) if _BARE_FILE.fullmatch(span)}
    missing |= {name for name in names if not any(any((ROOT / folder).rglob(name)) for folder in TOP_FOLDERS)}
    assert missing == set()


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/") and page != "docs/layout.md"])
def test_code_fits_a_narrow_page(page: str) -> None:
    blocks = _FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    assert [line for block in blocks for line in block.splitlines() if len(line) > CODE_WIDTH] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_resolve(page: str) -> None:
    path = ROOT / page
    links = {each for each in _LINK.findall(path.read_text(encoding="utf-8")) if "://" not in each}
    assert {each for each in links if not (path.parent / each).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_dotted_names_are_importable(page: str) -> None:
    for name in set(_DOTTED.findall((ROOT / page).read_text(encoding="utf-8"))):
        if name == "kvcache_plugins.caches":
            continue  # the group of entry points
        assert resolve(name), f"{page} names {name}"


def resolve(name: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    module, attributes = name, []
    while module:
        try:
            found = import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
            continue
        for attribute in attributes:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_documented_tree_exists() -> None:
    block = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").split("```")[1].strip("\n")
    entries = list(tree_entries(block))
    assert len(entries) > 20
    wrong = [entry for entry, _ in entries if not (ROOT / entry).exists()]
    for entry, files in entries:
        folder = ROOT / entry if (ROOT / entry).is_dir() else (ROOT / entry).parent
        wrong += [f"{entry}: {name}" for name in files if not any(folder.rglob(name))]
    assert wrong == []


def test_every_package_is_in_the_documented_tree() -> None:
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").split("```")[1]
    shown = {entry.rstrip("/") for entry, _ in tree_entries(text.strip("\n"))}
    rooms = [folder for top in (ROOT / "src" / "kvcache_plugins", ROOT / "eval") for folder in top.iterdir()]
    rooms = [room for room in rooms if (room / "__init__.py").exists()]
    assert {room.relative_to(ROOT).as_posix() for room in rooms} - shown == set()


@pytest.mark.parametrize(
    "text",
    ["see `src/kvcache_plugins/lazy.py`", "see `gear/nothing.py`", "```\npython eval/nothing.py\n```"],
    ids=["from-the-root", "from-the-package", "in-a-block"],
)
def test_a_wrong_path_is_found(text: str) -> None:
    (path,) = mentioned_paths(text)
    assert not exists(path, ROOT / "README.md")


def test_recommended_caches_are_registered() -> None:
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    section = page.split("## Choose a cache\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    named = {word.strip(" `,;") for line in table[2:] for word in line.split("|")[2].split()}
    assert {"transform", "gear", "infinigen"} <= named & set(list_caches())


def test_first_comparison_uses_the_prompt_of_the_demo() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n\t", "")
    prompt = re.search("^DEMO_PROMPT .= (.*)", makefile, re.MULTILINE)
    (line,) = [
        line for line in console_lines((ROOT / "docs" / "index.md").read_text(encoding="utf-8")) if "again" in line
    ]
    assert prompt and prompt[1] in line


def test_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize("page", ["guides/long_context.md", "guides/larger_batches.md", "guides/several_gpus.md"])
def test_guides_use_the_default_cache(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert '"transform"' in text or "--cache transform\n" in text
    assert "gear-2bit" not in text


# Every block of Python runs, in order, names shared within a page. Sybil finds the blocks: of the libraries that do,
# it is the one that keeps a page's names from block to block and reports a failure at its line of the page. A block
# that cannot run here has a comment right above it that says why, `<!-- not run: needs a GPU -->`, and is compiled


def pages_with(mark: str) -> list[str]:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in paths if mark in path.read_text(encoding="utf-8")]


REASONS = ("needs a GPU", "needs several processes", "needs a data set", "needs a model for pictures")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]*) -->\s*\Z")


def reason_not_to_run(example: Example) -> str | None:
    """Reads the comment right above a block."""
    match = NOT_RUN.search(example.document.text[: example.region.start])
    if match is None:
        return None
    if match["reason"] not in REASONS:
        raise ValueError(f"`not run` has to be one of {list(REASONS)} but got {match['reason']!r} in {example.path}")
    return match["reason"]


def evaluate(example: Example) -> None:
    """Runs a block, or compiles it."""
    if reason_not_to_run(example) is None:
        PythonEvaluator()(example)
    else:
        compile(pad(example.parsed, example.line + example.parsed.line_offset), example.path, "exec")


SYBIL = Sybil(parsers=[CodeBlockParser("python", evaluate)])


def run_page(path: Path) -> int:
    """Runs a page's blocks in order, and returns how many there are."""
    examples = list(SYBIL.parse(path).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("page", pages_with("```python"))
def test_blocks_of_a_page_run(page, hub_names, user_folder):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert run_page(ROOT / page) == text.count("```python\n")


def test_front_page_shows_actual_output(hub_names, capsys):
    shown = re.search("```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown and run_page(ROOT / "README.md") == 1
    printed = capsys.readouterr().out
    assert doctest.OutputChecker().check_output(shown[1], printed, doctest.ELLIPSIS), printed


def write(tmp_path, *parts):
    path = tmp_path / "page.md"
    path.write_text("\n\n".join(parts), encoding="utf-8")
    return path


def test_blocks_that_fail_or_have_no_reason_are_reported(tmp_path):
    marked = "<!-- not run: needs a GPU -->\n```python\n"
    # A block that is not run is compiled
    assert run_page(write(tmp_path, f"{marked}undefined_name\n```")) == 1
    for text, error in {
        "```python\nnumber + 1\n```": NameError,
        f"{marked}1 +\n```": SyntaxError,
        "<!-- not run: too long -->\n```python\npass\n```": ValueError,
    }.items():
        with pytest.raises(error):
            run_page(write(tmp_path, text))


# Commands, options, caches and files of console lines exist: lines are parsed by the commands' own parsers, up to the
# point where a command would begin to work. Blocks of a shell (`bash`) may have known lines only; in unmarked blocks,
# which also hold file trees, lines that begin like a command are parsed
SHELLS = ("bash", "console", "sh", "shell")
# Options of launchers before `-m MODULE`; what follows the module is ours
LAUNCHERS = {"torchrun": ("--nproc-per-node", "--nproc_per_node"), "accelerate": ("--num-processes", "--multi_gpu")}
MODULES = {
    "kvcache_plugins.kv_runahead": "kvcache_plugins.kv_runahead.__main__:main",
    "kvcache_plugins.eval.tables": "kvcache_plugins.eval.tables:main",
}
# Modules without options
BARE_MODULES = ("kvcache_plugins.contract",)
SCRIPTS = ("docs/figures/draw.py",)
# Known to every shell, or not this project's
OTHERS = ("cat", "cd", "export", "git", "sed", "tr")


def console_lines(text: str) -> Iterator[str]:
    """Commands in the fenced blocks of a page, continued lines joined, comments and redirections left off."""
    for region in FencedCodeBlockLexer(r".*", mapping={"language": "language", "source": "source"})(
        Document(text, "page.md")
    ):
        language, source = region.lexemes["language"].strip(), str(region.lexemes["source"])
        for line in source.replace("\\\n", "").splitlines():
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
        # The file is one that another line writes
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
    if name == "kvcache_plugins.cli":
        check_kvcache_plugins(words)
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


@pytest.mark.parametrize("page", pages_with("```"))
def test_command_lines_of_a_page_parse(page):
    for line in console_lines((ROOT / page).read_text(encoding="utf-8")):
        try:
            check_line(line)
        except Exception as error:
            # A parser says what is wrong, and not where it stands
            error.add_note(f"{page}: {line}") if hasattr(error, "add_note") else None
            raise


def test_command_lines_are_found_and_trimmed():
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
    "an option of lm-eval": f"{LM_EVAL} --model_args cache=transform --tasks kv_copa --limits 4",
    "a task": f"{LM_EVAL} --model_args cache=transform --tasks kv_nothing",
    "a cache of lm-eval": f"{LM_EVAL} --model_args cache=transform,cache_ranks=2 --tasks kv_copa",
    "a module's option": "torchrun --nproc-per-node 2 -m kvcache_plugins.kv_runahead --prompt x --hops 4",
    "a launcher's option": "torchrun --nothing 2 -m kvcache_plugins.kv_runahead --prompt x",
    "a module": "python -m kvcache_plugins.nothing",
    "a script": "python docs/figures/nothing.py",
    "an extra": "pip install 'kvcache-plugins[nothing]'",
    "a target": "make nothing",
    "a program": "kvcache list",
}


@pytest.mark.parametrize("line", WRONG.values(), ids=WRONG)
def test_a_wrong_command_line_fails(line):
    with pytest.raises((Exception, SystemExit)):
        check_line(line)
