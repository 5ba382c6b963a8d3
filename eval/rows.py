"""Yields of a benchmark: its rows, and fields beside them. Help reads this module, so it imports nothing heavy."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A row that is missing, and the reason."""

    what: str
    reason: str


class Settings(dict[str, Any]):
    """Settings that rows were measured with, beside the options of the command."""


class Content(dict[str, Any]):
    """Fields of a result beside its rows. `device` and `versions` take the place of what is the rule."""


class KnownRows(list[dict[str, Any]]):
    """Rows of an earlier run, which its file has already."""


# A row is any other mapping
Found = Mapping[str, Any] | Failure | KnownRows
