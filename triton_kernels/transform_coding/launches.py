"""Rows of bytes, and all that kernels read beside them.

Legend: B batch, H key/value heads, T tokens, D head dim, R bytes of a row.
"""

from typing import NamedTuple

import torch


class RowBasis(NamedTuple):
    """
    A basis for every head, in which tokens are coded; K components have bits.

    Args:
        factors (`torch.Tensor` of shape `[H, D]`, float32): what channels are multiplied by.
        vectors (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, over their steps.
        steps (`torch.Tensor` of shape `[H, D]`, float32): what its rows are in units of.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8): columns of the inverse, in units such that products with
            rows of the basis are 1.
    """

    factors: torch.Tensor
    vectors: torch.Tensor
    steps: torch.Tensor
    inverse: torch.Tensor


class RowLayout(NamedTuple):
    """
    How the tokens of one side are coded as rows. B is 1 where all sequences share it, as they do a basis.

    Args:
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8): bits of the blocks of eight numbers.
        row_size, head_dim (`int`): R and D.
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*): the channels as rows have them.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): what is taken off first.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16, *optional*): what channels are divided by.
        basis (`RowBasis`, *optional*): in which they are coded.
        is_weighted (`bool`): whether the scale is the one of least weighted error, as of keys, or shrinks nothing.
        is_trellis (`bool`): whether codes are those of a trellis.
        num_refits (`int`): times that codes in a basis are found anew for the scale that was found.
        coefficients (`torch.Tensor` of shape `[9, 6]`, float32): what a code of every width stands for: of the number
            `v = 1024 + 2 code`, which the kernel makes of its bits, `c = factor v + term` and
            `c (first + c^2 (second + c^2 third))`. Of a trellis the code is the state times the last one, modulo 256.
    """

    widths: torch.Tensor
    row_size: int
    head_dim: int
    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor | None
    basis: RowBasis | None
    is_weighted: bool
    is_trellis: bool
    num_refits: int
    coefficients: torch.Tensor

    @property
    def num_coded(self) -> int:
        """Numbers of a token that are coded."""
        return self.head_dim if self.basis is None else self.basis.inverse.shape[1]


class CodedRows(NamedTuple):
    """
    One side of a cache as rows of bytes.

    Args:
        rows (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8):
            `[scale | block | block | ...]`; a head's rows follow each other without gaps.
        layout (`RowLayout`):
            What they mean.
    """

    rows: torch.Tensor
    layout: RowLayout


class RotaryAngles(NamedTuple):
    """
    The angles of keys' rotary embedding. Those of a position are the sum of two: of its remainder, and of the rest.

    Args:
        partners (`torch.Tensor` of shape `[D]`, int32):
            The other channel of every channel's pair, itself where it has none.
        near (`torch.Tensor` of shape `[P, 2, D]`, float32):
            Cosines and signed sines of the positions 0 to P - 1.
        far (`torch.Tensor` of shape `[at least positions / P, 2, D]`, float32):
            The same of the multiples of P.
    """

    partners: torch.Tensor
    near: torch.Tensor
    far: torch.Tensor


class Codebook(NamedTuple):
    """
    Codes of numbers, by the width of their block, see `coding_tiles`.

    Args:
        cell_codes (`torch.Tensor` of shape `[9, cells]`, uint8): how many bounds lie below all of a cell.
        cell_bounds (`torch.Tensor` of shape `[9, cells]`, float32): the bound in a cell, infinite where there is none.
    """

    cell_codes: torch.Tensor
    cell_bounds: torch.Tensor
