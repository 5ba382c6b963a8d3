"""Layout of stored keys or values: constants that a kernel is compiled for, and its arguments.

Legend as in `attend.py`.

Codes are packed by slabs of channels: at 2 bits, byte `j` has those of channels `j`, `j + D/4`, `j + D/2`, `j + 3D/4`.
3 bits are a plane of 2 and one of 1. A kernel loads words of two bytes (of one where rows or slabs are odd or narrow)
and takes a bit field of a word at a time: that is one code each of channels as far apart as words have bytes. All
channels of a field share a group, so a row is loaded in pieces that no group's border cuts.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton

from ..arithmetic import block_size
from ..launch import tensor_arguments
from ..stored_format import BIT_PLANES, StoredGroups


class Field(NamedTuple):
    """
    A bit field of a word: the codes of channels that lie as far apart as words have bytes.

    Args:
        down (`int`): how far a word is shifted to the right.
        bit (`int`): the field's lowest bit after that.
        width (`int`): its bits.
        shift (`int`): of its bits within the code.
        first_channel (`int`): whose code the first word has.
        group (`int`): the group of all its channels.
    """

    down: int
    bit: int
    width: int
    shift: int
    first_channel: int
    group: int


class Piece(NamedTuple):
    """
    Words of a row that are loaded at once.

    Args:
        first_byte, num_words (`int`): which.
        unit (`int`): bytes of a word, 1 or 2.
        block (`int`): words of the block that covers them.
        plane (`int`): the plane that they are of.
        fields (`tuple[Field, ...]`): what they are taken apart into.
    """

    first_byte: int
    num_words: int
    unit: int
    block: int
    plane: int
    fields: tuple[Field, ...]


class SideLayout(NamedTuple):
    """
    Layout of stored keys or values.

    Args:
        dim (`int`): D.
        pieces (`tuple[Piece, ...]`): what rows of codes are taken apart into.
        codes_stride_t, scale_stride_s (`int`): from one row to the next. They hardly vary, and addresses that differ
            by constants share a register.
        by_channel (`bool`): whether tokens share a scale.
        num_groups (`int`): of a token, where they do not.
        tokens_per_group (`int`): that share a scale, 0 if it is all of a chunk or none.
        ranks (`tuple[int, ...]`): what R may be, of which there are two where prompts and chunks of decoded tokens
            share a kernel, none without low rank.
        block_rank (`int`): the block that covers R.
        has_outliers (`bool`): whether there are any.
        channel_bits (`int`): of an outlier's index.
    """

    dim: int
    pieces: tuple[Piece, ...]
    codes_stride_t: int
    scale_stride_s: int
    by_channel: bool
    num_groups: int
    tokens_per_group: int
    ranks: tuple[int, ...]
    block_rank: int
    has_outliers: bool
    channel_bits: int


# The smallest side of an operand of `tl.dot`
_MIN_WORDS = 16
# Of more at once registers would run out
_MAX_PIECE = 32


@functools.cache
def _pieces(head_dim: int, nbits: int, channels_per_group: int, is_even: bool) -> tuple[Piece, ...]:
    """
    List what is loaded at once of a row of codes.

    Args:
        head_dim, nbits (`int`): channels and bits a code.
        channels_per_group (`int`): consecutive channels of a token that share a scale; `head_dim` if all do, or none.
        is_even (`bool`): whether every row begins at an even address.
    """
    slabs = [-(-head_dim * width // 8) for width, _ in BIT_PLANES[nbits]]
    sizes = [math.gcd(slab, channels_per_group) if channels_per_group < head_dim else slab for slab in slabs]
    is_even = is_even and all(size % 2 == 0 for size in [*slabs, *sizes])
    pieces = []
    start = 0
    for plane, (slab, size) in enumerate(zip(slabs, sizes, strict=True)):
        # Of fewer words a block would be filled with nothing
        unit = 2 if is_even and size >= 2 * _MIN_WORDS else 1
        while size > _MAX_PIECE and size % (2 * unit) == 0:
            size //= 2
        for first in range(0, slab, size):
            num_words = size // unit
            block = max(_MIN_WORDS, triton.next_power_of_2(num_words))
            fields = _fields(plane, nbits, first, slab, unit, head_dim, channels_per_group)
            pieces.append(Piece(start + first, num_words, unit, block, plane, fields))
        start += slab
    return tuple(pieces)


def _fields(
    plane: int, nbits: int, first: int, slab: int, unit: int, head_dim: int, channels_per_group: int
) -> tuple[Field, ...]:
    """List the fields that words are taken apart into, from byte `first` of a plane's slab on."""
    width, shift = BIT_PLANES[nbits][plane]
    fields = []
    for byte in range(unit):
        for bit in range(0, 8, width):
            channel = bit // width * slab + first + byte
            if channel < head_dim:
                fields.append(Field(8 * byte, bit, width, shift, channel, channel // channels_per_group))
    return tuple(fields)


# Of prompts and of decoded tokens by default: one kernel reads both
_RANKS = (4, 2)


def side_arguments(name: str, side: StoredGroups) -> dict[str, object]:
    """The kernel arguments for the keys or the values."""
    if side.scale.stride() != side.zero.stride():
        raise ValueError("`scale` and `zero` must have the same strides")
    return {
        **tensor_arguments(f"{name}_codes", side.codes, "bhm"),
        f"{name}_scale_ptr": side.scale,
        f"{name}_zero_ptr": side.zero,
        **{f"{name}_scale_stride_{dim}": stride for dim, stride in zip("bhm", _scale_strides(side), strict=True)},
        **tensor_arguments(f"{name}_a", side.low_rank_a, "bhm"),
        **tensor_arguments(f"{name}_b", side.low_rank_b, "bhm"),
        **_entry_arguments(name, side),
        f"{name}_rank": _rank(side),
        name.upper(): side_layout(side),
    }


def side_layout(side: StoredGroups) -> SideLayout:
    """Make the constants that a kernel is compiled for of a side's tensors."""
    by_channel = side.axis == "channel"
    num_groups = 1 if by_channel else side.scale.shape[4]
    rank = _rank(side)
    return SideLayout(
        dim=side.head_dim,
        pieces=_pieces(side.head_dim, side.nbits, side.head_dim // num_groups, _is_even(side.codes)),
        codes_stride_t=side.codes.stride(3),
        scale_stride_s=side.scale.stride(3),
        by_channel=by_channel,
        num_groups=0 if by_channel else num_groups,
        tokens_per_group=tokens_per_group(side),
        ranks=() if rank == 0 else _RANKS if rank in _RANKS else (rank,),
        block_rank=block_size(rank),
        has_outliers=has_outliers(side),
        channel_bits=(side.head_dim - 1).bit_length(),
    )


def _scale_strides(side: StoredGroups) -> list[int]:
    """Return strides of sequences, heads and chunks in rows of scales, so that each is known to begin at a row."""
    row = side.scale.stride(3)
    strides = [
        0 if size == 1 else stride for size, stride in zip(side.scale.shape[:3], side.scale.stride(), strict=False)
    ]
    if any(stride % row for stride in strides):
        raise ValueError("`scale` has to consist of rows as far apart as those of a chunk")
    return [stride // row for stride in strides]


def _rank(side: StoredGroups) -> int:
    """R, 0 without a low-rank part."""
    a, b = side.low_rank_a, side.low_rank_b
    if a is None or b is None:
        return 0
    if any(factor.stride()[3:] != (factor.shape[4], 1) for factor in (a, b)):
        raise ValueError("rows of `low_rank_a` and of `low_rank_b` must lie behind each other")
    return a.shape[4]


def has_outliers(side: StoredGroups) -> bool:
    """Return whether a side has outliers."""
    return side.outlier_indices is not None and side.outlier_indices.shape[3] > 0


def tokens_per_group(side: StoredGroups) -> int:
    """Tokens that share a scale, 0 if it is all of a chunk or none."""
    num_groups = side.scale.shape[3]
    if side.axis == "channel" and side.group_size is not None:
        # A chunk of one group is read by the kernel of many
        return side.group_size
    return 0 if side.axis == "token" or num_groups == 1 else side.codes.shape[3] // num_groups


@dataclass(frozen=True, eq=False)
class _JoinedChunks:
    """A `StoredGroups` of one chunk, with neither low rank nor outliers."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    nbits: int
    axis: str
    group_size: int | None
    head_dim: int
    low_rank_a: torch.Tensor | None = None
    low_rank_b: torch.Tensor | None = None
    outlier_indices: torch.Tensor | None = None
    outlier_values: torch.Tensor | None = None
    outlier_offsets: torch.Tensor | None = None


def join_chunks(side: StoredGroups) -> StoredGroups:
    """The side with all chunks as one, where chunks hold nothing but codes and scales that lie behind each other."""
    tensors = (side.codes, side.scale, side.zero)
    is_plain = not has_outliers(side) and side.low_rank_a is None
    if not is_plain or any(each.shape[2] > 1 and each.stride(2) != each.shape[3] * each.stride(3) for each in tensors):
        return side
    codes, scale, zero = (each.flatten(2, 3).unsqueeze(2) for each in tensors)
    return _JoinedChunks(codes, scale, zero, side.nbits, side.axis, side.group_size, side.head_dim)


def _is_even(codes: torch.Tensor) -> bool:
    return codes.data_ptr() % 2 == 0 and all(stride % 2 == 0 for stride in codes.stride()[:4])


def _entry_arguments(name: str, side: StoredGroups) -> dict[str, object]:
    indices, values, offsets = side.outlier_indices, side.outlier_values, side.outlier_offsets
    if indices is None or values is None or offsets is None:
        indices = values = offsets = None
    elif indices.stride() != values.stride():
        raise ValueError("`outlier_indices` and `outlier_values` must have the same strides")
    return {
        f"{name}_entry_index_ptr": indices,
        f"{name}_entry_value_ptr": values,
        f"{name}_entry_stride_b": 0 if indices is None else indices.stride(0),
        f"{name}_entry_stride_m": 0 if indices is None else indices.stride(2),
        f"{name}_offset_ptr": offsets,
        f"{name}_offset_stride_b": 0 if offsets is None else offsets.stride(0),
        f"{name}_offset_stride_m": 0 if offsets is None else offsets.stride(2),
    }
