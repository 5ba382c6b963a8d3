"""Objects that a benchmark yields: rows and other fields. Help reads this module, so it imports nothing heavy."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A row that is missing, and the reason."""

    what: str
    reason: str


class Settings(dict[str, Any]):
    """Settings that rows were measured with, beside the options of the command."""


class Content(dict[str, Any]):
    """Fields of a result beside its rows. `device` and `versions` replace those of `provenance`."""


class KnownRows(list[dict[str, Any]]):
    """Rows of an earlier run, read from its file."""


# A row is any other mapping
Found = Mapping[str, Any] | Failure | KnownRows
