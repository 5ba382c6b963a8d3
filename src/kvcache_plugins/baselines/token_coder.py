"""What turns tokens into rows of bytes, one for every token of a head.

Legend: B batch, H heads, T tokens, D head dim, R bytes of a row.
"""

from typing import Protocol

import torch


class TokenCoder(Protocol):
    """
    Turns every head's token into bytes by itself. States are rotated before they are coded; attention may as well be
    computed over rotated states, with a rotated query.
    """

    def rotate(self, states: torch.Tensor) -> torch.Tensor:
        """States `[..., D]` rotated, in float32."""

    def rotate_back(self, states: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""

    def encode(self, rotated: torch.Tensor) -> torch.Tensor:
        """Rows `[B, H, T, R]`, uint8, of rotated states; a `ValueError` if they are too large."""

    def decode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotated states `[B, H, T, D]`, float32."""


def bytes_of_halves(numbers: torch.Tensor) -> torch.Tensor:
    """
    `numbers` `[..., N]` in float16, as bytes `[..., 2 N]`.

    Raises:
        ValueError: if one of them is too large for that.
    """
    halves = numbers.half()
    if not halves.is_meta and not bool(halves.isfinite().all()):
        raise ValueError("keys or values are so large that their scale does not fit into float16 (65504)")
    return halves.contiguous().view(torch.uint8)


def halves_of_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `bytes_of_halves`, in float32."""
    return rows.contiguous().view(torch.float16).float()
