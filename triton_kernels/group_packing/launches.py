"""State that tokens are pushed into, and the constants that kernels are compiled for.

Legend: B batch, H key/value heads, M chunks, L tokens a chunk, D and E head dims of keys and values, R rank, K
outliers of a channel of keys, or of a token of values, on each side.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ..stored_format import BIT_PLANES, OUTLIER_TILE, StoredGroups


# Fewest rows of a product on tensor cores
_LEAST_TOKENS = 16
# Numbers of a chunk and head that registers of eight warps hold, tokens times channels
_MOST_NUMBERS = 64 * 256
# Columns of factors that are computed side by side
_MOST_RANK = 8
# Numbers of a token, of all heads, that registers hold
_MOST_CHANNELS = 2**15


@dataclass(frozen=True, eq=False)
class GroupPushState:
    """
    Tensors and options of a layer of chunks that new tokens are pushed into. All tensors are contiguous.

    Attributes:
        tail (two `torch.Tensor` of shape `[B, H, L, D or E]`): newest tokens, exact, oldest first.
        chunks (two `StoredGroups`): chunks of keys and of values, with capacity for more.
        counters (`torch.Tensor` of shape `[2, B, H, 4]`, int64): tokens in chunks, 0, tokens of the tail, and tokens
            of the sequence. Every program has its own set, all with the same numbers.
        starts (two `torch.Tensor` of shape `[D or E, R]`, float32, *optional*): first matrices of the power iteration.
        num_iterations (`int`): power iterations.
        spreads_errors (two `bool`): True if errors that tokens share are spread where there is no low rank.
        signs (`torch.Tensor` of shape `[E, next power of two]`, *optional*): Hadamard matrix of ones and minus ones
            that values are rotated by.
    """

    tail: tuple[torch.Tensor, torch.Tensor]
    chunks: tuple[StoredGroups, StoredGroups]
    counters: torch.Tensor
    starts: tuple[torch.Tensor | None, torch.Tensor | None]
    num_iterations: int
    spreads_errors: tuple[bool, bool]
    signs: torch.Tensor | None


class Plane(NamedTuple):
    """
    Bits of all codes of a token, in slabs of channels.

    Args:
        width (`int`): bits of a code.
        shift (`int`): place of the bits within the code.
        first_byte (`int`): first byte within a token's codes.
        num_bytes (`int`): bytes, as many as a slab has channels.
        block (`int`): the power of two that covers them.
    """

    width: int
    shift: int
    first_byte: int
    num_bytes: int
    block: int


class PackedSide(NamedTuple):
    """
    Constants of the chunks of keys or of values.

    Args:
        is_key (`bool`): True if outliers are those of a channel, not of a token over all heads.
        dim, block_dim (`int`): channels, and the power of two that covers them.
        length, block_length (`int`): L, and the power of two that covers it.
        levels (`int`): the largest code.
        row_size (`int`): bytes of a token's codes.
        planes (`tuple[Plane, ...]`): planes of the codes.
        by_channel (`bool`): True if tokens of a channel share a scale, not channels of a token.
        is_shared (`bool`): True if all heads of a token share one.
        group_size, num_groups (`int`): values of a group, and groups of a channel or a token.
        rank (`int`): R, 0 without low rank.
        num_outliers (`int`): K, 0 without outliers.
        num_entries (`int`): outliers of a chunk, all heads together.
        channel_bits (`int`): bits of the channel in the index of an outlier.
        spreads (`bool`): True if errors that tokens share are spread.
        is_rotated (`bool`): True if states are rotated first.
        rotation (`float`): factor of a product with the signs.
    """

    is_key: bool
    dim: int
    block_dim: int
    length: int
    block_length: int
    levels: int
    row_size: int
    planes: tuple[Plane, ...]
    by_channel: bool
    is_shared: bool
    group_size: int
    num_groups: int
    rank: int
    num_outliers: int
    num_entries: int
    channel_bits: int
    spreads: bool
    is_rotated: bool
    rotation: float


def packed_side(side: StoredGroups, *, is_key: bool, spreads: bool, is_rotated: bool) -> PackedSide:
    """Make the constants of one side's chunks."""
    num_heads, length, row_size = side.codes.shape[1], side.codes.shape[3], side.codes.shape[4]
    dim = side.head_dim
    by_channel = side.axis == "channel"
    is_shared = not by_channel and side.group_size is None
    # Values of a group that lie within one head
    own = length if by_channel else dim
    group_size = side.group_size or own
    rank = 0 if side.low_rank_a is None else side.low_rank_a.shape[4]
    num_entries = 0 if side.outlier_indices is None else side.outlier_indices.shape[3]
    num_lists = num_heads * dim if is_key else length
    return PackedSide(
        is_key=is_key,
        dim=dim,
        block_dim=triton.next_power_of_2(dim),
        length=length,
        block_length=max(_LEAST_TOKENS, triton.next_power_of_2(length)),
        levels=2**side.nbits - 1,
        row_size=row_size,
        planes=_planes(dim, side.nbits),
        by_channel=by_channel,
        is_shared=is_shared,
        group_size=group_size,
        num_groups=own // group_size,
        rank=rank,
        num_outliers=num_entries // (2 * num_lists),
        num_entries=num_entries,
        channel_bits=(dim - 1).bit_length(),
        spreads=spreads and not rank and length >= 16,
        is_rotated=is_rotated,
        rotation=(dim & -dim) ** -0.5,
    )


def _planes(dim: int, nbits: int) -> tuple[Plane, ...]:
    planes: list[Plane] = []
    first_byte = 0
    for width, shift in BIT_PLANES[nbits]:
        num_bytes = -(-dim * width // 8)
        planes.append(Plane(width, shift, first_byte, num_bytes, triton.next_power_of_2(num_bytes)))
        first_byte += num_bytes
    return tuple(planes)


def explain_limits(keys: StoredGroups, values: StoredGroups, *, is_rotated: bool) -> str | None:
    """Return the reason why no kernel packs tokens into such chunks, or `None`."""
    num_heads, length = keys.codes.shape[1], keys.codes.shape[3]
    sides = (packed_side(side, is_key=side is keys, spreads=False, is_rotated=False) for side in (keys, values))
    for name, side in zip(("keys", "values"), sides, strict=True):
        if side.block_length * side.block_dim > _MOST_NUMBERS:
            return f"none packs chunks of {length} tokens with {side.dim} channels"
        if side.rank > _MOST_RANK:
            return f"none finds a correction of rank {side.rank}"
        if side.num_outliers and length > OUTLIER_TILE:
            return f"none finds outliers of chunks of more than {OUTLIER_TILE} tokens"
        crosses_heads = side.is_shared or side.num_outliers and not side.is_key
        if crosses_heads and triton.next_power_of_2(num_heads) * side.block_dim > _MOST_CHANNELS:
            return f"none packs {name} of {num_heads} heads of {side.dim} channels together"
        if crosses_heads and is_rotated and not side.is_key:
            return "none packs rotated values with outliers, or with a scale that heads share"
        if side.is_key and side.is_shared:
            return "none packs keys whose scale all heads share"
    return None
