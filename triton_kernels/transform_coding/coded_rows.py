"""Transform-coded keys or values as the kernels take them.

Legend: B batch, H key/value heads, T tokens, D head dim, N blocks of eight channels, R bytes of a row.
"""

from typing import Any, NamedTuple

import torch
import triton


class CodedRows(NamedTuple):
    """
    One side of a cache as rows of bytes, see `kvcache_plugins.ops.transform_coding`.

    Args:
        rows (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8):
            `[scale | block | block | ...]`; a head's rows follow each other without gaps.
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8):
            Bits of the blocks' codes.
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*):
            The channels of keys in the order of the rows.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*):
            Of the channels of keys.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16):
            What points are multiplied by: a number a channel of keys, one for all of values.
        coefficients (`torch.Tensor` of shape `[9, 6]`, float32):
            What a code of every width stands for: of the number `v = 1024 + 2 code`, which the kernel makes of its
            bits, `c = factor v + term` and `c (first + c^2 (second + c^2 third))`. Of a trellis the code is the state
            times the last one, modulo 256.
        head_dim (`int`):
            D.
        is_trellis (`bool`):
            Whether codes are those of a trellis.
    """

    rows: torch.Tensor
    widths: torch.Tensor
    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor
    coefficients: torch.Tensor
    head_dim: int
    is_trellis: bool = False


class BasisRows(NamedTuple):
    """
    One side of a cache as rows of bytes in calibrated bases, which are a layer's.

    Args:
        rows (`torch.Tensor` of shape `[B, H, at least T, R]`, uint8):
            `[scale | block | block | ...]`; a head's rows follow each other without gaps.
        widths (`torch.Tensor` of shape `[H, N]`, uint8):
            Bits of the blocks of eight components.
        basis (`torch.Tensor` of shape `[H, D, D]`, int8):
            What components are multiplied by.
        steps (`torch.Tensor` of shape `[H, D]`, float32):
            What the rows of the basis are in units of.
        factors (`torch.Tensor` of shape `[H, D]`, float32):
            What channels are then divided by.
        mean (`torch.Tensor` of shape `[H, D]`, float16):
            What is added to them.
        coefficients (`torch.Tensor` of shape `[9, 6]`, float32):
            See `CodedRows`.
        num_components (`int`):
            Those that any head has bits for.
        head_dim (`int`):
            D.
        is_trellis (`bool`):
            Whether codes are those of a trellis.
    """

    rows: torch.Tensor
    widths: torch.Tensor
    basis: torch.Tensor
    steps: torch.Tensor
    factors: torch.Tensor
    mean: torch.Tensor
    coefficients: torch.Tensor
    num_components: int
    head_dim: int
    is_trellis: bool


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
    What numbers become, by the width of their block, see `coding_tiles`.

    Args:
        coefficients (`torch.Tensor` of shape `[9, 6]`, float32):
            See `CodedRows`.
        cell_codes (`torch.Tensor` of shape `[9, cells]`, uint8):
            How many bounds lie below all of a cell.
        cell_bounds (`torch.Tensor` of shape `[9, cells]`, float32):
            The bound that lies in a cell, infinite where there is none.
    """

    coefficients: torch.Tensor
    cell_codes: torch.Tensor
    cell_bounds: torch.Tensor

    def arguments(self) -> dict[str, torch.Tensor]:
        """The kernel arguments."""
        return {
            "coefficient_ptr": self.coefficients,
            "cell_code_ptr": self.cell_codes,
            "cell_bound_ptr": self.cell_bounds,
        }


class CodingTable(NamedTuple):
    """
    How keys or values become rows by the tables of a prompt; all tensors are contiguous.

    Args:
        widths, order, mean, deviation (`torch.Tensor`):
            See `CodedRows`.
        signs (`torch.Tensor` of shape `[D, channels of a tile]`, *optional*):
            What states are multiplied with before: a Hadamard matrix of ones, of their dtype or else of float16, its
            columns at their places of a tile.
        codebook (`Codebook`):
            Of the side.
        row_size (`int`):
            R.
        head_dim (`int`):
            D.
        is_weighted (`bool`):
            Whether a token's scale is the one of least weighted error, or shrinks nothing.
    """

    widths: torch.Tensor
    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor
    signs: torch.Tensor | None
    codebook: Codebook
    row_size: int
    head_dim: int
    is_weighted: bool


class BasisCodingTable(NamedTuple):
    """
    How keys or values become rows in calibrated bases; all tensors are contiguous.

    Args:
        widths, basis, steps, factors, mean (`torch.Tensor`):
            See `BasisRows`.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8):
            Columns of the inverse, in units such that products with rows of the basis are 1.
        codebook (`Codebook`):
            Of the side.
        row_size (`int`):
            R.
        num_components, head_dim (`int`):
            K and D.
        is_weighted (`bool`):
            Whether a token's scale is the one of least weighted error, or shrinks nothing.
        num_refits (`int`):
            Times that codes are found anew for the scale that was found, at most.
    """

    widths: torch.Tensor
    basis: torch.Tensor
    steps: torch.Tensor
    factors: torch.Tensor
    mean: torch.Tensor
    inverse: torch.Tensor
    codebook: Codebook
    row_size: int
    num_components: int
    head_dim: int
    is_weighted: bool
    num_refits: int


class CodingLaunch(NamedTuple):
    """
    A launch that codes, and what it fills.

    Args:
        kernel (`triton.JITFunction`): the kernel.
        arguments (`dict[str, Any]`): all of its parameters by name.
        options (`dict[str, int]`): warps and stages.
        rows (`torch.Tensor` of shape `[B, H, T, R]`, uint8): what is filled.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    rows: torch.Tensor

    def __call__(self) -> None:
        """Launches on the current stream of the current device."""
        num_tiles = triton.cdiv(self.arguments["length"], self.arguments["BLOCK_T"])
        if num_tiles:
            self.kernel[(num_tiles * self.arguments["num_matrices"],)](**self.arguments, **self.options)
