"""Where gradients end: at what a cache has stored."""

import torch


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
