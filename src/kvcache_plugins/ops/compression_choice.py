"""What compresses states: kernels, plain PyTorch, or only shapes for tensors without data."""

import torch

from .compression_steps import CompressionSteps
from .dispatch import choose_compression_kernel
from .shape_steps import ShapeSteps


def choose_steps(states: torch.Tensor, *, is_prompt: bool = False) -> CompressionSteps:
    """What compresses `states` and others on the same device, of a prompt or of chunks of tokens."""
    if states.is_meta:
        return ShapeSteps()
    if choose_compression_kernel(states) == "triton":
        # Imported late, as it needs a package that may not be there
        from .triton_compression import TritonSteps

        return TritonSteps(states.device, is_prompt=is_prompt)
    return CompressionSteps()
