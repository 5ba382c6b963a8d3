"""A JSON document with a format, a version and a checksum, as a file to read and to search, not to edit."""

import json
import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from .atomic import new_file
from .document import Document, parse_json
from .refusal import RefusedFile


_CHECKSUM = "checksum"


def check_format(document: Document, name: str, version: int, advice: str) -> None:
    """
    Takes format and version of a document.

    Raises:
        RefusedFile: if they are others, with `advice` on how to come to a file that can be read.
    """
    found = document.take("format"), document.take("version")
    if found[0] != name or found[1] != version or not isinstance(found[1], int) or isinstance(found[1], bool):
        raise RefusedFile(
            f"holds format {found[0]!r} version {found[1]!r}, but only {name!r} version {version} can be read: "
            f"{advice}"
        )


def write_json_file(path: str | os.PathLike[str], name: str, version: int, content: Mapping[str, Any]) -> None:
    """Writes a document, whole or not at all."""
    document = {"format": name, "version": version, **content}
    document[_CHECKSUM] = _checksum(document)
    text = json.dumps(document, indent=2, allow_nan=False)
    with new_file(path) as file:
        file.write(f"{text}\n".encode())


def read_json_file(path: str | os.PathLike[str], name: str, version: int, advice: str) -> Document:
    """
    The content of a file that `write_json_file` wrote, to be called within `refusals`.

    Raises:
        ValueError: if it is damaged, or of another format or version.
    """
    try:
        content = parse_json(Path(path).read_bytes())
    except ValueError as error:
        raise RefusedFile(f"is no JSON file or is damaged: {error}") from error
    if not isinstance(content, dict):
        raise RefusedFile(f"holds a JSON {type(content).__name__}, but has to hold an object")
    document = Document({"format": None, "version": None, **content})
    check_format(document, name, version, advice)
    if content.pop(_CHECKSUM, None) != _checksum(content):
        raise ValueError("its checksum does not fit what it holds")
    document.take(_CHECKSUM)
    return document


def _checksum(document: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(document, sort_keys=True).encode(), digest_size=32).hexdigest()
