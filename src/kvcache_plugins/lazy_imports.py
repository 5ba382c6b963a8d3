"""Import a name when it is first used, so that code which needs Torch costs nothing before.

A name is given as `module:attribute`, the form of entry points. `tests/test_import_rule.py` treats such a text as an
import.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Import the object that `module:attribute` names; raise an `ImportError` or `AttributeError` if there is none."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def lazy_attributes(
    module: str, targets: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a module's `__getattr__`, which imports a name on first use, and `__dir__`, which lists its `__all__`."""

    def get_attribute(name: str) -> object:
        if name not in targets:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = load(targets[name])
        # Later accesses find the name without this function
        setattr(sys.modules[module], name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted(sys.modules[module].__all__)

    return get_attribute, list_attributes
