"""Rows of bytes, and all that kernels read beside them.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

from typing import NamedTuple

import torch

from ..stored_format import RowLayout


class CodedRows(NamedTuple):
    """
    One side of a cache as rows of bytes.

    Args:
        rows (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8): `[scale | block | block | ...]`; a head's rows
            follow each other without gaps.
        layout (`RowLayout`): what they mean.
        coefficients (`torch.Tensor` of shape `[9, 4]`, float32): `factor, first, second, third` of every width, by
            which a code stands for `c (first + c^2 (second + c^2 third))` of the number `c = (2 code + 1) factor - 1`.
    """

    rows: torch.Tensor
    layout: RowLayout
    coefficients: torch.Tensor


class RotaryAngles(NamedTuple):
    """
    The angles of keys' rotary embedding. Those of a position are the sum of two: of its remainder, and of the rest.

    Attention in calibrated bases takes them by pairs of channels, D / 2 of them (rounded up) in the place of D: those
    of the pairs' first channels.

    Args:
        partners (`torch.Tensor` of shape `[D]`, int32): the other channel of every channel's pair, itself where it has
            none; or by pairs, `[2, D / 2]`, their first and second channels. Channels that are not rotated are paired
            with each other; of an odd one the second is D.
        near (`torch.Tensor` of shape `[P, 2, D]`, float32): cosines and signed sines of the positions 0 to P - 1.
        far (`torch.Tensor` of shape `[at least positions / P, 2, D]`, float32): the same of the multiples of P.
    """

    partners: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor


class Codebook(NamedTuple):
    """
    Codes of numbers, by the width of their block, see `coding_tiles`.

    Args:
        coefficients (`torch.Tensor` of shape `[9, 4]`, float32): what they stand for, as in `CodedRows`.
        cell_codes (`torch.Tensor` of shape `[9, cells]`, uint8): how many bounds lie below all of a cell.
        cell_bounds (`torch.Tensor` of shape `[9, cells]`, float32): the bound in a cell, infinite where there is none.
    """

    coefficients: torch.Tensor
    cell_codes: torch.Tensor
    cell_bounds: torch.Tensor
