"""An extension of griffe, which mkdocstrings reads sources with: docstrings in the form of Hugging Face.

They say ``name (`type`, *optional*, defaults to `x`):``. Griffe's Google style is the same but for the parentheses,
which it takes for an expression. Type and default are in the signature, so they are left out here; shapes are not, so
they are moved into the text. Options that a class takes as `**options` and lists in its `__signature__` are read
there, unless its docstring has one entry for all of them.
"""

import importlib
import inspect
import re
from typing import Any

from griffe import Class, Extension, Object, Parameter, ParameterKind, Parameters


# An entry of `Args:` or `Attributes:`: names, with commas between those that share a text, the type, and the text,
# which goes on in lines that are indented further
_ENTRY = re.compile(
    r"^(?P<indent>[ ]{4,8})(?P<names>\w+(?:,\s+\w+)*) \((?P<type>(?:[^()]|\([^()]*\))*)\):"
    r"(?P<text>[^\n]*(?:\n(?P=indent)[ ]+[^\n]+)*)",
    re.MULTILINE,
)
_SHAPE = re.compile(r"of shape `(?P<shape>[^`]*)`")
# A `Returns` section, with the type in front
_RETURNED = re.compile(r"^(?P<head>Returns:\n[ ]+)`[^`\n]*`(?: of shape (?P<shape>`[^`]*`|\S+))?[:.]? ?", re.MULTILINE)


class HuggingFaceDocstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value)

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Called by griffe for each class, once its methods are known."""
        init = cls.members.get("__init__")
        has_entry = cls.docstring is not None and "\n    options:" in cls.docstring.value
        if init is not None and "options" in init.parameters and not has_entry:
            made = getattr(importlib.import_module(cls.module.path), cls.name)
            if "__signature__" in vars(made):
                listed = inspect.signature(made).parameters.values()
                init.parameters = Parameters(init.parameters["self"], *map(_parameter, listed))


def rewrite(text: str) -> str:
    """The docstring in Google style, types left to the signature."""
    return _RETURNED.sub(_returned, _ENTRY.sub(_entry, text))


def _parameter(each: inspect.Parameter) -> Parameter:
    default = None if each.default is each.empty else repr(each.default)
    annotation, kind = inspect.formatannotation(each.annotation), ParameterKind(each.kind.description)
    return Parameter(each.name, annotation=annotation, kind=kind, default=default)


def _entry(match: re.Match[str]) -> str:
    shape = _SHAPE.search(match["type"])
    said = f" Of shape `{shape['shape']}`." if shape else ""
    names = re.split(r",\s+", match["names"])
    return "\n".join(f"{match['indent']}{name}:{said}{match['text']}" for name in names)


def _returned(match: re.Match[str]) -> str:
    shape = match["shape"]
    return match["head"] + (f"Of shape {shape}. " if shape else "")
