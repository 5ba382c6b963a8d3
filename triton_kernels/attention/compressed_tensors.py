"""Compressed keys or values as the kernels take them.

Legend as in `attend.py`.
"""

from typing import NamedTuple

import torch


class CompressedTensors(NamedTuple):
    """
    Compressed keys or values; every tensor may be a strided view whose last dimension is contiguous.

    Args:
        codes (`torch.Tensor` of shape `[B, H, M, L, P]`, uint8):
            Codes packed by slabs, see `kvcache_plugins.codecs.quantization`.
        scale, zero (`torch.Tensor` of shape `[B, H, M, G, D]` or `[B, H or 1, M, L, G]`):
            A value is `zero + scale * code`. Float16, with the same strides, in the first shape for axis `"channel"`.
        low_rank_a, low_rank_b (`torch.Tensor` of shapes `[B, H, M, La, R]` and `[B, H, M, D, R]`, *optional*):
            `A B^T` is added to the chunk's last La tokens.
        outlier_indices, outlier_values (`torch.Tensor` of shape `[B, 1, M, N]`, *optional*):
            What is added to single values, sorted by tile of 64 tokens and head. An index is
            `(token within the tile << ceil(log2(D))) | channel`.
        outlier_offsets (`torch.Tensor` of shape `[B, 1, M, tiles * H + 1]`, int32, *optional*):
            Where the entries of each tile and head begin.
        nbits (`int`):
            Bits a code: 2, 3, 4 or 8.
        axis (`str`):
            `"channel"` if tokens of one channel share a scale, `"token"` if channels of one token do.
        group_size (`int`, *optional*):
            Tokens or channels that do; `None` if it is all of a chunk or a head, however many.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    low_rank_a: torch.Tensor | None
    low_rank_b: torch.Tensor | None
    outlier_indices: torch.Tensor | None
    outlier_values: torch.Tensor | None
    outlier_offsets: torch.Tensor | None
    nbits: int
    axis: str
    group_size: int | None = None
