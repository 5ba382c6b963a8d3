"""Checks of options. Each raises a `ValueError` that names the option, the accepted values and the given value (its
`repr`, so that `2` and `"2"` differ).

Write an option that has two names as `key_rank/rank`.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch


NbitsT = TypeVar("NbitsT", int, float)


def check_integer(name: str, value: object, least: int, *, is_optional: bool = False) -> None:
    """Require an `int` of at least `least`, not a `bool`; `None` passes if `is_optional`."""
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
    """
    Require a number within bounds, not a `bool` and not NaN; `None` passes if `is_optional`. Exactly one of `least`
    (inclusive) and `above` (exclusive) is given, and at most one of `most` and `below`.
    """
    lower = -math.inf if least is None else least
    upper = math.inf if most is None else most
    is_right = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and (math.isfinite(value) or not is_finite)
        and lower <= value <= upper
        and (above is None or value > above)
        and (below is None or value < below)
    )
    bounds = f"of at least {least:g}" if least is not None else f"above {above:g}"
    if most is not None or below is not None:
        first = f"({above:g}" if least is None else f"[{least:g}"
        last = f"{below:g})" if most is None else f"{most:g}]"
        bounds = f"in {first}, {last}"
    _require(is_right, name, f"a number {bounds}", value, is_optional)


def check_bool(name: str, value: object, *, is_optional: bool = False) -> None:
    """Require `True` or `False`; `None` passes if `is_optional`."""
    _require(isinstance(value, bool), name, "True, False" if is_optional else "True or False", value, is_optional)


def check_choice(name: str, value: object, accepted: Sequence[object]) -> None:
    """Require one of `accepted`, of the same type: `2.0` and `True` do not pass for `2` and `1`."""
    is_right = any(type(value) is type(each) and value == each for each in accepted)
    _require(is_right, name, f"one of {list(accepted)}", value, is_optional=False)


def split_nbits(
    nbits: NbitsT | None,
    key_nbits: NbitsT | None,
    value_nbits: NbitsT | None,
    defaults: tuple[NbitsT, NbitsT],
) -> tuple[NbitsT, NbitsT]:
    """Return the bits of keys and of values; raise a `ValueError` if `nbits` is given without effect."""
    if nbits is not None and key_nbits is not None and value_nbits is not None:
        raise ValueError(
            "`nbits` has no effect beside `key_nbits` and `value_nbits`, which some presets set: give these two alone"
        )
    keys, values = defaults if nbits is None else (nbits, nbits)
    return keys if key_nbits is None else key_nbits, values if value_nbits is None else value_nbits


def check_mask(name: str, value: object) -> None:
    """Require a padding mask `[batch_size, length]` or `None`."""
    if value is None or (isinstance(value, torch.Tensor) and value.dim() == 2):
        return
    shown = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ValueError(f"`{name}` has to be a tensor of shape [batch_size, length] or None but got {shown}")


def check_left_padding(mask: object, input_ids: torch.Tensor) -> None:
    """Require a mask of the shape of `input_ids`: in every sequence 0 for padding, which comes first, then 1."""
    if not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape:
        raise ValueError(f"`attention_mask` has to be a tensor of the shape of `input_ids`, {tuple(input_ids.shape)}")
    is_real = mask != 0
    is_binary = (is_real == mask).all()
    is_padded_left = ((is_real.cumsum(dim=1) > 0) == is_real).all()
    if not bool(is_binary & is_padded_left & is_real[:, -1].all()):
        raise ValueError(
            "`attention_mask` has to be 0 for padding on the left of a sequence and 1 for all tokens after it"
        )


def _require(is_right: bool, name: str, expected: str, value: object, is_optional: bool) -> None:
    if is_right or (is_optional and value is None):
        return
    names = "/".join(f"`{each}`" for each in name.split("/"))
    raise ValueError(f"{names} has to be {expected}{' or None' if is_optional else ''} but got {value!r}")
