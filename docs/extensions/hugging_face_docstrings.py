"""An extension of griffe, which mkdocstrings reads sources with: docstrings in the form of Hugging Face.

They say ``name (`type`, *optional*, defaults to `x`):``. Griffe's Google style is the same but for the parentheses,
which it takes for an expression. Type and default are in the signature, so they are left out here; shapes are not, so
they are moved into the text.
"""

import re
from typing import Any

from griffe import Extension, Object


# An entry of `Args:` or `Attributes:`: names, with commas between those that share a text, the type, and the text,
# which goes on in lines that are indented further
_ENTRY = re.compile(
    r"^(?P<indent>[ ]{4,8})(?P<names>\w+(?:,\s+\w+)*) \((?P<type>(?:[^()]|\([^()]*\))*)\):"
    r"(?P<text>[^\n]*(?:\n(?P=indent)[ ]+[^\n]+)*)",
    re.MULTILINE,
)
_SHAPE = re.compile(r"of shape `(?P<shape>[^`]*)`")
# What is returned, with its type in front
_RETURNED = re.compile(r"^(?P<head>Returns:\n[ ]+)`[^`\n]*`(?: of shape (?P<shape>`[^`]*`|\S+))?[:.]? ?", re.MULTILINE)


class HuggingFaceDocstrings(Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called by griffe for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = rewrite(obj.docstring.value)


def rewrite(text: str) -> str:
    """The docstring in Google style, types left to the signature."""
    return _RETURNED.sub(_returned, _ENTRY.sub(_entry, text))


def _entry(match: re.Match[str]) -> str:
    shape = _SHAPE.search(match["type"])
    said = f" Of shape `{shape['shape']}`." if shape else ""
    names = re.split(r",\s+", match["names"])
    return "\n".join(f"{match['indent']}{name}:{said}{match['text']}" for name in names)


def _returned(match: re.Match[str]) -> str:
    shape = match["shape"]
    return match["head"] + (f"Of shape {shape}. " if shape else "")
