"""Every path and dotted name of this project that a document mentions leads somewhere, and pages recommend alike."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kvcache_plugins import list_caches


ROOT = Path(__file__).resolve().parents[2]
# Where a document may start from when it names a file
STARTS = (ROOT, ROOT / "src" / "kvcache_plugins", ROOT / "triton_kernels", ROOT / "eval")
TOP_FOLDERS = ("src", "eval", "triton_kernels", "tests", "docs", "notebooks")
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
    """Whether a path, which may be a pattern, leads to a file or folder from one of the usual starts."""
    folders = (*STARTS, page.parent)
    return any(next(iter(folder.glob(path.rstrip("/"))), None) is not None for folder in folders)


def is_somewhere(name: str) -> bool:
    """Whether a file of this name is anywhere in the project."""
    folders = [ROOT / folder for folder in TOP_FOLDERS]
    return any(next(iter(folder.rglob(name)), None) is not None for folder in folders)


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


def mentioned_files(text: str) -> Iterator[str]:
    """Bare names of files of code."""
    yield from (span for span in _SPAN.findall(_FENCE.sub("", text)) if _BARE_FILE.fullmatch(span))


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
def test_paths_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    missing = {each for each in mentioned_paths(text) if each not in NOT_KEPT and not exists(each, path)}
    missing |= {each for each in mentioned_files(text) if not is_somewhere(each)}
    assert missing == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page: str) -> None:
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
    """Whether a dotted name is a module, or an attribute of one."""
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


def test_the_tree_of_the_docs_is_the_tree() -> None:
    block = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8").split("```")[1].strip("\n")
    entries = list(tree_entries(block))
    assert len(entries) > 20
    wrong = [entry for entry, _ in entries if not (ROOT / entry).exists()]
    for entry, files in entries:
        folder = ROOT / entry if (ROOT / entry).is_dir() else (ROOT / entry).parent
        wrong += [f"{entry}: {name}" for name in files if not any(folder.rglob(name))]
    assert wrong == []


def test_every_room_is_in_the_tree_of_the_docs() -> None:
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


# One recommendation everywhere: the table of the front page is that of the documentation


def which_cache(path: Path) -> list[str]:
    """Lines of the table under `## Which cache`."""
    section = path.read_text(encoding="utf-8").split("## Which cache\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


def test_readme_and_documentation_recommend_the_same() -> None:
    table = which_cache(ROOT / "README.md")
    assert len(table) > 4
    assert which_cache(ROOT / "docs" / "index.md") == table


def test_what_is_recommended_is_registered() -> None:
    named = {word.strip(" `,") for line in which_cache(ROOT / "README.md")[2:] for word in line.split("|")[2].split()}
    assert {"gear", "infinigen"} <= named & set(list_caches())


def test_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("page", ["guides/long_context.md", "guides/larger_batches.md", "guides/several_gpus.md"])
def test_guides_take_the_default(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert '"gear"' in text or "--cache gear\n" in text
    assert "gear-2bit" not in text
