"""Transform-coded keys or values as the kernels take them.

Legend: B batch, H key/value heads, T tokens, D head dim, N blocks of eight channels, R bytes of a row.
"""

from typing import NamedTuple

import torch


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
