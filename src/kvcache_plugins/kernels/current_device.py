"""Context in which launches go to the GPU of some states."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


_NO_CONTEXT = nullcontext()


@cache
def _has_several_gpus() -> bool:
    return torch.cuda.device_count() > 1


def on_device_of(states: torch.Tensor) -> AbstractContextManager[object]:
    """Make the GPU of `states` the current one. A single GPU always is, and the context takes as long as a launch."""
    return torch.cuda.device_of(states) if _has_several_gpus() else _NO_CONTEXT
