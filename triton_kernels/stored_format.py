"""Stored codes and rows, without Triton: constants, which tests compare with those in C, and the tensors of codecs.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, P bytes of a token's codes, R rank, N
outliers of a chunk or blocks of eight numbers, K numbers of a token that are coded.
"""

from dataclasses import dataclass

import torch


# Of the byte that is a token's scale: steps an octave, the byte of a scale of one, the last one that tokens may exceed
SCALE_STEPS, SCALE_OFFSET, LAST_SCALE = 16.0, 128, 255
# Below that share of what it would be without error, `z.q` says nothing about a scale
LEAST_GAIN = 0.3
# Tokens whose outliers are stored together: a place within a tile of up to 512 channels then fits 16 bits
OUTLIER_TILE = 64


# Equal if the same object: kernels keep what they have prepared for one in dictionaries
@dataclass(frozen=True, eq=False)
class StoredGroups:
    """
    Chunks of keys or values in codes that share scales. The batch is the first dimension of tensors, the chunk the
    third.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, M, L, P]`, uint8): packed codes.
        scale, zero (`torch.Tensor` of shape `[B, H, M, groups, D]` or `[B, H or 1, M, L, groups]`, float16): a group's
            step and minimum.
        low_rank_a, low_rank_b (`torch.Tensor` of shape `[B, H, M, L, R]` and `[B, H, M, D, R]`, float16, *optional*):
            factors of what is added to the chunk's tokens.
        outlier_indices, outlier_values (`torch.Tensor` of shape `[B, 1, M, N]`, int16 or int32 and float16,
            *optional*): token within a tile of `OUTLIER_TILE` times the next power of two from D on, plus the channel;
            and what is added there. Tiles follow each other, and of a tile the heads.
        outlier_offsets (`torch.Tensor` of shape `[B, 1, M, tiles * H + 1]`, int32, *optional*): where those of a tile
            and head begin and end.
        nbits (`int`): bits a code.
        axis (`str`): `"channel"` where tokens of a channel share a scale, `"token"` where channels of a token do.
        group_size (`int`, *optional*): how many do, where it is not all.
        head_dim (`int`): D.
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
    group_size: int | None
    head_dim: int


@dataclass(frozen=True, eq=False)
class RowBasis:
    """
    A basis for every head, in which tokens are coded; K components have bits.

    Attributes:
        factors (`torch.Tensor` of shape `[H, D]`, float32): what channels are multiplied by.
        vectors (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, those of most energy
            first.
        steps (`torch.Tensor` of shape `[H, D]`, float32): what its rows are in units of.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8): columns of the inverse, in units such that products with
            rows of the basis are 1.
    """

    factors: torch.Tensor
    vectors: torch.Tensor
    steps: torch.Tensor
    inverse: torch.Tensor

    @property
    def num_components(self) -> int:
        """Components that are coded, K."""
        return self.inverse.shape[1]


@dataclass(frozen=True, eq=False)
class RowLayout:
    """
    How the tokens of one side are coded as rows. B is 1 where all sequences share it, as they do a basis.

    Attributes:
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*): the channels by falling energy, as
            rows have them.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): what is taken off first.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16, *optional*): what channels are divided by.
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8): bits of the blocks of eight numbers, in that order.
        row_size (`int`): bytes of a row, one more than the sum of a head's widths.
        head_dim (`int`): D.
        is_weighted (`bool`): whether the scale is the one of least weighted error, as of keys, or shrinks nothing.
        basis (`RowBasis`, *optional*): in which they are coded.
        num_refits (`int`): times that codes are found anew for the scale that was found. Few tokens need it: those of
            which one channel is far larger than the others. Their codes would end before it, and they are the ones
            that many others attend to.
    """

    order: torch.Tensor | None
    mean: torch.Tensor | None
    deviation: torch.Tensor | None
    widths: torch.Tensor
    row_size: int
    head_dim: int
    is_weighted: bool
    basis: RowBasis | None = None
    num_refits: int = 0

    @property
    def num_coded(self) -> int:
        """Numbers of a token that are coded, K."""
        return self.head_dim if self.basis is None else self.basis.num_components
