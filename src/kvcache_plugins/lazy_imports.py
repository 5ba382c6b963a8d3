"""Names that are imported when they are first asked for, so that what needs Torch costs nothing until it is used.

What is named is `module:attribute`, as entry points are written. `tests/test_import_rule.py` reads such texts as the
imports that they are.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load(target: str) -> Any:
    """Imports what `module:attribute` names; an `ImportError` or `AttributeError` if there is none."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def lazy_attributes(module: str, targets: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a module's `__getattr__`, which imports a name on first use, and `__dir__`, which lists its `__all__`."""

    def get_attribute(name: str) -> Any:
        if name not in targets:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = load(targets[name])
        # Found at once from now on
        setattr(sys.modules[module], name, value)
        return value

    def list_attributes() -> list[str]:
        return sorted(sys.modules[module].__all__)

    return get_attribute, list_attributes
