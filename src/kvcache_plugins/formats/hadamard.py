"""Rotation of head dimensions by a Hadamard matrix, which spreads large values over all channels.

A group of values that shares a scale is quantized worst when one of them is far from the others. After an orthogonal
rotation there are no such channels, and a sum of weighted values can be rotated back at the end: attention over
rotated values is rotated attention. The matrix is Sylvester's, normalized: symmetric, so its own inverse. If the
head dimension is no power of two, every stretch of the largest power of two that divides it is rotated on its own.
"""

from contextlib import nullcontext
from functools import cache

import torch


@cache
def rotation_size(head_dim: int) -> int:
    """Return the number of channels that are rotated together: the largest power of two that divides `head_dim`."""
    return head_dim & -head_dim


@cache
def hadamard_matrix(size: int, device: torch.device) -> torch.Tensor:
    """Return the normalized Hadamard matrix `[size, size]`, float32, of a power of two; brought to a device once."""
    # Made in inference mode it could never be part of a graph
    with torch.inference_mode(False):
        matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return (matrix * size**-0.5).to(device)


def rotate(states: torch.Tensor) -> torch.Tensor:
    """Rotate `states` `[..., head_dim]`, or rotate them back, in float32."""
    size = rotation_size(states.shape[-1])
    # With more dimensions it may be as many products of matrices as there are tokens
    return multiply(states.reshape(-1, size), hadamard_matrix(size, states.device)).view(states.shape)


def multiply(states: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply `states` `[..., D]` with matrices `[..., D, K]` in float32, whatever autocast asks for."""
    # Autocast would round operands to its dtype, partial sums of attention too. The device `meta`, on which sizes are
    # predicted, has no autocast
    with nullcontext() if states.is_meta else torch.autocast(states.device.type, enabled=False):
        return states.float() @ matrix
