"""Documents, help texts and messages use plain words, and documents stay as short as they are meant to be."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path.relative_to(ROOT).as_posix()
    for path in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "hub").rglob("*.md")),
    ]
]
SOURCES = sorted(path for folder in ("src", "eval") for path in (ROOT / folder).rglob("*.py"))
# First words of sentences that hide their subject
OPENERS = {
    *("what", "of", "those", "who", "whose", "whether", "whoever", "whatever"),
    *("as", "how", "which", "where", "by", "for"),
}
# Words that a plain one, or one of the field, says better
PHRASES = [
    re.compile(each, re.IGNORECASE)
    for each in (
        r"\blet(s|ting)? go of\b",
        r"\bstands? still\b",
        r"\btakes? down\b",
        r"\b(is|are|was|were) told\b",
        r"\btold (by|of|apart|ahead|anew)\b",
        r"\bhear(s|d)?\b",
        r"\bwho(m)?ever\b",
        r"\bnobody('s|s)?\b",
        r"\bsettles?\b",
        r"\bas ever\b",
        r"\bby itself\b",
        r"\bthat there (is|are) (not|none|no)\b",
        r"\bturned (back|by|queries)\b",
        r"\basks? as\b",
        r"\bin the place of\b",
        r"\bat hand\b",
        r"\bgives? out\b",
        r"\bgiven out\b",
        r"\bcomes? of\b",
        r"\bmade of what\b",
        r"\bwhat (stands|is left|comes|counts|waits)\b",
        r"\bno longer than needed\b",
        r"\bof which\b",
        r"\bsaid (once|of)\b",
    )
]
# Words outside of tables and code
MOST_WORDS = {"docs": 14_000, "a method": 900, "CHANGELOG.md": 500}

_TABLE = re.compile(r"<!-- table: .*?<!-- end -->", re.DOTALL)
# Fenced and indented code, directives of mkdocstrings with their options, comments, images
_CODE = re.compile(r"^```.*?^```|^(?:    |:::).*?$|<!--.*?-->|^!\[.*?\)$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\|.*$", re.MULTILINE)


def without_code(text: str) -> str:
    """Removes code and generated tables."""
    return _CODE.sub("", _TABLE.sub("", text))


def count_words(text: str) -> int:
    return len(_ROW.sub("", without_code(text)).split())


def sentences(text: str) -> Iterator[str]:
    """Sentences of headings, paragraphs and list items, without marks of emphasis."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*>#]|\d+\.) )", _ROW.sub("", without_code(text))):
        plain = re.sub(r"\s+", " ", re.sub(r"[*`]|!?\[|\]\([^)]*\)|^\s*(?:[-*>#]+|\d+\.)\s+", "", block.strip()))
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z])", plain)


def hidden_subjects(text: str) -> list[str]:
    return [each for each in sentences(text) if re.split(r"\W+", each.lower(), maxsplit=1)[0] in OPENERS]


def private_phrases(text: str) -> list[str]:
    return [match[0] for phrase in PHRASES for match in phrase.finditer(text)]


def messages(source: str) -> Iterator[str]:
    """Strings of a file, docstrings among them: help texts, warnings and errors."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def shown_texts(source: str) -> Iterator[str]:
    """First lines of docstrings, help of options, and messages of errors, warnings and hints."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            yield (ast.get_docstring(node) or "").partition("\n")[0]
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield text_of(node.value)
        elif isinstance(node, ast.Call) and node.args and re.search(r"(Error|warn|hint)$", ast.unparse(node.func)):
            yield text_of(node.args[0])


def text_of(node: ast.expr) -> str:
    """Text of a string or an f-string, with X for its fields."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in parts)


@pytest.mark.parametrize("page", DOCUMENTS)
def test_documents_name_their_subjects(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert hidden_subjects(text) == []
    assert private_phrases(_CODE.sub("", text)) == []


def test_help_and_messages_are_plain() -> None:
    found = []
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        # Made-up sentences of tasks are no messages
        if path.name != "context_tasks.py":
            found += [(path.name, each) for text in messages(source) for each in private_phrases(text)]
        found += [(path.name, each) for each in shown_texts(source) if hidden_subjects(each)]
    assert SOURCES and found == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Text. Of these, two are packed.", ["Of these, two are packed."]),
        ("- **What stays**: four tokens", ["What stays: four tokens"]),
        ("## How near?", ["How near?"]),
        ("```\nWhat is code\n```\n\n| What | is a table |\n\nTokens are packed where they are.", []),
    ],
    ids=["a-sentence", "an-item", "a-heading", "neither"],
)
def test_hidden_subjects_are_found(text: str, found: list[str]) -> None:
    assert hidden_subjects(text) == found


def test_private_phrases_are_found() -> None:
    assert private_phrases("A layer that stands still\nlets go of a prefix") == ["lets go of", "stands still"]


def test_documents_are_short() -> None:
    words = {page: count_words((ROOT / page).read_text(encoding="utf-8")) for page in DOCUMENTS}
    docs = {page: count for page, count in words.items() if page.startswith("docs/")}
    assert sum(docs.values()) <= MOST_WORDS["docs"], dict(sorted(docs.items(), key=lambda each: -each[1]))
    methods = {page: count for page, count in docs.items() if page.startswith("docs/methods/")}
    assert methods and max(methods.values()) <= MOST_WORDS["a method"], methods
    assert words["CHANGELOG.md"] <= MOST_WORDS["CHANGELOG.md"]
