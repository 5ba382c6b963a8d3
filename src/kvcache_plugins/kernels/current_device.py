"""Context in which launches go to the GPU of some states."""

from contextlib import AbstractContextManager, nullcontext

import torch


_NO_CONTEXT = nullcontext()


def on_device_of(states: torch.Tensor) -> AbstractContextManager[object]:
    """Make the GPU of `states` the current one. A single GPU always is, and the context takes as long as a launch."""
    return torch.cuda.device_of(states) if torch.cuda.device_count() > 1 else _NO_CONTEXT
