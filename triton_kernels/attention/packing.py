"""Where the codes of which channels lie in a token's bytes, as the kernels take them apart.

Codes are packed by slabs of channels (`kvcache_plugins.codecs.quantization`), 3 bits as a plane of 2 and one of 1. A
kernel loads words of two bytes (of one where rows or slabs are odd or narrow) and takes a bit field of a word at a
time: that is one code each of channels as far apart as words have bytes. All channels of a field share a group, so a
row is loaded in pieces that no group's border cuts.
"""

import functools
import math
from typing import NamedTuple

import triton

from .side_layout import Field, Piece


# Planes of each width, lowest bits first: (bits in the plane, shift of the plane within the code)
_PLANES = {2: ((2, 0),), 3: ((2, 0), (1, 2)), 4: ((4, 0),), 8: ((8, 0),)}
# The smallest side of an operand of `tl.dot`
_MIN_WORDS = 16
# Of more at once registers would run out
_MAX_PIECE = 32


class Packing(NamedTuple):
    """
    How rows of codes are taken apart.

    Args:
        num_planes (`int`):
            1, or 2 for 3 bits.
        pieces (`tuple[Piece, ...]`):
            What is loaded at once.
    """

    num_planes: int
    pieces: tuple[Piece, ...]


@functools.cache
def packing_of(head_dim: int, nbits: int, channels_per_group: int, is_even: bool) -> Packing:
    """
    The packing of rows of codes.

    Args:
        head_dim, nbits (`int`):
            Channels and bits a code.
        channels_per_group (`int`):
            Consecutive channels of a token that share a scale; `head_dim` if all do, or none.
        is_even (`bool`):
            Whether every row begins at an even address.
    """
    slabs = [-(-head_dim * width // 8) for width, _ in _PLANES[nbits]]
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
    return Packing(len(slabs), tuple(pieces))


def _fields(
    plane: int, nbits: int, first: int, slab: int, unit: int, head_dim: int, channels_per_group: int
) -> tuple[Field, ...]:
    """Lists the fields that words are taken apart into, from byte `first` of a plane's slab on."""
    width, shift = _PLANES[nbits][plane]
    fields = []
    for byte in range(unit):
        for bit in range(0, 8, width):
            channel = bit // width * slab + first + byte
            if channel < head_dim:
                fields.append(Field(8 * byte, bit, width, shift, channel, channel // channels_per_group))
    return tuple(fields)
