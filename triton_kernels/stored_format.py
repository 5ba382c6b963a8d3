"""The stored tokens that kernels read: constants, and protocols of the objects that hold the tensors.

The package's own objects are those of `kvcache_plugins.formats`; a test compares the constants. Any objects with these
attributes will do.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D head dim, P bytes of a token's codes, R rank, N
outliers of a chunk or blocks of eight numbers, K numbers of a token that are coded.
"""

from typing import Protocol

import torch


# The byte that is a token's scale: steps an octave, the byte of a scale of one, and the last byte
SCALE_STEPS = 16.0
SCALE_OFFSET = 128
LAST_SCALE = 255
# Below that share of its value without error, `z.q` says nothing about a scale
LEAST_GAIN = 0.3
# Tokens whose outliers are stored together
OUTLIER_TILE = 64
# Planes of the codes of each width, lowest bits first: (bits in the plane, shift of the plane within the code)
BIT_PLANES = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}


class StoredGroups(Protocol):
    """
    Chunks of keys or values in codes that share scales. The batch is the first dimension of tensors, the chunk the
    third.

    Attributes:
        codes (`torch.Tensor` of shape `[B, H, M, L, P]`, uint8): packed codes.
        scale, zero (`torch.Tensor` of shape `[B, H, M, groups, D]` or `[B, H or 1, M, L, groups]`, float16): a group's
            step and minimum.
        low_rank_a, low_rank_b (`torch.Tensor` of shape `[B, H, M, L, R]` and `[B, H, M, D, R]`, float16, *optional*):
            factors of the low-rank correction.
        outlier_indices, outlier_values (`torch.Tensor` of shape `[B, 1, M, N]`, int16 or int32 and float16,
            *optional*): token within a tile of `OUTLIER_TILE` times the next power of two from D on, plus the channel;
            and the correction there. Tiles follow each other, and within a tile the heads.
        outlier_offsets (`torch.Tensor` of shape `[B, 1, M, tiles * H + 1]`, int32, *optional*): first and last outlier
            of each tile and head.
        nbits (`int`): bits a code.
        axis (`str`): `"channel"` where tokens of a channel share a scale, `"token"` where channels of a token do.
        group_size (`int`, *optional*): values of a group, where it is not all.
        head_dim (`int`): D.
    """

    @property
    def codes(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    @property
    def zero(self) -> torch.Tensor: ...
    @property
    def low_rank_a(self) -> torch.Tensor | None: ...
    @property
    def low_rank_b(self) -> torch.Tensor | None: ...
    @property
    def outlier_indices(self) -> torch.Tensor | None: ...
    @property
    def outlier_values(self) -> torch.Tensor | None: ...
    @property
    def outlier_offsets(self) -> torch.Tensor | None: ...
    @property
    def nbits(self) -> int: ...
    @property
    def axis(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def head_dim(self) -> int: ...


class RowBasis(Protocol):
    """
    A basis for every head, in which tokens are coded; K components have bits.

    Attributes:
        factors (`torch.Tensor` of shape `[H, D]`, float32): factors of the channels.
        vectors (`torch.Tensor` of shape `[H, D, D]`, int8): rows of the basis of such products, those of most energy
            first.
        steps (`torch.Tensor` of shape `[H, D]`, float32): units of the basis' rows.
        inverse (`torch.Tensor` of shape `[H, K, D]`, int8): columns of the inverse, in units such that products with
            rows of the basis are 1.
        num_components (`int`): components that are coded, K.
    """

    @property
    def factors(self) -> torch.Tensor: ...
    @property
    def vectors(self) -> torch.Tensor: ...
    @property
    def steps(self) -> torch.Tensor: ...
    @property
    def inverse(self) -> torch.Tensor: ...
    @property
    def num_components(self) -> int: ...


class RowLayout(Protocol):
    """
    The format of one side's rows. B is 1 where all sequences share it, as they do a basis.

    Attributes:
        order (`torch.Tensor` of shape `[B, H, D]`, uint8 or int16, *optional*): the channels by falling energy, as
            rows have them.
        mean (`torch.Tensor` of shape `[B, H, D]`, float16, *optional*): the mean that is subtracted first.
        deviation (`torch.Tensor` of shape `[B, H, D or 1]`, float16, *optional*): divisors of the channels.
        widths (`torch.Tensor` of shape `[B, H, N]`, uint8): bits of the blocks of eight numbers, in that order.
        row_size (`int`): bytes of a row, one more than the sum of a head's widths.
        head_dim (`int`): D.
        is_weighted (`bool`): True if the scale is the one of least weighted error, as of keys; otherwise it shrinks
            nothing.
        basis (`RowBasis`, *optional*): the basis that tokens are coded in.
        num_refits (`int`): times that codes are found anew for the scale that was found.
        num_coefficients (`int`): numbers of a token that are coded, K.
    """

    @property
    def order(self) -> torch.Tensor | None: ...
    @property
    def mean(self) -> torch.Tensor | None: ...
    @property
    def deviation(self) -> torch.Tensor | None: ...
    @property
    def widths(self) -> torch.Tensor: ...
    @property
    def row_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def is_weighted(self) -> bool: ...
    @property
    def basis(self) -> RowBasis | None: ...
    @property
    def num_refits(self) -> int: ...
    @property
    def num_coefficients(self) -> int: ...
