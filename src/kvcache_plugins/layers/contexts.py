"""Contexts of PyTorch that do not reach into a cache; gradients end at the tokens that it has stored."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch


P = ParamSpec("P")
R = TypeVar("R")
_DEVICE_TYPES = ("cpu", "cuda")


def in_own_context(function: Callable[P, R]) -> Callable[P, R]:
    """
    Wrap a function of a cache, so that it computes as always whatever context it is called in.

    Under `torch.inference_mode()` it would make tensors that cannot be written to outside of it, where a cache may be
    used further. Under `torch.autocast` products of its own, such as those that choose tokens, would be rounded.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not is_foreign_context():
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for device_type in _DEVICE_TYPES:
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            return function(*args, **kwargs)

    return call


def is_foreign_context() -> bool:
    """Tell whether it is `torch.inference_mode()` or `torch.autocast` that PyTorch computes in."""
    return torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICE_TYPES))


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
