"""A JSON object from a file: every field is taken once, with its type and range, and nothing may be left over."""

import json
from collections.abc import Sequence
from typing import NoReturn


# Positions, lengths and counts of anything are below; what is above would overflow somewhere
MAX_INTEGER = 2**40
_MAX_NUMBER = 1e300
_MAX_SHOWN = 80


def parse_json(text: str | bytes) -> object:
    """
    What a JSON text holds.

    Raises:
        ValueError: if it is none, names a key twice, or holds what is no JSON (`NaN`), or is nested too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deep") from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("the JSON names a key twice")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"the JSON holds {name}")


class Document:
    """
    A JSON object that is read field by field.

    Args:
        content (`object`): what was parsed; has to be a `dict`.
        name (`str`, *optional*, defaults to `""`): where it stands, which errors begin with.
    """

    def __init__(self, content: object, name: str = ""):
        if not isinstance(content, dict):
            raise ValueError(f"`{name or 'the document'}` has to be an object but is a {type(content).__name__}")
        self._content = dict(content)
        self._name = name

    def take(self, key: str) -> object:
        """A field of any type; it counts as read."""
        if key not in self._content:
            raise ValueError(f"`{self._path(key)}` is missing")
        return self._content.pop(key)

    def has(self, key: str) -> bool:
        """Whether there is a field that nothing has read yet."""
        return key in self._content

    def names(self) -> list[str]:
        """The fields that nothing has read yet."""
        return list(self._content)

    def integer(self, key: str, least: int = 0, most: int = MAX_INTEGER) -> int:
        """An integer within bounds, both included."""
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            self._refuse(key, f"an integer from {least} to {most}", value)
        return value

    def number(self, key: str) -> float:
        """A finite number, integer or not as it was written."""
        value = self.take(key)
        if not _is_number(value):
            self._refuse(key, "a finite number", value)
        return value  # type: ignore[return-value]

    def boolean(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            self._refuse(key, "true or false", value)
        return value

    def text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            self._refuse(key, "a string", value)
        return value

    def choice(self, key: str, accepted: Sequence[str]) -> str:
        """One of some words."""
        value = self.text(key)
        if value not in accepted:
            self._refuse(key, f"one of {list(accepted)}", value)
        return value

    def is_null(self, key: str) -> bool:
        """Whether a field is there and `null`, which then counts as read."""
        if key in self._content and self._content[key] is None:
            del self._content[key]
            return True
        return False

    def numbers(self, key: str) -> dict[str, float]:
        """An object of finite numbers."""
        value = self.take(key)
        if not isinstance(value, dict) or not all(map(_is_number, value.values())):
            self._refuse(key, "an object of finite numbers", value)
        return value

    def number_list(self, key: str) -> list[float]:
        """A list of finite numbers."""
        value = self.take(key)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            self._refuse(key, "a list of finite numbers", value)
        return value

    def texts(self, key: str) -> dict[str, str]:
        """An object of strings."""
        value = self.take(key)
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            self._refuse(key, "an object of strings", value)
        return value

    def integers(self, key: str) -> list[int]:
        """A list of integers of at least 0."""
        value = self.take(key)
        if not isinstance(value, list) or not all(type(each) is int and 0 <= each <= MAX_INTEGER for each in value):
            self._refuse(key, f"a list of integers from 0 to {MAX_INTEGER}", value)
        return value

    def inner(self, key: str) -> "Document":
        """An object."""
        return Document(self.take(key), self._path(key))

    def rows(self, key: str) -> list["Document"]:
        """A list of objects."""
        value = self.take(key)
        if not isinstance(value, list):
            self._refuse(key, "a list", value)
        return [Document(row, f"{self._path(key)}[{number}]") for number, row in enumerate(value)]

    def finish(self) -> None:
        """Refuses fields that nothing has read."""
        if self._content:
            raise ValueError(f"`{self._path(min(self._content))}` is unknown")

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _refuse(self, key: str, expected: str, value: object) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
        raise ValueError(f"`{self._path(key)}` has to be {expected} but got {shown}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MAX_NUMBER < value < _MAX_NUMBER
