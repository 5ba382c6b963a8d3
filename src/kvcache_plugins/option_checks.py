"""Checks of options that every config makes: each raises a `ValueError` with the option's name, what is accepted and
the value as Python writes it, so that `2` and `"2"` look different.

An option of two names is called `key_rank/rank`.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch


def check_integer(name: str, value: object, least: int, *, is_optional: bool = False) -> None:
    """`value` has to be an `int`, and no `bool`, of at least `least`; or `None` if that `is_optional`."""
    is_right = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _require(is_right, name, f"an integer of at least {least}", value, is_optional)


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    is_finite: bool = True,
    is_optional: bool = False,
) -> None:
    """`value` has to be a number, no `bool`, within bounds and perhaps finite; or `None` if that `is_optional`."""
    bounds = ((least, operator.ge), (above, operator.gt), (most, operator.le), (below, operator.lt))
    is_right = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    is_right = is_right and (not is_finite or math.isfinite(value))  # type: ignore[arg-type]
    is_right = is_right and all(bound is None or compare(value, bound) for bound, compare in bounds)  # type: ignore[arg-type]
    lower = f"of at least {least:g}" if least is not None else f"above {above:g}"
    if most is not None or below is not None:
        opening, closing = ("[" if least is not None else "("), ("]" if most is not None else ")")
        first, last = (least if above is None else above), (most if below is None else below)
        lower = f"in {opening}{first:g}, {last:g}{closing}"
    _require(is_right, name, f"a number {lower}", value, is_optional)


def check_bool(name: str, value: object, *, is_optional: bool = False) -> None:
    """`value` has to be `True` or `False`; or `None` if that `is_optional`."""
    _require(isinstance(value, bool), name, "True, False" if is_optional else "True or False", value, is_optional)


def check_choice(name: str, value: object, accepted: Sequence[object]) -> None:
    """`value` has to be one of `accepted` and of its type: `2.0` and `True` are not `2` and `1`."""
    is_right = any(type(value) is type(each) and value == each for each in accepted)
    _require(is_right, name, f"one of {list(accepted)}", value, is_optional=False)


def split_nbits(
    nbits: float | None, key_nbits: float | None, value_nbits: float | None, defaults: tuple[float, float]
) -> tuple[Any, Any]:
    """Return the bits of keys and of values; a `ValueError` if `nbits` is given and has no effect."""
    if nbits is not None and key_nbits is not None and value_nbits is not None:
        raise ValueError(
            "`nbits` has no effect beside `key_nbits` and `value_nbits`, which some presets set: give these two alone"
        )
    keys, values = defaults if nbits is None else (nbits, nbits)
    return keys if key_nbits is None else key_nbits, values if value_nbits is None else value_nbits


def check_mask(name: str, value: object) -> None:
    """`value` has to be a padding mask `[batch_size, length]`, or `None`."""
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 2):
        return
    shown = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(f"`{name}` has to be a tensor of shape [batch_size, length] or None but got {shown}")


def check_left_padding(mask: object, input_ids: torch.Tensor) -> None:
    """`mask` has to be of the shape of `input_ids`, 0 for padding in front of an item and 1 for all tokens after."""
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        raise ValueError(f"`attention_mask` has to be a tensor of the shape of `input_ids`, {tuple(input_ids.shape)}")
    is_real = mask != 0
    if not bool((is_real == mask).all() & ((is_real.cumsum(dim=1) > 0) == is_real).all() & is_real[:, -1].all()):
        raise ValueError(
            "`attention_mask` has to be 0 for padding on the left of an item and 1 for all tokens after it"
        )


def _require(is_right: bool, name: str, expected: str, value: object, is_optional: bool) -> None:
    if not is_right and not (is_optional and value is None):
        names = "/".join(f"`{each}`" for each in name.split("/"))
        raise ValueError(f"{names} has to be {expected}{' or None' if is_optional else ''} but got {value!r}")
