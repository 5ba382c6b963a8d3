"""Texts for a calibration, from Python's standard library and from this package.

A calibration on one kind of text is worse for others, so there are three kinds: code and reference, both from the
sources of the standard library, which are not executed, and prose in several languages, with letters, lists, tables
and records.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path


_PROSE = Path(__file__).with_name("calibration_prose.txt")
# Modules of every Python since 3.10, by different authors. `argparse` is left out, as results are measured on it
_CODE = (
    "calendar configparser csv fractions ftplib heapq http/cookies queue shutil statistics tempfile tokenize "
    "xml/etree/ElementTree"
)
_REFERENCE = (
    "_pydecimal bdb codecs difflib doctest email/message mailbox optparse random subprocess turtle unittest/case"
)
# Limit for a file, so that no long one is most of a text
_MAX_CHARACTERS = 12_000
_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def calibration_texts() -> dict[str, str]:
    """
    Return `code`, `reference` (the text of `help`) and `prose`, tens of thousands of characters each, the same at
    every call. Modules that this Python lacks are left out, and so is a kind of text that is then empty.
    """
    code = [source[:_MAX_CHARACTERS] for source in _sources(_CODE)]
    reference = ["".join(_help_of(ast.parse(source)))[:_MAX_CHARACTERS] for source in _sources(_REFERENCE)]
    texts = {"code": "\n".join(code), "reference": "\n".join(reference), "prose": _PROSE.read_text(encoding="utf-8")}
    return {kind: text for kind, text in texts.items() if text}


def _sources(names: str) -> Iterator[str]:
    for name in names.split():
        path = Path(sysconfig.get_paths()["stdlib"], f"{name}.py")
        if path.is_file():
            yield path.read_text(encoding="utf-8")


def _help_of(node: ast.Module | _DEFINITIONS, name: str = "") -> Iterator[str]:
    """Yield the docstrings of a module or a definition `node`, and of definitions within it, each below its head."""
    text = ast.get_docstring(node)
    if text is not None:
        yield f"{_head(node, name)}{text}\n\n"
    for each in node.body:
        if isinstance(each, _DEFINITIONS):
            yield from _help_of(each, f"{name}.{each.name}" if name else each.name)


def _head(node: ast.Module | _DEFINITIONS, name: str) -> str:
    if isinstance(node, ast.Module):
        return ""
    if isinstance(node, ast.ClassDef):
        return f"class {name}({', '.join(map(ast.unparse, node.bases))})\n"
    return f"{name}({ast.unparse(node.args)})\n"
