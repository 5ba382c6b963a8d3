"""Where gradients end: at what a cache has stored."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch


P = ParamSpec("P")
R = TypeVar("R")


def storing(function: Callable[P, R]) -> Callable[P, R]:
    """
    Has a function make ordinary tensors also under `torch.inference_mode()`: those that it would make there could not
    be written to outside of it, where a cache may be used further.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


def without_gradients(states: torch.Tensor) -> torch.Tensor:
    """`states` for a forward pass that autograd records. A backward pass to them raises."""
    states = states.detach().requires_grad_()
    states.register_hook(_refuse_gradients)
    return states


def _refuse_gradients(gradient: torch.Tensor) -> None:
    raise NotImplementedError(
        "gradients do not flow through what a cache has stored: only the first forward through an empty one is exact. "
        "Train without `past_key_values`, or with a `DynamicCache`"
    )
