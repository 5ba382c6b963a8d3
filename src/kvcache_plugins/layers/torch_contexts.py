"""Run a cache's code outside of `inference_mode` and `autocast`, and stop gradients at stored tokens."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import ParamSpec, TypeVar

import torch


P = ParamSpec("P")
R = TypeVar("R")
_DEVICE_TYPES = ("cpu", "cuda")


def without_caller_contexts(function: Callable[P, R]) -> Callable[P, R]:
    """
    Wrap a function of a cache, so that its caller's contexts do not change what it computes.

    Under `torch.inference_mode()` it would make tensors that cannot be written to outside of that mode, where the
    cache may be used later. Under `torch.autocast` its products, such as those that choose tokens, would be rounded.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not in_caller_context():
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


def in_caller_context() -> bool:
    """Return True under `torch.inference_mode()` or `torch.autocast`."""
    return torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICE_TYPES))


def without_gradients(states: torch.Tensor) -> torch.Tensor:
    """Return `states` for a forward that autograd records; a backward pass that reaches them raises."""
    states = states.detach().requires_grad_()
    states.register_hook(_refuse_gradients)
    return states


def _refuse_gradients(gradient: torch.Tensor) -> None:
    raise NotImplementedError(
        "gradients do not flow through what a cache has stored: only the first forward through an empty one is exact. "
        "Train without `past_key_values`, or with a `DynamicCache`"
    )
