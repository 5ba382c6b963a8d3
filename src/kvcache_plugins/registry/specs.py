"""Caches and their options as text, the form in which commands take them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, TypeAlias


if TYPE_CHECKING:
    pass


OptionValue: TypeAlias = bool | int | float | str | None


def parse_option(text: str) -> tuple[str, OptionValue]:
    """Reads `key=value` with the value typed: `none`, `true`, `false`, an integer, a float, else the text itself."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"An option has the form `key=value`, but got `{text}`")
    return key.strip(), _parse_value(value.strip())


def _parse_value(text: str) -> OptionValue:
    constants = {"none": None, "true": True, "false": False}
    if text.lower() in constants:
        return constants[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse_cache_spec(spec: str) -> tuple[str, dict[str, OptionValue]]:
    """
    Reads `name` or `name:key=value,key=value`, the form in which commands take a cache and its options.

    Raises:
        ValueError: if it has another form, such as a `:` with nothing behind it, or a `:` between options.
    """
    name, colon, options = spec.partition(":")
    parsed = dict(parse_option(option) for option in options.split(",")) if options.strip() else {}
    is_divided_by_colon = re.search(r":\s*\w+=", options) is not None
    if not name.strip() or (colon and not parsed) or is_divided_by_colon:
        raise ValueError(f"A cache has the form `name` or `name:key=value,key=value`, but got `{spec}`")
    return name.strip(), parsed
